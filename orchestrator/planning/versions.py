"""Versions of the code that affects bits, one for each component: they are part of every stage's key.

The version of a built-in component is in its catalogue row. A test compares each component's code with its version, and
tells what to do if they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from orchestrator.catalogue.formats import FORMATS
from orchestrator.catalogue.models import MODELS
from orchestrator.config.config_groups import OF_STAGES
from orchestrator.core.restart_kinds import RESTARTS
from orchestrator.core.stage_kinds import KINDS
from pruning.catalogue.allocations import ALLOCATIONS
from pruning.catalogue.scores import SCORES
from pruning.choices.axes import TRANSFORMER_UNITS

SHARED: Mapping[str, int] = {
    "training": 6,
    "round": 4,
    "own_class": 2,
    "deploy": 3,
    "layerwise": 3,
    "lora": 1,
    "ranks": 2,
    "smaller": 1,
    "rows": 2,
    "channels": 3,
    "groups": 6,
    "blocks": 1,
    "weights": 2,
}
"""Versions of shared code. `training`: building, splitting, training and evaluating, in every stage; `round`: pruning;
`own_class`: the call of a user's own method class; `deploy`: shrinking and measuring;
`layerwise`: pruning in the sequential order; `lora`: training of low-rank updates; `ranks`: several processes;
`smaller`: training of the smaller transformer that masks leave; `rows`: counts of rows; `channels`: which layers lose
channels; `groups`: which channels lie in a group; `blocks`: which inputs lie in a block or window; `weights`: which
weights of networks of other packages, and of the user's own, are pruned."""


class Versioned(Protocol):
    """A row whose code has a version."""

    @property
    def code(self) -> str: ...

    @property
    def version(self) -> int: ...


FAMILIES: Mapping[str, Mapping[str, Versioned]] = {
    **{name: group.rows for name, group in OF_STAGES.items()},
    "allocation": ALLOCATIONS,
    "format": FORMATS,
    "restart": RESTARTS,
    "stage": KINDS,
}
"""Family -> rows; keys contain names and versions, as in "score/snip"."""


def version_of(component: str) -> int:
    """Return the version of a component, as in "round" or "score/snip"."""
    family, _, name = component.partition("/")
    return FAMILIES[family][name].version if name else SHARED[component]


def components() -> list[str]:
    """Return every component that has a version."""
    return [
        *SHARED,
        *(f"{family}/{name}" for family, rows in FAMILIES.items() for name, row in rows.items() if row.code),
    ]


def versions_of(
    parts: Mapping[str, Any], *, sequential: bool = False, model: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, int]:
    """Return the versions of the components that a stage with these parts of a configuration uses.

    Args:
        parts: the parts.
        sequential: whether the stage prunes layer by layer.
        model: the configuration of the network, which is no part of a round.
    """
    used = ["training", *(["round"] if "method" in parts else [])]
    used += ["own_class"] if parts.get("method", {}).get("_target_") else []
    used += ["layerwise"] if sequential else []
    used += ["lora"] if parts.get("finetune", {}).get("lora_rank") is not None else []
    used += ["smaller"] if _trains_smaller(parts) else []
    used += [*_of_choice(parts, model)] if "method" in parts else []
    used += ["blocks"] if sequential and parts.get("scope", {}).get("kind") == "window" else []
    named = {group: parts.get(group, {}).get("kind") for group in OF_STAGES}
    named["allocation"] = parts.get("scope", {}).get("allocation")
    used += [f"{family}/{name}" for family, name in named.items() if name and FAMILIES[family][name].code]
    return {component: version_of(component) for component in used}


def _of_choice(parts: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    """Yield the components that choose the weights of a round, and their numbers, in ways of their own."""
    unit, score = parts.get("unit", {}), SCORES.get(str(parts.get("score", {}).get("kind")))
    if parts.get("scope", {}).get("kind") == "row":
        yield "rows"
    if unit.get("kind") == "channel" and not (score is not None and score.of_batch_norm):
        yield "channels"
    if unit.get("kind") in ("group", "block"):
        yield f"{unit['kind']}s"
    network = MODELS.get(str(model.get("kind")))
    if model.get("_target_") or (network is not None and network.named_by):
        yield "weights"


def _trains_smaller(parts: Mapping[str, Any]) -> bool:
    """Whether a round with these parts may train the smaller transformer that its masks leave.

    The masked network would learn the same, but for a narrower residual stream, whose norms have other scales. A
    training function of the user's own gets the network that it knows.
    """
    if parts.get("unit", {}).get("kind") not in TRANSFORMER_UNITS:
        return False
    if "finetune" not in parts:
        return "train" in parts  # the control from scratch
    tuning = parts["finetune"]
    plain = not tuning.get("_target_") and tuning.get("lora_rank") is None and parts["prune"]["holding"] != "hooks"
    wide = parts["unit"]["kind"] != "residual" and parts["unit"].get("residual") is None
    return plain and bool(tuning.get("steps") or tuning.get("epochs")) and wide


def version_of_restart(restart: Mapping[str, Any]) -> dict[str, int]:
    """Return the version of the weights of a round's restart; empty for the first one, which their name tells."""
    name = restart.get("weights", "keep")
    return {f"restart/{name}": RESTARTS[name].version} if RESTARTS[name].version > 1 else {}


def versions_of_deployment(form: str) -> dict[str, int]:
    """Return the versions of the components that a deployment in a format uses."""
    return {"deploy": version_of("deploy")} | ({f"format/{form}": FORMATS[form].version} if FORMATS[form].code else {})
