"""The zoo: what its parts call right, what its page counts, and a dozen of its networks."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pruning
from scripts.zoo import __main__ as zoo
from scripts.zoo import parts
from scripts.zoo.libraries import Built, missing, randomise
from scripts.zoo.page import PARTS, RANDOM_PARTS, Results, page, read, read_random
from scripts.zoo.plain_operators import nms, roi_align
from scripts.zoo.processes import Limits, checked, why_it_ended
from scripts.zoo.random_networks import drawn
from scripts.zoo.random_runs import Loader
from scripts.zoo.random_runs import checked as checked_seed

DOZEN = (
    *("torchvision/alexnet", "torchvision/squeezenet1_1", "torchvision/shufflenet_v2_x0_5"),
    *("timm/vision_transformer:test_vit", "timm/byobnet:test_byobnet"),
    *("ultralytics/yolov8n-cls", "ultralytics/yolo11n-cls"),
    *("transformers/causal-llama", "transformers/causal-mixtral", "transformers/masked-bert"),
    *("transformers/seq2seq-t5", "transformers/image-vit"),
)


class Raw(nn.Module):
    """Layer whose weight is a parameter of the network, so that the engine has to be told its name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(64, 16)), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.relu(nn.functional.linear(x, self.weight)))
        return found


def built(model: nn.Module) -> Built:
    def inputs(batch: int, seed: int) -> Tensor:
        return torch.randn(batch, 16, generator=torch.Generator().manual_seed(seed))

    return Built(model.eval(), inputs, (), "16 values")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 5))


def test_a_process_that_the_system_kills_is_too_large() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])

    assert why_it_ended(child, io.BytesIO())[0] == "too large"


@pytest.mark.slow
def test_a_plain_network_is_right_in_all_parts() -> None:
    found = {part: parts.run(part, built(network())) for part in PARTS if part != "torch-pruning"}

    assert {part: outcome["verdict"] for part, outcome in found.items()} == dict.fromkeys(found, "right")
    assert found["groups"]["removed"] == pytest.approx(0.3, abs=0.02)
    assert found["groups"]["after"] < found["groups"]["before"] == 16 * 40 + 40 + 40 * 40 + 40 + 40 * 5 + 5
    assert found["entries"]["share"] == 1


def test_a_network_that_computes_something_else_is_wrong() -> None:
    whole, other, sample = network(), network(), built(network())

    assert parts.different(whole, other, sample) is None
    with torch.no_grad():
        other.get_parameter("4.bias")[0] += 0.01
    verdict, said = parts.different(whole, other, sample) or ("", "")
    assert (verdict, said[:24]) == ("WRONG", "with a batch of 2, outpu")


def test_a_network_that_fails_with_another_batch_is_wrong_and_a_refusal_is_none() -> None:
    class OfTwo(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) != 2:
                raise ValueError("two")
            for layer in self:
                x = layer(x)
            return x

    assert parts.different(network(), OfTwo(*network().children()), built(network())) == (
        "WRONG",
        "with a batch of 3: ValueError: two",
    )


def test_what_stays_dense_in_silence_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(model: nn.Module, *_: Any, sparsity: float, **__: Any) -> None:
        pruning.l1_unstructured(model.get_submodule("out"), "weight", sparsity)

    def telling(model: nn.Module, *_: Any, sparsity: float, **__: Any) -> None:
        silent(model, sparsity=sparsity)
        warnings.warn("weight stays dense", stacklevel=1)

    monkeypatch.setattr(pruning, "prune", silent)
    found = parts.entries(built(Raw()))
    assert found["share"] == pytest.approx(64 * 5 / (64 * 5 + 64 * 16), abs=1e-4)
    assert (found["verdict"], found["said"]) == ("WRONG", "76% of the matrices stay dense, and nothing says so")
    monkeypatch.setattr(pruning, "prune", telling)
    found = parts.entries(built(Raw()))
    assert (found["verdict"], found["said"]) == ("right", "weight stays dense")


