"""Outputs of a deployed network are checked against the masked network's, with a tolerance for each format."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.catalogue.formats import FORMATS
from orchestrator.deploy.checked_writing import CODECS, OtherOutputs, check_outputs
from orchestrator.deploy.formats.format import ExportError

TOLD = {"name": "onnx", "remedy": "take another"}


class Steady(nn.Module):
    """Returns its input, rounded to a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) * self.weight).to(x.dtype)


def off_by(part: float) -> Callable[[Any], Tensor]:
    """Return a network whose outputs differ by `part` of the largest, 4, in the second example only."""
    return lambda example: example[0] + (4 * part if len(example[0]) == 2 else 0.0)


EXAMPLES = [(torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64),), (torch.tensor([-4.0, 2.0], dtype=torch.float64),)]


def test_pytorch_is_held_closer_than_other_runtimes() -> None:
    in_pytorch, elsewhere = ("shrink", "torch", "safetensors"), ("onnx", "openvino", "sparse", "huggingface")
    held = {**dict.fromkeys(in_pytorch, 1e-5), **dict.fromkeys(elsewhere, 1e-4)}
    tolerances = {name: row.tolerance for name, row in FORMATS.items()}
    assert tolerances == {**held, "onnx_int8": math.inf, "sparse_int8": math.inf}, "8 bits are measured instead"
    assert all(each.row is FORMATS[name] for name, each in CODECS.items())


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float64, 1e-5), (torch.float32, 1e-5), (torch.float16, 2.0**-7), (torch.bfloat16, 2.0**-4)],
)
def test_outputs_are_held_to_the_masked_network_s_as_far_as_its_numbers_round(dtype: torch.dtype, most: float) -> None:
    assert check_outputs(off_by(0.99 * most), Steady(dtype), EXAMPLES, 1e-5, **TOLD) == pytest.approx(0.99 * most)
    with pytest.raises(OtherOutputs, match=r"as onnx differ from .* of the largest output, and .*; take another"):
        check_outputs(off_by(1.01 * most), Steady(dtype), EXAMPLES, 1e-5, **TOLD)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e8])
def test_outputs_far_from_all_others_are_refused_in_any_format(wrong: float) -> None:
    assert check_outputs(off_by(0.5), Steady(torch.float32), EXAMPLES, math.inf, **TOLD) == 0.5
    with pytest.raises(OtherOutputs, match=r"and must differ by at most 1e\+06"):
        check_outputs(off_by(wrong), Steady(torch.float32), EXAMPLES, math.inf, **TOLD)


def test_a_parameter_that_nothing_is_computed_in_loosens_nothing() -> None:
    model = Steady(torch.float32)
    model.coarse = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(OtherOutputs, match="must differ by at most 1e-05"):
        check_outputs(off_by(2e-5), model, EXAMPLES, 1e-5, **TOLD)


def test_other_outputs_would_come_again_and_what_does_not_run_may_not() -> None:
    def out_of_order(example: object) -> Tensor:
        raise RuntimeError("out of order\nand more")

    with pytest.raises(ExportError, match=r"^the network as onnx does not run \(RuntimeError: out of order\); take"):
        check_outputs(out_of_order, Steady(torch.float32), EXAMPLES, 1e-5, **TOLD)
    assert (OtherOutputs.repeats, ExportError.repeats) == (True, False)
