"""Each format gives the masked network's outputs, also without this project installed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pruning
from orchestrator.core.specs import PruneFields
from orchestrator.deploy.checked_writing import CODECS, Masked
from orchestrator.deploy.formats import sparse
from orchestrator.deploy.formats.format import ExportError, call_values, called_with, difference
from orchestrator.workloads import model_building
from orchestrator.workloads.splits import TensorSplit
from pruning.catalogue import rows
from pruning.graph.tracing import plain_copy
from pruning.kernels.compiling import KernelsUnavailable

LINEAR = PruneFields(("Linear", "Conv2d"))
WITHOUT_THE_PROJECT = """
import sys
sys.path.insert(0, "")
sys.modules.update({hidden})
import torch, safetensors.torch, safetensors.numpy
"""


def built(kind: str, shape: tuple[int, ...], **keys: Any) -> nn.Module:
    """Return a built-in network with half of the units masked in all layers except the last."""
    node = {"kind": kind, "input_shape": None, "classes": None, **keys}
    model = model_building.build(node, input_shape=shape, classes=5, seed=0).eval()
    for each in model_building.prunable(model, LINEAR)[:-1]:
        pruning.ln_structured(each.module, each.parameter, 0.5, n=2, dim=0)
    return model


NETWORKS = {
    "mlp": ((1, 6, 6), {"hidden": [12], "batch_norm": True, "dropout": 0.5}),
    "cnn": ((1, 8, 8), {"channels": [4, 6]}),
    "lenet5": ((1, 16, 16), {}),
    "resnet20": ((3, 8, 8), {"width": 4}),
    "gpt": ((6,), {"layers": 1, "heads": 2, "width": 8, "context": None, "dropout": 0.1}),
}
FORMS = [name for name, each in CODECS.items() if not each.row.builder]
"""Formats that hold any network."""
QUICK = [("cnn", form) for form in FORMS] + [("gpt", "safetensors")]
SLOW = [(kind, form) for kind in NETWORKS for form in FORMS if (kind, form) not in QUICK]


def drawn(shape: tuple[int, ...], batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    if len(shape) == 1:
        return torch.randint(0, 5, (batch, *shape), generator=generator)
    return torch.randn(batch, *shape, generator=generator)


@cache
def shrunk(kind: str) -> tuple[nn.Module, nn.Module]:
    """Return a pruned network and its shrunk version."""
    shape, keys = NETWORKS[kind]
    model = built(kind, shape, **keys)
    return model, pruning.shrink(model, drawn(shape, 3))


@pytest.mark.parametrize(("kind", "form"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_a_shrunk_network_gives_the_masked_one_s_outputs_for_any_batch(kind: str, form: str, tmp_path: Path) -> None:
    (model, smaller), chosen, shape = shrunk(kind), CODECS[form], NETWORKS[kind][0]
    example = called_with(model, (drawn(shape, 3), None))

    chosen.write(smaller, example, tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(chosen.files)
    assert not any(b"site-packages" in path.read_bytes() for path in tmp_path.iterdir()), "paths of this machine"
    run = chosen.load(tmp_path, threads=1)
    for batch in (1, 2, 3, 7):
        images = drawn(shape, batch)
        with torch.no_grad():
            assert difference(run((images,)), model(images)) <= chosen.row.tolerance


class Sentences(nn.Module):
    """Takes named inputs, one with the name of a builtin; returns an object; ties two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, input: Tensor, mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embedding(input) * self.scale * mask[..., None]
        return {"logits": self.head(hidden), "hidden": hidden}


def sentences() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {"mask": (torch.rand(2, 5) > 0.3).float(), "input": torch.randint(0, 7, (2, 5)), "labels": torch.zeros(2)}
    return Sentences().eval(), batch


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_format_loads_in_a_process_without_this_project_or_with_its_engine_alone(form: str, tmp_path: Path) -> None:
    chosen, (model, batch) = CODECS[form], sentences()
    example = called_with(model, batch)
    assert set(example) == {"mask", "input"}

    chosen.write(model, example, tmp_path)
    save_file({name: each.contiguous() for name, each in example.items()}, tmp_path / "inputs")
    hidden = {"orchestrator": None} if chosen.needs_engine else {"orchestrator": None, "pruning": None}
    code = f"{WITHOUT_THE_PROJECT.format(hidden=hidden)}import {chosen.arrays}\n{chosen.zeros(model, example)}"
    code += f"globals().update(safetensors.{chosen.arrays}.load_file('inputs'))\n{chosen.code(model, example)}"
    code += "safetensors.torch.save_file({'outputs': torch.as_tensor(outputs).detach().contiguous()}, 'outputs')"
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, check=True)

    with torch.no_grad():
        expected = model(**example)["logits"]
    assert difference(load_file(tmp_path / "outputs")["outputs"], expected) <= chosen.row.tolerance
    assert difference(chosen.load(tmp_path)(example), expected) <= chosen.row.tolerance


