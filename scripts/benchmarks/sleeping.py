"""Sweep whose trials only sleep, with a plan, records and a view like those of a real sweep.

It measures everything except training and the store. Workers and the tracker's process import this module.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from orchestrator.__main__ import CONF
from orchestrator.config import hydra_options
from orchestrator.config.compose import compose_jobs
from orchestrator.core.metrics import Metric
from orchestrator.core.records import CurvePoint, StageRecord
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.work_order import FileWriter, WorkOrder
from orchestrator.planning.plan import make_plan
from orchestrator.store.finished_stages import Stages
from orchestrator.store.local_backend import LocalBackend
from orchestrator.store.unfinished_stages import Checkpoints, Failures
from orchestrator.views.tracking.view_writer import ViewWriter

STEPS = {"dense": 15, "round": 6}
"""Points in each stage's curve: the epochs of the presets. A trial's sleep has the same proportions."""
SHAPES = {"fc1.weight": (256, 64), "fc2.weight": (128, 256), "fc3.weight": (10, 128)}
SIZES = {name: prod(shape) for name, shape in SHAPES.items()}
BIASES = 256 + 128 + 10


@dataclass(frozen=True)
class NoStore:
    """Store that keeps nothing, as its cost is not measured."""

    masks: bytes = b""
    """Masks of every stage."""

    @property
    def stages(self) -> Stages:
        """There are none."""
        return Stages(LocalBackend("none"), "none")

    @property
    def checkpoints(self) -> Checkpoints:
        """There are none."""
        return Checkpoints(LocalBackend("none"), "none")

    @property
    def failures(self) -> Failures:
        """There are none."""
        return Failures(LocalBackend("none"))

    def finished(self, keys: Iterable[str]) -> dict[str, StageRecord]:
        """Nothing is finished."""
        del keys
        return {}

    def read(self, key: str, name: str) -> bytes:
        """Return the masks, which are the same for every stage."""
        del key, name
        return self.masks

    def commit(self, record: StageRecord, files: Mapping[str, FileWriter]) -> StageRecord:
        """Return the record unchanged."""
        del files
        return record


class MeasuredWriter(ViewWriter):
    """View in MLflow that writes its CPU seconds into the file `note`.

    CPU time counts from the first request, so that the import of MLflow is left out; creating the database may count.
    """

    def __init__(self, *arguments: Any, note: Path, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._file, self._before = note, 0.0

    def write(self) -> None:
        """Write until the view is finished."""
        super().write()
        self._file.write_text(str(time.process_time() - self._before))

    def _take(self, request: tuple[Any, ...]) -> None:
        self._before = self._before or time.process_time()
        super()._take(request)


def masks() -> bytes:
    """Return the file of masks that prune half of the network."""
    import torch

    from pruning import MaskSet

    draw = torch.Generator().manual_seed(0)
    return MaskSet({name: torch.rand(shape, generator=draw) < 0.5 for name, shape in SHAPES.items()}).to_bytes()


def make_sleeping_plan(trials: int, shortest: float, longest: float) -> Plan:
    """Plan trials that each have their own dense training and one round.

    Their lengths are drawn uniformly, and reach the workers in the stages' `location`, which is not in keys.
    """
    plan = plan_jobs([f"seed={seed}"] for seed in range(trials))
    draw = random.Random(0)
    lengths = {key: draw.uniform(shortest, longest) for trial in plan.trials for key in trial.stages[:1]}
    naps = {
        key: lengths[spec.parent or key] * STEPS[spec.kind] / sum(STEPS.values()) for key, spec in plan.stages.items()
    }
    stages = {key: replace(spec, location={"seconds": naps[key]}) for key, spec in plan.stages.items()}
    return Plan(stages, plan.trials)


def plan_jobs(axes: Iterable[Sequence[str]]) -> Plan:
    """Compose and plan one trial for each list of overrides, like the command line."""
    hydra_options.register()
    fixed = ["model=mlp", "schedule=one_shot", f"train.epochs={STEPS['dense']}", f"finetune.epochs={STEPS['round']}"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("config", [], RunMode.MULTIRUN)
        return make_plan(list(compose_jobs(loader, master, [[*fixed, *overrides] for overrides in axes])))


def sleep(order: WorkOrder) -> Iterator[StageRecord]:
    """Sleep for the length of each stage."""
    for spec in order.specs:
        seconds, started = spec.location["seconds"], time.time()
        time.sleep(seconds)
        yield make_record(spec, seconds, started)


def make_record(spec: StageSpec, seconds: float, started: float) -> StageRecord:
    """Return a record of realistic size."""
    steps, dense = STEPS[spec.kind], spec.kind == "dense"
    target = 0.0 if dense else spec.fields["target"]
    val, test = ({f"{split}/loss": 0.25, f"{split}/accuracy": 0.95} for split in ("val", "test"))
    curve = [
        CurvePoint(step, float(step), started + seconds * step / steps, {"train/loss": 1 / step, **val, "lr": 0.01})
        for step in range(1, steps + 1)
    ]
    return StageRecord(
        key=spec.key,
        kind=spec.kind,
        round=spec.round,
        before={} if dense else val,
        after=val | test,
        metrics=(Metric("accuracy", "%", "higher", margin=0.01, format=".2%"),),
        curve=tuple(curve),
        requested_sparsity=None if dense else target,
        sparsity=target,
        tensor_sparsity={} if dense else dict.fromkeys(SIZES, target),
        tensor_sizes={} if dense else SIZES,
        parameters=sum(SIZES.values()) + BIASES,
        macs=sum(SIZES.values()),
        macs_remaining=(1 - target) * sum(SIZES.values()),
        weights_digest=spec.key,
        mask_digest="" if dense else spec.key,
        steps=steps,
        best_step=steps,
        measurements={"seconds": seconds},
        started=started,
        host="localhost",
        environment={"python": "3", "torch": "2", "numpy": "2", "platform": "any", "orchestrator": "0"},
        spec=spec.to_json(),
    )
