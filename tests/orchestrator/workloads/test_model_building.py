"""Built-in networks: published sizes, weights that depend only on the seed, and errors that name a remedy."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestrator.catalogue.models import MODELS
from orchestrator.config.config_groups import schema_of
from orchestrator.core.errors import OrchestratorError
from orchestrator.workloads import model_building
from orchestrator.workloads.networks import classifiers

HERE = __name__


def build(config: dict[str, Any], shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, seed: int = 0) -> nn.Module:
    return model_building.build(config, input_shape=shape, classes=classes, seed=seed)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def weights(model: nn.Module) -> int:
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d))


class Noisy(nn.Module):
    """Network that draws from every global generator, as some users' networks do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, width)
        self.scale = nn.Parameter(torch.tensor([random.random(), float(np.random.rand())]))  # noqa: NPY002


def lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))


def not_a_module() -> str:
    return "a network"


def raising() -> nn.Module:
    raise RuntimeError("no weights\nat hand")


def test_lenet_300_100_has_the_published_number_of_weights() -> None:
    assert weights(classifiers.lenet_300_100((1, 28, 28), 10)) == 266_200


def test_lenet5_has_the_published_number_of_weights() -> None:
    model = classifiers.lenet5((1, 28, 28), 10)

    assert weights(model) == 430_500
    assert parameters(model) == 431_080
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_resnet20_has_the_published_number_of_parameters() -> None:
    model = classifiers.resnet20((3, 32, 32), 10)

    assert parameters(model) == 269_722
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert len([m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]) == 20


def test_shortcut_of_resnet20_subsamples_and_pads_channels_with_zeros() -> None:
    block = classifiers.resnet20((3, 32, 32), 10, width=2).get_submodule("stage2.0")
    for parameter in block.parameters():
        nn.init.zeros_(parameter)  # the block then computes relu(shortcut)
    x = torch.rand(1, 2, 4, 4)

    out = block.eval()(x)

    assert out.shape == (1, 4, 2, 2)
    assert torch.equal(out[:, 1:3], x[:, :, ::2, ::2])
    assert torch.equal(out[:, [0, 3]], torch.zeros(1, 2, 2, 2))


def test_cnn_for_digits_is_small() -> None:
    model = classifiers.cnn((1, 8, 8), 10)

    assert weights(model) == 32 * 9 + 64 * 32 * 9 + 64 * 2 * 2 * 10 == 21_280
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_mlp_of_network_slimming_normalises_hidden_layers_alone() -> None:
    model = classifiers.mlp((1, 28, 28), 10, hidden=[500, 300], batch_norm=True)

    assert [*dict(model.named_children())] == ["flatten", "fc1", "bn1", "relu1", "fc2", "bn2", "relu2", "fc3"]
    assert weights(model) == 545_000
    assert [name for name, _ in model.named_parameters() if name.startswith("fc") and "bias" in name] == ["fc3.bias"]


def test_mlp_without_biases_has_the_published_number_of_weights() -> None:
    assert parameters(classifiers.mlp((1, 28, 28), 10, hidden=[40, 20], bias=False)) == 32_360


def test_mlp_flattens_and_drops_out_between_layers() -> None:
    model = classifiers.mlp((1, 4, 4), 3, hidden=[8, 5], dropout=0.5)

    assert [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)] == [(8, 16), (5, 8), (3, 5)]
    assert [type(m) for m in model][-4:] == [nn.Linear, nn.ReLU, nn.Dropout, nn.Linear]
    assert next(name for name, _ in model.named_parameters()) == "fc1.weight"


@pytest.mark.parametrize("name", ["lenet_300_100", "lenet5"])
def test_lenets_have_gaussian_glorot_weights_and_zero_biases(name: str) -> None:
    model = build({"kind": name, "input_shape": None, "classes": None})
    layer = model.fc1
    assert isinstance(layer, nn.Linear)

    expected = math.sqrt(2 / (layer.in_features + layer.out_features))
    assert layer.weight.std().item() == pytest.approx(expected, rel=0.01)
    assert layer.weight.abs().max().item() > 3 * expected  # uniform draws stay below sqrt(3)
    assert torch.count_nonzero(layer.bias) == 0


@pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in ("gpt", "huggingface", "smollm2", "timm", "yolo")]
)
def test_every_built_in_is_filled_from_the_data_and_depends_on_the_seed_alone(name: str) -> None:
    config = dict(vars(schema_of("model", name)()))
    torch.manual_seed(1)
    first = build(config, (3, 32, 32), 7, seed=5)
    state = torch.get_rng_state()
    again = build(config, (3, 32, 32), 7, seed=5)
    other = build(config, (3, 32, 32), 7, seed=6)

    shape = (1, 7 + 4, 8, 8) if name == "centernet" else (1, 7)  # scores of classes and a box for each cell
    assert first.eval()(torch.zeros(1, 3, 32, 32)).shape == shape
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_are_those_of_manual_seed() -> None:
    torch.manual_seed(11)
    expected = nn.Linear(2, 3).weight

    assert torch.equal(
        build({"_target_": f"{HERE}.Noisy", "width": 3}, seed=11).get_parameter("linear.weight"), expected
    )


def test_python_and_numpy_draws_follow_the_seed_and_are_restored() -> None:
    config = {"_target_": f"{HERE}.Noisy", "width": 3}
    before = (random.getstate(), str(np.random.get_state()))  # noqa: NPY002

    scales = [build(config, seed=seed).get_parameter("scale") for seed in (3, 3, 4)]

    assert torch.equal(scales[0], scales[1])
    assert not torch.equal(scales[0], scales[2])
    assert (random.getstate(), str(np.random.get_state())) == before  # noqa: NPY002


def test_given_shape_and_classes_are_kept_and_nested_targets_are_built() -> None:
    config = {
        "name": "mine",
        "kind": "mlp",
        "input_shape": [4],
        "classes": None,
        "hidden": [2],
    }
    assert build(config, classes=6).get_parameter("fc1.weight").shape == (2, 4)

    nested = {
        "_target_": "torch.nn.Sequential",
        "_args_": [{"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 1}],
    }
    assert isinstance(build(nested).get_submodule("0"), nn.Linear)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"_target_": f"{HERE}.not_a_module"}, ["model._target_", "not_a_module", "torch.nn.Module", "str"]),
        ({"_target_": f"{HERE}.raising"}, ["model._target_", "RuntimeError: no weights at hand"]),
        ({"_target_": f"{HERE}.lazy"}, ["model._target_", "1.weight belongs to a lazy layer; give the layer its"]),
        ({"_target_": f"{HERE}.absent"}, ["model._target_", "absent"]),
        (
            {"kind": "mlp", "input_shape": None, "classes": None, "hiden": [3]},
            ["hiden"],
        ),
        (
            {"kind": "cnn", "input_shape": [1, 3, 3], "classes": 2},
            ["[1, 3, 3]", "4 pixels"],
        ),
        ({"kind": "lenet5", "input_shape": [64], "classes": 2}, ["[64]", "mlp"]),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_in_a_sentence(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(OrchestratorError) as caught:
        build(config)

    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
    assert "HYDRA_FULL_ERROR" not in str(caught.value)


def test_a_module_that_a_target_imports_in_vain_is_named_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "importing.py").write_text("import math\nimport not_installed_lib\ndef net(): pass\n")
    (tmp_path / "importing_late.py").write_text("def net():\n    import not_installed_lib\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("importing", "importing_late"):
        with pytest.raises(OrchestratorError) as caught:
            build({"_target_": f"{module}.net"})

        assert str(caught.value) == (
            f"`model._target_` (={module}.net) could not be created: {tmp_path / module}.py, line 2, imports "
            "not_installed_lib, which cannot be found; install it."
        )
    with pytest.raises(OrchestratorError, match=r"ModuleNotFoundError: No module named 'not_here'; check the target"):
        build({"_target_": "not_here.net"})
