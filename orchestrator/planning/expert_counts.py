"""Experts of a mixture, by the configuration and the weight file of its network, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.config.parallel import processes
from orchestrator.core.specs import Plan
from orchestrator.planning.network_files import weight_shapes
from orchestrator.planning.number_formats import whole_number
from orchestrator.planning.pinned_content import configuration
from orchestrator.planning.plan import round_targets
from pruning.dependencies.families.family import FAMILIES

COUNT = tuple(dict.fromkeys(family.keys.experts for family in FAMILIES if family.keys.experts))
USED, GROUPS = ("num_experts_per_tok", "moe_k"), ("n_group",)
"""Keys of configurations with the number of experts, of those of a token, and of groups of experts."""
ROUNDED = "hidden units go in steps of 4 (rows of 16 bytes), as stock products need: a sparsity is rounded up to a step"
"""Line on rounds that narrow experts; networks of sweeps are in float32."""
SHARES = "the loss that balances routers is that of each process's share of a batch, not of the batch"
"""Line on trials of several processes."""


@dataclass(frozen=True)
class Experts:
    """Experts in each layer of a mixture.

    Args:
        count: number of experts.
        used: number of experts that a token is routed to.
        groups: number of groups of experts, which lose equally many.
    """

    count: int
    used: int
    groups: int = 1

    def told(self, sparsity: float, where: str = "each layer") -> str:
        """Return a sentence on the experts that a sparsity of `unit=expert` removes and leaves."""
        gone = self.groups * round(sparsity * (self.count // self.groups))
        left = self.count - gone
        few = f", fewer than the {self.used} of a token: a real run refuses it" if left < self.used < self.count else ""
        return f"sparsity {sparsity:g} removes {gone} of {self.count} experts in {where} and leaves {left}{few}"

    def holds(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor in a weight file belongs to one expert, or stacks the parts of all."""
        return ".experts." in name or (len(shape) == 3 and shape[0] == self.count)

    def active(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return how many of the parameters in a weight file one token uses."""
        of_experts = sum(math.prod(shape) for name, shape in shapes.items() if self.holds(name, shape))
        return sum(map(math.prod, shapes.values())) - of_experts + of_experts * self.used // self.count


def experts_of(model: Mapping[str, Any]) -> Experts | None:
    """Return the experts of a network by its config.json, or by `config` of a target; None if these name none.

    Args:
        model: `model` of a configuration without violations.
    """
    config = configuration(model)
    count, used, groups = (
        next((config[key] for key in keys if type(config.get(key)) is int), 0) for keys in (COUNT, USED, GROUPS)
    )
    return Experts(count, used or count, groups or 1) if count else None


def experts_told(plan: Plan) -> Iterator[str]:
    """Yield the parameters of each mixture in a plan, in total and for a token, and the experts that rounds leave."""
    told: dict[str, None] = {}
    for config in (trial.config for trial in plan.trials):
        if (found := experts_of(config["model"])) is None:
            continue
        if shapes := weight_shapes(config["model"]):
            total = whole_number(sum(map(math.prod, shapes.values())))
            told[f"a token uses {whole_number(found.active(shapes))} of {total} parameters"] = None
        if processes(config) > 1 and configuration(config["model"]).get("output_router_logits"):
            told[SHARES] = None
        if config["unit"]["kind"].endswith("mlp"):
            told[ROUNDED] = None
        targets = [each.get("target") for each in round_targets(config)] if config["unit"]["kind"] == "expert" else []
        told |= dict.fromkeys(found.told(target) for target in targets if target)
    yield from told
