"""A store in a directory, and work that does as its spec's `script` says: what executors are tested with."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factories import ACCURACY

from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.records import CurvePoint, FileInfo, StageRecord
from orchestrator.core.specs import NETWORK, Plan, StageSpec, TrialSpec
from orchestrator.core.work_order import FileWriter, WorkOrder
from orchestrator.store.finished_stages import Stages
from orchestrator.store.local_backend import LocalBackend
from orchestrator.store.unfinished_stages import Checkpoints, Failures


@dataclass(frozen=True)
class DirectoryStore:
    """Records as JSON files; `starts` counts how often the work began each stage."""

    root: Path

    @property
    def stages(self) -> Stages:
        return Stages(LocalBackend(str(self.root / "states")), "the store")

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(LocalBackend(str(self.root / "states")), "the store")

    @property
    def failures(self) -> Failures:
        return Failures(LocalBackend(str(self.root / "states")))

    def finished(self, keys: Iterable[str]) -> dict[str, StageRecord]:
        found = {key: self.root / key for key in keys}
        return {
            key: StageRecord.from_json(json.loads(path.read_text())) for key, path in found.items() if path.exists()
        }

    def commit(self, record: StageRecord, files: Mapping[str, FileWriter]) -> StageRecord:
        aside = self.root / f"{record.key}.{os.getpid()}"
        aside.write_text(json.dumps(record.to_json()))
        aside.replace(self.root / record.key)
        return record

    def count(self, key: str) -> int:
        """Count one more start of a stage and return how often it has been started."""
        with (self.root / f"{key}.starts").open("a") as file:
            file.write("x")
        return self.starts(key)

    def starts(self, key: str) -> int:
        path = self.root / f"{key}.starts"
        return len(path.read_text()) if path.exists() else 0


def run_script(order: WorkOrder) -> Iterator[StageRecord]:
    """Do what each stage's `script` says, commit and yield its record."""
    store = order.worker.store
    assert isinstance(store, DirectoryStore)
    for spec in order.specs:
        if spec.parent is not None:
            assert store.finished([spec.parent]), "a stage must not begin before its parent is durable"
        starts = store.count(spec.key)
        script = spec.fields["script"]
        print(f"stage {spec.fields['name']} attempt {order.attempt}", flush=True)
        _obey(spec.key, script, order, starts)
        if order.worker.cancelled():
            return
        stands = store.commit(record_of(spec, order), {})
        if script.get("die_committed") and starts == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield stands
        if script.get("linger"):
            time.sleep(script["linger"])
            (store.root / "lingered").touch()


def _obey(key: str, script: Mapping[str, Any], order: WorkOrder, starts: int) -> None:
    end = time.monotonic() + script.get("sleep", 0.0)
    while time.monotonic() < end and not order.worker.cancelled():
        time.sleep(0.005)
        if "tell" in script:
            order.worker.report(key, CurvePoint(script["tell"], 0.5, 0.0, {"val/accuracy": 0.25}), ACCURACY)
    while "until" in script and not Path(script["until"]).exists():
        time.sleep(0.05)
    if script.get("hang"):
        time.sleep(60)
    if script.get("die") and starts <= script["die"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if script.get("lose") and starts <= script["lose"]:
        raise ConnectionError("the store is away")
    if script.get("exit"):
        sys.exit(3)
    if "fail" in script:
        print("about to fail", file=sys.stderr, flush=True)
        raise ValueError(script["fail"])


def _imported(name: str | None) -> str:
    return str(importlib.import_module(name).VALUE) if name else ""


def record_of(spec: StageSpec, order: WorkOrder) -> StageRecord:
    """A record whose every figure follows from the spec, odd floats included."""
    value = int(spec.key[:8], 16) / 3.0
    return StageRecord(
        key=spec.key,
        kind=spec.kind,
        round=spec.round,
        before={"val/loss": value},
        after={"val/loss": value / 7.0, "val/accuracy": 0.1 + 0.2},
        metrics=(ACCURACY,),
        curve=tuple(CurvePoint(step, step / 3.0, 0.0, {"train/loss": value / (step + 1)}) for step in range(20)),
        requested_sparsity=None,
        sparsity=1 / 3,
        tensor_sparsity={"layer.weight": 1 / 3},
        tensor_sizes={"layer.weight": 300},
        parameters=310,
        macs=300,
        macs_remaining=200.0,
        weights_digest=spec.key,
        started_from=spec.parent or "",
        mask_digest=spec.key,
        steps=10,
        best_step=7,
        started=0.0,
        device=order.worker.device,
        attempt=order.attempt,
        environment={
            "threads": str(order.worker.threads),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""),
            "imported": _imported(spec.fields.get("script", {}).get("import")),
        },
        spec=spec.to_json(),
        files={WEIGHTS: FileInfo("0" * 64, 0)},
    )


def stage(name: str, parent: StageSpec | None = None, round_: int = 0, **script: Any) -> StageSpec:
    """A stage that does as `script` says."""
    fields: dict[str, Any] = {"name": name, "script": script}
    if parent is None:
        return StageSpec("dense", fields)
    return StageSpec("round", {**fields, "round": round_ or parent.round + 1}, {NETWORK: parent.key})


def plan_of(*chains: list[StageSpec]) -> Plan:
    """The plan of trials that are these chains of stages."""
    stages = {spec.key: spec for chain in chains for spec in chain}
    return Plan(stages, tuple(trial_of(chain[-1].fields["name"], chain) for chain in chains))


def trial_of(name: str, chain: Sequence[StageSpec], overrides: tuple[str, ...] = (), **config: Any) -> TrialSpec:
    """The trial that is this chain of stages, with what a saved configuration must have."""
    config = {"method": {}, "schedule": {}, **config}
    keys = tuple(spec.key for spec in chain)
    return TrialSpec(name, overrides, config, keys, keys[0], f"all but the seed of {name}")


def chain(name: str, *scripts: Mapping[str, Any]) -> list[StageSpec]:
    """A dense stage and its rounds, named `name-0`, `name-1`, ..."""
    stages: list[StageSpec] = []
    for index, script in enumerate(scripts):
        stages.append(stage(f"{name}-{index}", stages[-1] if stages else None, **script))
    return stages
