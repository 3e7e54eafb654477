"""Estimates for stages from finished similar stages: seconds, optimizer steps, bytes. Pure.

The estimate is the mean duration of the finished stages that differ only in `VARYING`. Without any, it is the stage's
number of steps times the seconds per step of other stages with the same setting (network, data, batch size, device,
threads, precision): of pruning rounds for a round, else of all stages that train. Without those, it is unknown.
"""

from __future__ import annotations

import glob
import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from orchestrator.core.file_names import DROPPABLE, WEIGHTS
from orchestrator.core.plain_data import canonical_json
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact_tree
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.stage_kinds import KINDS

VARYING = ("seed", "target", "amount", "round", "sources", "versions")
"""Fields with little effect on the duration of a stage."""


@dataclass(frozen=True)
class Comparable:
    """Comparable properties of a stage, as texts: stages with equal texts have similar costs."""

    batches: str
    """Stages with equal values have equally many steps in an epoch: data and batch size."""
    network: str
    """Stages with equal values have equally large weights and masks."""
    setting: str
    """Stages with equal values take equally long steps."""
    alike: str
    """Stages with equal values take equally long."""


def places(plan: Plan) -> dict[str, Comparable]:
    """Return the place of each stage of a plan, finished or not."""
    roots: dict[str, tuple[StageSpec, str]] = {}
    known: dict[tuple[str, str], Comparable] = {}
    found, specs = dict[str, Comparable](), {**plan.finished, **plan.stages}
    for last in specs:
        line = [last]
        while (parent := specs[line[-1]].parent) in specs and parent not in roots:
            line.append(parent)
        for key in reversed(line):  # of stages that a search leaves out, the inputs may come later
            spec = specs[key]
            text = repr([spec.kind, *(item for item in spec.fields.items() if item[0] not in VARYING)])
            roots[key] = root, top = roots.get(spec.parent or "", (spec, text))
            if (top, text) not in known:  # thousands of stages have few distinct places
                known[top, text] = _place(spec, root)
            found[key] = known[top, text]
    return found


def _place(spec: StageSpec, root: StageSpec) -> Comparable:
    fields = redact_tree({name: value for name, value in spec.fields.items() if name not in VARYING})
    top = fields if spec is root else redact_tree({name: root.fields.get(name) for name in ("model", "data")})
    training = fields.get(spec.training) or {}
    batches = canonical_json([top.get("data"), [training.get(k) for k in ("batch_size", "accumulate", "drop_last")]])
    network = canonical_json(top.get("model"))
    where = [root.fields.get("device"), root.fields.get("threads"), training.get("precision"), training.get("compile")]
    setting = canonical_json([batches, network, where])
    return Comparable(batches, network, setting, canonical_json([setting, spec.kind, fields]))


def length(spec: StageSpec) -> tuple[float, float] | None:
    """Return the steps, and the epochs on top of them, that a stage trains; None if the configuration has neither.

    A round that continues from a step of the dense training trains the rest of that training.
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
    """Expected cost of a stage; None for an unknown value."""

    seconds: float | None
    steps: float | None
    bytes: float | None
    """Bytes of its masks and its record; of all files for a stage that does not train."""
    weights: float | None
    """Bytes of its weights."""


@dataclass
class _Ratio:
    """Ratio of sums. Values of this run replace the values of earlier runs."""

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
    """Pace of finished stages, and estimates for other stages."""

    def __init__(self) -> None:
        self.learned = 0
        """Number of stages learned from."""
        self._ratios: dict[tuple[str, ...], _Ratio] = {}

    def learn(self, place: Comparable, record: StageRecord, seconds: float | None = None, *, own: bool = False) -> None:
        """Learn from a finished stage.

        Args:
            place: place of the stage
            record: record of the stage
            seconds: seconds that the stage occupied a slot, if observed; else the seconds of its record
            own: whether this run observed the stage: then values of earlier runs no longer count
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
        if record.curve and (last := record.curve[-1]).epoch > 0 and not since:  # other epochs count from another start
            self._add(("epoch", place.batches), last.step, last.epoch, own)

    def expect(self, place: Comparable, spec: StageSpec) -> Expected:
        """Estimate the cost of a stage."""
        kind, steps, seconds = KINDS[spec.kind], self._steps(place, spec), self._value("seconds", place.alike)
        if seconds is None and not kind.trains:
            seconds = self._value("seconds", place.setting, spec.kind)
        elif seconds is None and steps is not None:
            pace = self._value("pace", place.setting, str(kind.prunes)) or self._value("pace", place.setting)
            seconds = None if pace is None else pace * steps
        weights = self._value("weights", place.network) if kind.trains else 0.0
        return Expected(seconds, steps, self._value("bytes", place.network, spec.kind), weights)

    def _steps(self, place: Comparable, spec: StageSpec) -> float | None:
        if not KINDS[spec.kind].trains:
            return 0.0
        seen = self._value("steps", place.alike)
        if seen is not None or (planned := length(spec)) is None:
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
    """Return the seconds of stages on a number of slots.

    With t_i for each stage, c for the longest chain, and m_j for the stages that run alone after all others:

        max(sum(t_i) / slots, c) + sum(m_j)

    Args:
        plan: plan with the stages in order
        seconds: stage -> its seconds
        slots: number of stages that run at once
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


DEVICE_FILES = ("/dev/nvidia[0-9]*", "/proc/driver/nvidia/gpus/*", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
"""Patterns of the files that a GPU has on Linux: NVIDIA, Jetson, WSL, AMD."""


@cache
def processor_model() -> str:
    """Return the model name of this machine's processor."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if named:
            return named[0]
    return platform.processor() or platform.machine()


@cache
def gpu_models() -> tuple[str, ...]:
    """Return the model names of this machine's GPUs from nvidia-smi; none if that tool is not installed."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(name.strip() for name in told.splitlines() if name.strip())


def lacks_gpu(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why this process certainly has no GPU; None if it may have one, as only torch knows for sure."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES (={visible!r}) hides all GPUs"
    if any(glob.glob(pattern) for pattern in DEVICE_FILES) or gpu_models():
        return None
    return "this machine has none"