def test_a_refusal_is_what_the_engine_raises_on_purpose() -> None:
    def judged(call: Any) -> tuple[str, str]:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        return parts.judged(caught.value)

    model = network()
    assert judged(lambda: pruning.prune(model, "none_such", sparsity=0.5))[0] == "refused"
    assert judged(lambda: pruning.shrink(nn.Sequential(nn.Linear(3, 2)), torch.zeros(2, 5)))[0] == "refused"
    assert judged(lambda: torch.zeros(2) + torch.zeros(3))[0] == "traceback"
    alone, example = nn.Sequential(nn.Linear(3, 2)), torch.zeros(2, 3)
    assert judged(lambda: pruning.dependency_groups(alone, example))[0] == "nothing to remove"


def test_constants_are_made_random_and_other_values_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    weight = model.get_parameter("0.weight").clone()
    randomise(model)

    assert torch.equal(model.get_parameter("0.weight"), weight)
    scale, shift = model.get_parameter("1.weight"), model.get_parameter("1.bias")
    assert len(set(scale.tolist())) == len(set(shift.tolist())) == 3
    assert bool(((scale - 1).abs() <= 0.1).all())
    assert bool((shift.abs() <= 0.1).all())


def test_boxes_that_overlap_a_better_one_are_left_out() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30]])

    assert nms(boxes, torch.tensor([0.5, 0.9, 0.3]), 0.5).tolist() == [1, 2]
    assert nms(boxes, torch.tensor([0.5, 0.9, 0.3]), 0.9).tolist() == [1, 0, 2]


def test_bins_of_a_box_are_means_of_a_ramp_in_the_image_that_the_box_names() -> None:
    ramp = torch.arange(9.0).expand(1, 9, 9)
    values = torch.stack([ramp, 10 * ramp.mT])
    boxes = torch.tensor([[0.0, 0, 0, 8, 16], [1, 4, 4, 12, 8]])

    found = roi_align(values, boxes, 0.5, 2, 4, 2, False)

    assert torch.allclose(found[0, 0], torch.tensor([0.5, 1.5, 2.5, 3.5]).expand(2, 4))
    assert torch.allclose(found[1, 0], torch.tensor([[25.0], [35.0]]).expand(2, 4))
    with pytest.raises(ValueError, match=r"sampling_ratio \(=0\) must be at least 1; type 2"):
        roi_align(values, boxes, 0.5, 2, 4, 0, False)


def line(name: str, **verdicts: Any) -> str:
    said = {part: {"verdict": each, "said": ""} if isinstance(each, str) else each for part, each in verdicts.items()}
    build = {"verdict": "right", "said": "", "parameters": 1234}
    return json.dumps(
        {"name": name, "date": "2026-01-02", "versions": {"torch": "2"}, "parts": {"build": build, **said}}
    )


def test_the_last_outcome_of_a_part_counts_and_the_page_says_what_is_missing(tmp_path: Path) -> None:
    file, dense = tmp_path / "results.jsonl", {"verdict": "WRONG", "said": "20% | stay", "share": 0.8}
    lines = [
        json.dumps({"library": "timm", "networks": 3}),
        line("timm/a", groups="traceback", entries=dense),
        line("timm/b", groups="refused"),
        line("timm/a", groups="right"),
        '{"name": "timm/c", "cut',
    ]
    file.write_text("\n".join(lines))
    text = page(read(file))

    assert "**This is a partial run**: 0 of 3 networks" in text
    assert "| timm | groups | 3 | 2 | 1 | 1 |  |" in text
    assert "| a | 1,234 | right | WRONG, 80% |  |  |  |" in text
    assert "- WRONG: timm/a\n\n        20% | stay\n" in text


