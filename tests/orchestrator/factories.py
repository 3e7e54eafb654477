"""Synthetic sweeps: plans whose stages are shared as real ones are, and records whose figures obey the laws."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.core.events import Failure, StageEvent, SweepInfo
from orchestrator.core.metrics import Metric
from orchestrator.core.plain_data import digest
from orchestrator.core.records import CurvePoint, FileInfo, StageRecord
from orchestrator.core.specs import NETWORK, Plan, StageSpec, TrialSpec, identity_of

SIZES: Mapping[str, int] = {"conv1.weight": 72, "conv2.weight": 1152, "fc1.weight": 8192, "fc2.weight": 640}
PARAMETERS = sum(SIZES.values()) + 98
MACS = 120_000
EPOCH = 1_700_000_000.0
ACCURACY = Metric("accuracy", "%", "higher", margin=0.01, format=".2%")
DENSE_STEPS, ROUND_STEPS = 300, 100


def config(method: str, sparsity: float, seed: int, rounds: int = 2, /, **changes: Any) -> dict[str, Any]:
    """Return a trial's resolved config; `changes` replaces whole groups."""
    return {
        "name": "synthetic",
        "seed": seed,
        "model": {"name": "cnn", "kind": "cnn", "width": 8},
        "data": {"name": "digits", "kind": "digits", "root": None},
        "train": {"epochs": 12, "batch_size": 64, "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.002}},
        "finetune": {"epochs": 4, "batch_size": 64, "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.001}},
        "method": {"name": method, "kind": method.removeprefix("global_")},
        "schedule": {"kind": "geometric", "sparsity": sparsity, "rounds": rounds, "amount": None},
        "prune": {"include": ["*"], "exclude": []},
        "cluster": {"cpus_per_trial": 1},
        "tracking": {"kind": "mlflow", "uri": "https://someone:hunter2@tracking.example", "experiment": "pruning"},
        "store": {"uri": "store"},
        **changes,
    }


def chain(trial: Mapping[str, Any]) -> Iterator[StageSpec]:
    """Yield the stages of one trial: dense, then a round for each target of a geometric schedule."""
    dense = StageSpec("dense", {name: trial[name] for name in ("model", "data", "train", "seed")})
    yield dense
    parent, schedule = dense.key, trial["schedule"]
    for number in range(1, schedule["rounds"] + 1):
        target = 1 - (1 - schedule["sparsity"]) ** (number / schedule["rounds"])
        fields = {name: trial[name] for name in ("method", "prune", "finetune", "seed")}
        spec = StageSpec("round", {**fields, "round": number, "target": target}, {NETWORK: parent})
        yield spec
        parent = spec.key


def plan_of(configs: Sequence[Mapping[str, Any]]) -> Plan:
    """Return the plan of these trials, each stage once."""
    stages: dict[str, StageSpec] = {}
    identities: dict[str, str] = {}
    trials = []
    for trial in configs:
        specs = list(chain(trial))
        for spec in specs:
            stages[spec.key], identities[spec.key] = spec, identity_of(spec, identities)
        overrides = (
            f"method={trial['method']['name']}",
            f"schedule.sparsity={trial['schedule']['sparsity']}",
            f"seed={trial['seed']}",
        )
        name = f"{trial['method']['name']} sparsity={trial['schedule']['sparsity']} seed={trial['seed']}"
        keys = tuple(spec.key for spec in specs)
        trials.append(TrialSpec(name, overrides, trial, keys, keys[0], identities[keys[-1]]))
    return Plan(stages, tuple(trials))


def make_plan(
    methods: Sequence[str] = ("random_unstructured", "l1_unstructured"),
    sparsities: Sequence[float] = (0.5, 0.9),
    seeds: Sequence[int] = (0, 1, 2),
    rounds: int = 2,
) -> Plan:
    """Return the plan of a full grid."""
    return plan_of([config(m, s, seed, rounds) for m in methods for s in sparsities for seed in seeds])


def make_record(plan: Plan, key: str, start: float = EPOCH) -> StageRecord:
    """Return what the stage `key` would say: accuracy falls with sparsity, faster for random pruning."""
    spec = plan.stages[key]
    draw = random.Random(key)
    target = 0.0 if spec.kind == "dense" else float(spec.fields["target"])
    masked = {name: round(target * size) for name, size in SIZES.items()}
    method = "" if spec.kind == "dense" else str(spec.fields["method"].get("name"))
    slope = 0.25 if method.startswith("random") else 0.08
    level = 0.97 + 0.004 * random.Random(spec.fields["seed"]).gauss(0, 1)
    accuracy = min(1.0, level - slope * target**4 + 0.002 * draw.gauss(0, 1))
    steps = DENSE_STEPS if spec.kind == "dense" else ROUND_STEPS
    started = start + 10.0 * spec.round
    curve = tuple(
        CurvePoint(
            step=step,
            epoch=step / 25,
            time=started + step / 100,
            metrics={"train/loss": 2.0 / (1 + step), "val/loss": 2.1 / (1 + step), "val/accuracy": 1 - 1 / (1 + step)},
        )
        for step in range(25, steps + 1, 25)
    )
    metrics = {"loss": 4 * (1 - accuracy), "accuracy": accuracy}
    return StageRecord(
        key=key,
        kind=spec.kind,
        round=spec.round,
        before={f"val/{k}": v for k, v in {"loss": 1 + target, "accuracy": accuracy - target / 2}.items()}
        if spec.kind == "round"
        else {},
        after={f"{split}/{name}": value for split in ("val", "test") for name, value in metrics.items()},
        metrics=(ACCURACY,),
        curve=curve,
        requested_sparsity=None if spec.kind == "dense" else target,
        sparsity=sum(masked.values()) / sum(SIZES.values()),
        tensor_sparsity={name: masked[name] / size for name, size in SIZES.items()},
        tensor_sizes=SIZES,
        parameters=PARAMETERS,
        macs=MACS,
        macs_remaining=MACS * (1 - target),
        weights_digest=digest(f"weights {key}"),
        started_from="" if spec.parent is None else digest(f"weights {spec.parent}"),
        mask_digest=digest(f"mask {key}"),
        steps=steps,
        best_step=steps - 25,
        measurements={"seconds": steps / 100},
        started=started,
        host="worker-1",
        environment={"torch": "2.13.0"},
        files={"masks.npz": FileInfo(digest(key), 100)},
        spec=spec.to_json(),
    )


def make_records(plan: Plan, start: float = EPOCH) -> dict[str, StageRecord]:
    """Return a record for every stage of `plan`."""
    return {key: make_record(plan, key, start) for key in plan.stages}


def finished(record: StageRecord) -> StageEvent:
    """Return the event of a stage that has finished."""
    return StageEvent("finished", record.key, record.started + record.seconds, record=record)


def failed(key: str, message: str = "loss is nan") -> StageEvent:
    """Return the event of a stage that has failed."""
    failure = Failure(message, traceback="Traceback (most recent call last): ...", log="/logs/0.log", host="worker-1")
    return StageEvent("failed", key, EPOCH + 50, failure=failure)


def sweep_info(name: str = "synthetic") -> SweepInfo:
    """Return what a tracker is told of a sweep, with secrets that must not be shown."""
    return SweepInfo(
        name=name,
        config={"tracking": {"uri": "https://someone:hunter2@tracking.example"}, "password": "hunter2"},
        command="python -m orchestrator +sweep=synthetic tracking.uri=https://someone:hunter2@tracking.example",
        environment={"git_commit": "0123456789abcdef0123456789abcdef01234567", "torch": "2.13.0"},
    )
