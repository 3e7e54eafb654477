"""Parts of a round: the round up to a place of its training, where a search compares candidates. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_kinds import PART, Place

TRAINING = "training"
"""Value of `search.rungs` with which a search compares candidates within their last training."""
EPOCH, STEP = "epoch", "step"


@dataclass(frozen=True)
class Span:
    """Training of a round within a schedule: of `length` epochs or steps, after `begins` of them."""

    where: str
    """Node of the configuration that gives the length: `finetune` or `train`."""
    unit: str
    """`EPOCH` or `STEP`, as that node counts."""
    begins: float
    length: float

    def place(self, amount: float) -> Place:
        """Return the place after an amount of the training."""
        reached = self.begins + amount
        return f"{reached:.10g}ep" if self.unit == EPOCH else int(reached)


def span_of(spec: StageSpec) -> Span | None:
    """Return the training of a round; None if its length is unknown: of a function, or of epochs after a step."""
    where, training, since = spec.training, spec.training_config, spec.typed.restart.rates or 0
    if training.get("_target_") is not None:
        return None
    if training.get("steps") is not None:
        return Span(where, STEP, since, training["steps"] - since) if isinstance(since, int) else None
    if isinstance(since, int) and since:
        return None
    begins = float(since.removesuffix("ep")) if isinstance(since, str) else 0.0
    return Span(where, EPOCH, begins, (training.get("epochs") or 0) - begins)


def ladder(first: float, factor: float, last: float) -> list[float]:
    """Return the amounts of the rungs of a search: from `first` on by `factor`, and the last one."""
    found = [first]
    while found[-1] < last:
        found.append(min(last, found[-1] * factor))
    return found


def rung_violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the broken rules of the rungs of a search of one's own; the rows of other searches have them."""
    search = config.get("search") or {}
    if search.get("rungs") != TRAINING:
        return
    for name, least, example in (("first", 1, 1), ("factor", 2, 3)):
        value = search.get(name)
        if value is not None and (type(value) is not int or value < least):
            yield (
                f"`search.{name}` (={value}) must be a whole number of at least {least} with search.rungs=training; "
                f"pass search.{name}={example}."
            )


def parts_of(last: StageSpec, search: Mapping[str, Any]) -> list[StageSpec]:
    """Return the parts of a trial's last round that a search compares; none if it compares whole rounds.

    Each part may continue from the parts before it.

    Args:
        last: the round that the trial ends with
        search: the node `search` of the configuration
    """
    span = span_of(last) if search.get("rungs") == TRAINING else None
    if span is None:
        return []
    parts: list[StageSpec] = []
    for amount in ladder(search.get("first") or 1, search.get("factor") or 3, span.length)[:-1]:
        fields = {**last.fields, "until": span.place(amount)}
        earlier = tuple(part.key for part in parts)
        parts.append(StageSpec(PART, fields, last.inputs, starts_from=earlier, location=last.location))
    return parts
