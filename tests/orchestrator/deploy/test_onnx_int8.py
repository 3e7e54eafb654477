"""8-bit graphs: zeros stay zeros, calibration uses the training split, and metrics are measured again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import pruning
from orchestrator.core.specs import StageSpec
from orchestrator.deploy.checked_writing import CODECS, Masked
from orchestrator.deploy.formats import programs
from orchestrator.deploy.formats.format import ExportError, call_values, difference
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.splits import TensorSplit

INT8 = CODECS["onnx_int8"]
TRAINING = {"eval_batch_size": 4}
LEFT = StageSpec("dense", {"seed": 3, "task": {"kind": "classification"}, "train": TRAINING})


def network() -> nn.Sequential:
    """Return a network of a convolution, a norm and two linear layers, with three quarters of the weights zero."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 3)),
    )
    for index in (0, 5, 7):
        pruning.l1_unstructured(model[index], "weight", 0.75)
        pruning.remove(model[index], "weight")
    return model.eval()


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def graph(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]], zero_point: str = "") -> Path:
    """Write a graph with these tensors; `w_quantized` is read with a scale and a zero point."""
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    if zero_point:
        nodes.append(helper.make_node("DequantizeLinear", ["w_quantized", "s", zero_point], ["w_read"]))
    value = helper.make_tensor_value_info
    held = [numpy_helper.from_array(each, name) for name, each in tensors.items()]
    made = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, [1])], [value("y", TensorProto.FLOAT, [1])], held
    )
    onnx.save(helper.make_model(made), path)
    return path


@pytest.mark.slow
def test_zeros_are_zeros_in_the_file_and_integers_have_no_zero_point(tmp_path: Path) -> None:
    model = network()
    shown = images(64)
    INT8.write(model, (shown,), tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["network.int8.onnx"]
    written = onnx.load(tmp_path / "network.int8.onnx").graph
    held = {each.name: numpy_helper.to_array(each) for each in written.initializer}
    points = {node.input[0]: node.input[2] for node in written.node if node.op_type == "DequantizeLinear"}
    weights = {name: each for name, each in held.items() if each.dtype == np.int8 and each.ndim > 1}
    assert sorted(each.shape for each in weights.values()) == [(3, 16), (8, 1, 3, 3), (16, 128)]
    for name, each in weights.items():
        assert (each == 0).mean() >= 0.75
        assert not held[points[name]].any()
        assert np.abs(each.astype(int)).max() <= 64, "7 of 8 bits, for processors whose sums would saturate"
    scales = [node.input[1] for node in written.node if node.input and node.input[0] in weights]
    assert sorted(held[name].size for name in scales) == [3, 8, 16], "of each channel"
    assert not [each for each in held.values() if each.dtype == np.float32 and each.size > 16]
    run = INT8.load(tmp_path)
    for batch in (1, 3, 64):
        with torch.no_grad():
            assert difference(run((shown[:batch],)), model(shown[:batch])) < 0.05
    assert b".py" not in (tmp_path / "network.int8.onnx").read_bytes(), "nor where operations come from"


WEIGHT = np.array([[0.0, 1.0], [2.0, 0.0]], np.float32)
SCALE = {"s": np.float32([1.0]), "zero": np.int8([0]), "five": np.int8([5]), "middle": np.uint8([128])}


@pytest.mark.parametrize(
    ("stored", "zero_point", "kept"),
    [
        ({"w_quantized": np.int8([[0, 64], [64, 0]])}, "zero", True),
        ({"w_quantized": np.uint8([[128, 9], [9, 128]])}, "middle", True),
        ({"w": WEIGHT}, "", True),
        ({"w_quantized": np.int8([[0, 64], [64, 1]])}, "zero", False),
        ({"w_quantized": np.int8([[5, 64], [64, 5]])}, "five", False),
        ({"w_quantized": np.uint8([[128, 9], [9, 0]])}, "middle", False),
        ({"w_quantized": np.int8([[0, 64]])}, "zero", False),
        ({"w": WEIGHT + 1}, "", False),
        ({}, "", False),
    ],
)
def test_a_file_in_which_a_zero_is_another_number_is_refused(
    stored: dict[str, Any], zero_point: str, kept: bool, tmp_path: Path
) -> None:
    one = graph(tmp_path / "one", {"w": WEIGHT, "bias": np.zeros(2, np.float32)})
    other = graph(tmp_path / "other", {**stored, **SCALE}, zero_point)
    if kept:
        programs.hold_zeros(one, other)
        return
    with pytest.raises(ExportError, match="onnx_int8 does not keep the zeros of w, 2 of 4 weights, as zeros; take the"):
        programs.hold_zeros(one, other)


class Unread(TensorSplit):
    def batches(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("only the training split is to be read")


def data(count: int) -> Data:
    """Data whose examples hold their own index; only the training split may be read."""
    train = TensorSplit(torch.arange(count).float().unsqueeze(1), torch.zeros(count, dtype=torch.long))
    unread = Unread(train.images, train.labels)
    return Data(train, unread, unread, (1,), 2)


def test_examples_to_calibrate_by_are_drawn_of_the_training_split_by_the_seed_of_the_trial() -> None:
    model, other = nn.Linear(1, 2), replace(LEFT, fields={**LEFT.fields, "seed": 4})

    def numbers(left: StageSpec) -> list[float]:
        (inputs,) = call_values(Masked(model, data(1000), left).example(256))
        return [float(each) for each in inputs.flatten()]

    assert len(set(numbers(LEFT))) == 256
    assert numbers(LEFT) == numbers(LEFT)
    assert set(numbers(LEFT)) != set(numbers(other))
    (few,) = call_values(Masked(model, data(10), LEFT).example(256))
    assert sorted(few.flatten().tolist()) == list(range(10))


class Named(nn.Module):
    """A network with named inputs that could return its own loss."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": x, "loss": torch.zeros(())}


class ByName(TensorSplit):
    def take(self, chosen: Tensor) -> dict[str, Tensor]:
        inputs, labels = super().take(chosen)
        return {"x": inputs, "labels": labels}


def test_what_is_achieved_is_what_the_task_measures_of_the_outputs_in_that_format() -> None:
    labels = torch.tensor([0, 1, 0, 1, 1, 1, 0, 0])
    called: list[set[str]] = []

    def run(example: Any) -> Tensor:
        called.append(set(example))
        return example["x"].flip(1)  # whatever the network itself would return

    def split(right: int) -> TensorSplit:
        shown = torch.cat([labels[:right], 1 - labels[right:]])
        return ByName(nn.functional.one_hot(shown, 2).float().flip(1), labels)

    known: Any = Data(split(8), split(6), split(4), (2,), 2)

    assert Masked(Named(), known, LEFT).metrics_of(run) == {"val/accuracy": 6 / 8, "test/accuracy": 4 / 8}
    assert called == [{"x"}] * 4, "two batches of each split, without labels"
