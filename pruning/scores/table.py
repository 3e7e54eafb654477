"""The table of scores: what a choice may name, and what each needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from torch import Tensor

from pruning.scores.channels import bn_scale, fpgm
from pruning.scores.curvature import fisher, obd, obs
from pruning.scores.flow import synflow
from pruning.scores.gradients import gradient, grasp, snip
from pruning.scores.inputs import wanda
from pruning.scores.network import BatchNormMode
from pruning.scores.taylor import taylor
from pruning.scores.weights import lamp, magnitude, random

Need: TypeAlias = Literal["weights", "gradient", "per_example", "hvp", "inputs", "trained"]


@dataclass(frozen=True)
class Score:
    """A score and what is to be known of it.

    `needs`: "weights" reads no data; "gradient", "per_example" (gradients of each example) and "hvp" (products with the
    Hessian) read batches and a loss; "inputs" reads batches; "trained" is meant for a trained network alone.
    `signed`: whether scores may be negative and rank as they are. `units`: one score for each channel instead of each
    entry; `batch_norm`: the mode it reads BatchNorm in by default, None where there is no choice.
    """

    function: Callable[..., dict[str, Tensor]]
    needs: frozenset[Need]
    signed: bool = False
    units: bool = False
    batch_norm: BatchNormMode | None = None

    @property
    def reads_data(self) -> bool:
        """Whether batches must be given."""
        return bool(self.needs & {"gradient", "per_example", "hvp", "inputs"})


def _needs(*needs: Need) -> frozenset[Need]:
    return frozenset(needs)


SCORES: Mapping[str, Score] = MappingProxyType(
    {
        "magnitude": Score(magnitude, _needs("weights")),
        "random": Score(random, _needs("weights")),
        "gradient": Score(gradient, _needs("gradient"), batch_norm="train"),
        "snip": Score(snip, _needs("gradient"), batch_norm="train"),
        "grasp": Score(grasp, _needs("gradient", "hvp"), signed=True, batch_norm="train"),
        "synflow": Score(synflow, _needs("weights")),
        "taylor": Score(taylor, _needs("gradient"), batch_norm="train"),
        "fisher": Score(fisher, _needs("per_example", "trained")),
        "obd": Score(obd, _needs("per_example", "trained"), signed=True),
        "obs": Score(obs, _needs("per_example", "trained")),
        "lamp": Score(lamp, _needs("weights")),
        "bn_scale": Score(bn_scale, _needs("weights", "trained"), units=True),
        "fpgm": Score(fpgm, _needs("weights"), units=True),
        "wanda": Score(wanda, _needs("inputs", "trained")),
    }
)