def test_a_second_call_runs_what_is_missing_or_is_to_be_run_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(line("timm/a", groups="right") + "\n" + line("timm/b", **dict.fromkeys(PARTS, "right")))
    done = read(file).networks
    given = zoo.parsed([])

    assert zoo.missing_parts(["timm/a", "timm/b", "timm/c"], done, given) == {
        "timm/a": list(PARTS[1:]), "timm/c": list(PARTS)
    }  # fmt: skip
    given = zoo.parsed(["--only", "timm/b", "--again", "timm/*", "--parts", "sparse"])
    assert zoo.missing_parts(["timm/a", "timm/b", "timm/c"], done, given) == {"timm/b": ["sparse"]}


@pytest.mark.slow
def test_a_process_that_is_slow_or_large_is_ended_and_named() -> None:
    pytest.importorskip("transformers")

    assert checked("transformers/masked-bert", ["groups"], Limits(0.01, 8))["build"]["verdict"] == "slow"
    assert checked("transformers/masked-bert", ["groups"], Limits(60, 0.2))["build"]["verdict"] != "right"


@pytest.mark.slow
@pytest.mark.parametrize("name", DOZEN)
def test_a_dozen_of_the_zoo_is_right_or_refused_in_a_sentence(name: str) -> None:
    if absent := missing(name.partition("/")[0]):
        pytest.skip(f"{', '.join(absent)} is not installed; see `python -m scripts.zoo --help`")
    found = checked(name, ["groups", "entries", "layerwise"], Limits(200, 8))

    verdicts = {part: outcome["verdict"] for part, outcome in found.items()}
    assert set(verdicts.values()) <= {"right", "refused", "nothing to remove"}, found


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_draws_one_network_in_any_process(seed: int) -> None:
    one, other = drawn(seed), drawn(seed)

    assert one.kinds == other.kinds
    assert len({*one.kinds}) > 1
    assert parts.different(one.model, other.model, one, one.calls()) is None
    assert all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values()))


def test_a_difference_counts_before_a_refusal_and_all_calls_are_compared() -> None:
    class Refusing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 2:
                pruning.prune(self, "none_such", sparsity=0.5)
            found: Tensor = nn.Sequential(*self)(x)
            return found

    whole, other = network(), Refusing(*network().children()).eval()
    verdict, said = parts.different(whole, other, built(network())) or ("", "")
    assert (verdict, said[:24]) == ("refused", "with a batch of 2: `meth")
    with torch.no_grad():
        other.get_parameter("4.bias")[0] += 0.01
    verdict, said = parts.different(whole, other, built(network())) or ("", "")
    assert (verdict, said[:24]) == ("WRONG", "with a batch of 3, outpu")


def test_the_page_counts_random_networks(tmp_path: Path) -> None:
    file = tmp_path / "random.jsonl"
    outcomes = {part: {"verdict": "right", "said": ""} for part in RANDOM_PARTS}
    record = {"seed": 4, "layers": [], "parts": outcomes, "commit": "a", "torch": "2"}
    worse = record | {"parts": outcomes | {"graph": {"verdict": "refused", "said": "one size"}}}
    file.write_text("\n".join(map(json.dumps, (record, record | {"seed": 7}, worse))))
    text = page(Results(), read_random(file))

    assert "2 seeds of 300; the others have no result yet, with torch 2.\n" in text
    assert "| shrink | 2 | 2 |  |" in text
    assert "| graph | 2 | 1 | 1 |" in text
    assert "- refused: 4\n\n        one size\n" in text


@pytest.mark.filterwarnings("ignore:.* of the network's matrix weights stay dense", "ignore:shrink. the example's call")
@pytest.mark.slow  # the script ignores both warnings
def test_a_dozen_random_networks_are_right_or_refused_in_a_sentence() -> None:
    loader = Loader()
    try:
        for seed in range(12):
            record = checked_seed(seed, RANDOM_PARTS, loader)
            verdicts = {outcome["verdict"] for outcome in record["parts"].values()}
            assert verdicts <= {"right", "refused", "kept whole", "nothing to remove"}, record
    finally:
        loader.close()
