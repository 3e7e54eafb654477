"""When a sweep will be done: the work left, at the speed seen so far, on as many slots as have been busy. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from orchestrator.core.canonical import canonical_json
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan, StageSpec

_VARYING = ("seed", "target", "amount", "round")
"""Fields that leave the duration of a stage about as it is."""


class Eta:
    """Estimates the seconds that are left.

    A stage is expected to take as long as those of its kind took (everything equal but seed, target and round). Before
    one of its kind has finished, the stages that have are scaled by the configured epochs or steps. With W slots, work
    that takes t_i alone, and c the longest chain of work that must run one after the other:

        seconds left = max(sum(t_i) / W, c)
    """

    def __init__(self, plan: Plan, finished: Iterable[str], slots: int | None = None) -> None:
        self._plan = plan
        known = set(finished)
        self._left: dict[str, None] = dict.fromkeys(key for key in plan.stages if key not in known)
        self._slots = slots
        self._kinds = {key: _kind(spec) for key, spec in plan.stages.items()}
        self._units = {self._kinds[key]: _units(spec) for key, spec in plan.stages.items()}
        self._seen: dict[str, list[float]] = {}
        self._started: dict[str, float] = {}
        self._most_at_once = 1

    def started(self, key: str, time: float) -> None:
        """Note that a stage has started (again)."""
        self._started[key] = time
        self._most_at_once = max(self._most_at_once, len(self._started))

    def finished(self, key: str, time: float, record: StageRecord | None = None) -> None:
        """Note that a stage has finished, `record` saying how long it took if its start was not seen."""
        begun = self._started.pop(key, None)
        seconds = time - begun if begun is not None else record.seconds if record else None
        if seconds is not None:
            self._seen.setdefault(self._kinds[key], []).append(seconds)
        self._left.pop(key, None)

    def dropped(self, key: str) -> None:
        """Note that a stage will not be run."""
        self._started.pop(key, None)
        self._left.pop(key, None)

    def seconds_left(self, now: float) -> float | None:
        """Return the estimate at time `now`; None as long as nothing has finished."""
        if not self._seen:
            return None
        means = {kind: fmean(seen) for kind, seen in self._seen.items()}
        per_unit = fmean(mean / self._units[kind] for kind, mean in means.items())
        expected: dict[str, float] = {}
        chain: dict[str, float] = {}
        for key in self._left:
            kind = self._kinds[key]
            whole = means[kind] if kind in means else per_unit * self._units[kind]
            begun = self._started.get(key)
            expected[key] = whole if begun is None else max(whole - (now - begun), 0.05 * whole)
            parent = self._plan.stages[key].parent
            chain[key] = expected[key] + chain.get(parent or "", 0.0)
        slots = self._slots or self._most_at_once
        return max(sum(expected.values()) / slots, max(chain.values(), default=0.0))


def _kind(spec: StageSpec) -> str:
    return canonical_json([spec.kind, {name: value for name, value in spec.fields.items() if name not in _VARYING}])


def _units(spec: StageSpec) -> float:
    training: Any = spec.fields.get(spec.training)
    if not isinstance(training, Mapping):
        return 1.0
    return float(training.get("epochs") or training.get("steps") or 1.0)
