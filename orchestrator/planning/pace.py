"""What stages will take, from what finished ones like them took: seconds, optimizer steps, bytes. Pure.

A stage takes as long as those took, on the mean, that equal it in all but `VARYING`. Where none has finished, as long
as its steps take at the pace of other stages of its setting (network, data, batch size, device, threads, precision): of
those that prune if it does, else of any that train. Where there are none either, that is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.file_names import DROPPABLE, WEIGHTS
from orchestrator.core.plain_data import canonical_json
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact_tree
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.stage_kinds import KINDS

VARYING = ("seed", "target", "amount", "round", "sources", "versions")
"""Fields that leave the duration of a stage about as it is."""


@dataclass(frozen=True)
class Place:
    """Texts that are equal for stages of which one tells of the other."""

    batches: str
    """Data and batch size: as many steps to an epoch."""
    network: str
    """As many bytes of weights and masks."""
    setting: str
    """As long a step."""
    alike: str
    """As long a stage."""


def places(plan: Plan) -> dict[str, Place]:
    """Return the place of each stage of a plan, finished or not."""
    roots: dict[str, tuple[StageSpec, str]] = {}
    known: dict[tuple[str, str], Place] = {}
    found = {}
    for key, spec in {**plan.finished, **plan.stages}.items():
        text = repr([spec.kind, *(item for item in spec.fields.items() if item[0] not in VARYING)])
        roots[key] = root, top = roots.get(spec.parent or "", (spec, text))
        if (top, text) not in known:  # of thousands of stages few differ in what counts
            known[top, text] = _place(spec, root)
        found[key] = known[top, text]
    return found


def _place(spec: StageSpec, root: StageSpec) -> Place:
    fields = redact_tree({name: value for name, value in spec.fields.items() if name not in VARYING})
    top = fields if spec is root else redact_tree({name: root.fields.get(name) for name in ("model", "data")})
    training = fields.get(spec.training) or {}
    batches = canonical_json([top.get("data"), [training.get(k) for k in ("batch_size", "accumulate", "drop_last")]])
    network = canonical_json(top.get("model"))
    where = [root.fields.get("device"), root.fields.get("threads"), training.get("precision"), training.get("compile")]
    setting = canonical_json([batches, network, where])
    return Place(batches, network, setting, canonical_json([setting, spec.kind, fields]))


def length(spec: StageSpec) -> tuple[float, float] | None:
    """Return how many steps and, beyond these, epochs a stage trains; None where its configuration does not say.

    A round that trains on from a step of the dense training trains what is left of it.
    """
    training = spec.typed.finetune if spec.training == "finetune" else spec.typed.train
    given = training.steps if spec.typed.until is None else spec.typed.until
    if given is None and training.epochs is not None:
        given = f"{training.epochs}ep"
    if given is None:
        return None
    since = spec.typed.restart.rates or 0
    steps = [0.0 if isinstance(place, str) else float(place) for place in (given, since)]
    epochs = [float(place.removesuffix("ep")) if isinstance(place, str) else 0.0 for place in (given, since)]
    return steps[0] - steps[1], epochs[0] - epochs[1]


@dataclass(frozen=True)
class Expected:
    """What a stage is expected to take; None where that is not known."""

    seconds: float | None
    steps: float | None
    bytes: float | None
    """Of its masks and its record; of what trains nothing all of its files."""
    weights: float | None
    """Bytes of its weights."""


@dataclass
class _Ratio:
    """A ratio of sums. What this run has seen takes the place of what earlier ones had."""

    total: float = 0.0
    of: float = 0.0
    own: bool = False

    def add(self, total: float, of: float, own: bool) -> None:
        if own and not self.own:
            self.total, self.of, self.own = 0.0, 0.0, True
        if own == self.own:
            self.total, self.of = self.total + total, self.of + of

    @property
    def value(self) -> float | None:
        return self.total / self.of if self.of else None


class Pace:
    """What finished stages took, and what others are expected to take by that."""

    def __init__(self) -> None:
        self.learned = 0
        """Stages that it has learned from."""
        self._ratios: dict[tuple[str, ...], _Ratio] = {}

    def learn(self, place: Place, record: StageRecord, seconds: float | None = None, *, own: bool = False) -> None:
        """Take in a finished stage.

        Args:
            place: of the stage
            record: of the stage
            seconds: that it occupied a slot, where that was seen; else those of its record
            own: whether this run has seen it: then what earlier ones have does not count beside it
        """
        self.learned += 1
        kind = KINDS[record.kind]
        seconds = record.seconds if seconds is None else seconds
        weights = record.files[WEIGHTS].bytes if WEIGHTS in record.files and kind.trains else None
        others = sum(info.bytes for name, info in record.files.items() if name not in DROPPABLE or not kind.trains)
        self._add(("seconds", place.alike), seconds, 1, own)
        self._add(("steps", place.alike), record.steps, 1, own)
        self._add(("bytes", place.network, record.kind), others + record.text_bytes, 1, own)
        if weights is not None:
            self._add(("weights", place.network), weights, 1, own)
        if not kind.trains:
            self._add(("seconds", place.setting, record.kind), seconds, 1, own)
            return
        for group in (("pace", place.setting, str(kind.prunes)), ("pace", place.setting)):
            self._add(group, seconds, record.steps, own)
        since = record.spec.get("fields", {}).get("restart", {}).get("rates")
        if record.curve and (last := record.curve[-1]).epoch > 0 and not since:  # else they count from elsewhere
            self._add(("epoch", place.batches), last.step, last.epoch, own)

    def expect(self, place: Place, spec: StageSpec) -> Expected:
        """Return what a stage is expected to take."""
        kind, steps, seconds = KINDS[spec.kind], self._steps(place, spec), self._value("seconds", place.alike)
        if seconds is None and not kind.trains:
            seconds = self._value("seconds", place.setting, spec.kind)
        elif seconds is None and steps is not None:
            pace = self._value("pace", place.setting, str(kind.prunes)) or self._value("pace", place.setting)
            seconds = None if pace is None else pace * steps
        weights = self._value("weights", place.network) if kind.trains else 0.0
        return Expected(seconds, steps, self._value("bytes", place.network, spec.kind), weights)

    def _steps(self, place: Place, spec: StageSpec) -> float | None:
        if not KINDS[spec.kind].trains:
            return 0.0
        seen, planned = self._value("steps", place.alike), length(spec)
        if seen is not None or planned is None:
            return seen
        steps, epochs = planned
        an_epoch = self._value("epoch", place.batches) if epochs else 0.0
        return None if an_epoch is None else max(0.0, steps + epochs * an_epoch)

    def _add(self, group: tuple[str, ...], total: float, of: float, own: bool) -> None:
        self._ratios.setdefault(group, _Ratio()).add(total, of, own)

    def _value(self, *group: str) -> float | None:
        ratio = self._ratios.get(group)
        return None if ratio is None else ratio.value


def wall(plan: Plan, seconds: Mapping[str, float], slots: int) -> float:
    """Return how long these stages take on so many slots.

    With stages that take t_i, c the longest chain of them, and m_j for those that run alone, after all others:

        max(sum(t_i) / slots, c) + sum(m_j)

    Args:
        plan: in whose order they stand
        seconds: stage -> seconds that it takes
        slots: how many run at once
    """
    chain: dict[str, float] = {}
    alone = 0.0
    for key, spec in plan.stages.items():
        if key in seconds and KINDS[spec.kind].alone:
            alone += seconds[key]
        elif key in seconds:
            chain[key] = seconds[key] + max((chain.get(needed, 0.0) for needed in spec.inputs.values()), default=0.0)
    together = sum(seconds[key] for key in chain)
    return max(together / slots, max(chain.values(), default=0.0)) + alone