def test_all_formats_can_be_written_into_one_folder() -> None:
    files = [name for chosen in CODECS.values() for name in chosen.files]

    assert len(set(files)) == len(files)


def test_sparse_is_refused_where_no_kernel_can_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> None:
        raise KernelsUnavailable("no C compiler is installed.")

    monkeypatch.setattr(sparse, "library", library)
    with pytest.raises(ExportError, match=r"^sparse layers cannot be measured here: no C compiler is installed\.$"):
        CODECS["sparse"].write(built("cnn", (1, 8, 8)), (drawn((1, 8, 8), 2),), tmp_path)


def test_a_network_that_is_not_faster_as_sparse_is_written_with_dense_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built("cnn", (1, 8, 8), channels=[4])
    monkeypatch.setattr(pruning, "to_sparse", lambda network, *_, **__: plain_copy(network))

    CODECS["sparse"].write(model, (drawn((1, 8, 8), 2),), tmp_path)

    text = (tmp_path / "sparse_network.py").read_text()
    assert "sparse_layers" not in text
    assert "torch.ops" not in text, "which would make it slower than the network that was given"
    held = load_file(tmp_path / "sparse_network.safetensors")
    assert any(name.endswith(".weight.values") for name in held), "half of the weights are zeros"
    images = drawn((1, 8, 8), 5)
    with torch.no_grad():
        assert difference(CODECS["sparse"].load(tmp_path)((images,)), model(images)) <= 1e-6


def test_the_generated_module_can_be_trained_under_the_network_s_names(tmp_path: Path) -> None:
    model = built("cnn", (1, 8, 8), channels=[4])
    CODECS["safetensors"].write(model, (drawn((1, 8, 8), 2),), tmp_path)
    namespace: dict[str, Any] = {"__file__": str(tmp_path / "network.py"), "__name__": "network"}
    exec((tmp_path / "network.py").read_text(), namespace)
    network = namespace["load"]()

    names = {name for name, _ in pruning.shrink(model, drawn((1, 8, 8), 2)).named_parameters()}
    assert {name for name, _ in network.named_parameters()} == names
    network(drawn((1, 8, 8), 2)).sum().backward()
    assert all(each.grad is not None for each in network.parameters())


class Branching(nn.Module):
    """A network with control flow that depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Airy(nn.Module):
    """A network with a function that ONNX does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.airy_ai(x)


@pytest.mark.slow
def test_an_operation_that_onnx_lacks_and_a_missing_package_are_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ExportError, match=r"ONNX has no operation for aten\.special_airy_ai.*; take the format torch or"
    ):
        CODECS["onnx"].write(Airy(), (torch.ones(2, 3),), tmp_path)
    monkeypatch.setattr(rows, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"needs onnx and onnxscript and openvino; install the extra `export`"):
        CODECS["openvino"].load(tmp_path)


def test_a_package_that_cannot_be_imported_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_onnx.py").write_text("raise AttributeError('module numpy has no attribute bool8')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ExportError,
        match=r"needs broken_onnx, which is installed and cannot be imported \(AttributeError: module numpy .*\); "
        r"install it again: pip install --force-reinstall broken_onnx",
    ):
        replace(CODECS["onnx"], row=replace(CODECS["onnx"].row, packages=("broken_onnx",))).check_packages()


@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_be_exported_is_told_in_a_sentence(form: str, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"Branching cannot be traced by torch.export .*remove control flow that depends on data"
    ):
        CODECS[form].write(Branching(), (torch.ones(2, 3),), tmp_path)
    with pytest.raises(ExportError, match="Branching cannot be exported, since its inputs must all be tensors"):
        CODECS[form].write(Branching(), (3,), tmp_path)


@pytest.mark.parametrize(
    ("length", "shapes"),
    [(512, [(4, 512), (1, 512)]), (16, [(64, 16), (64, 16), (1, 16)]), (4096, [(2, 4096), (1, 4096)])],
)
def test_outputs_of_long_texts_are_compared_on_a_sample(length: int, shapes: list[tuple[int, int]]) -> None:
    tokens = torch.zeros(300, length, dtype=torch.long)
    data: Any = SimpleNamespace(input_shape=(length,), test=TensorSplit(tokens, tokens, Tensor.long, in_order=True))
    spec: Any = None

    assert [tuple(call_values(each)[0].shape) for each in Masked(nn.Embedding(2, 2), data, spec).inputs] == shapes


@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_difference_is_relative_to_the_largest_output(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.deploy.formats.format.PART", part)
    expected = torch.tensor([0.0, -4.0, float("inf")])

    assert difference(torch.tensor([0.0, -4.0, float("inf")]), expected) == 0
    assert difference(torch.tensor([1.0, -4.0, float("inf")]), expected) == 0.25
    assert difference(torch.tensor([0.0, -4.0, 1.0]), expected) == float("inf")
    assert difference(expected[:2], expected) == float("inf")
