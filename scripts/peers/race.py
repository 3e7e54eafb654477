"""Race the orchestrator against its peers: the same eight trials, each way as a command in an empty directory.

Dense training and fine-tuning have the proportion of the presets, 15 epochs to 6. Their numbers of steps are scaled
until a trial trains for the requested seconds on one thread of this machine; evaluations are as frequent as in the
presets.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.__main__ import CONF
from scripts.peers.peer_trial import SPARSITIES, Lengths, run_trial

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 900
"""Seconds after which a way counts as stuck."""
OURS, BY_HAND, JOBLIB, TUNE = "ours", "Ray tasks by hand", "Hydra's joblib launcher", "Ray Tune grid"
EXTRA = {JOBLIB: "hydra_plugins.hydra_joblib_launcher", TUNE: "tensorboardX"}
"""Way -> the module for which it needs the extra `peers`."""


@dataclass(frozen=True)
class Result:
    """One way to run the eight trials."""

    way: str
    seconds: float
    """Seconds from the start of the command to its exit."""
    speed: float
    """Speed relative to the fastest peer."""
    accuracy: float
    """Mean test accuracy of the eight trials, which shows that all ways do the same."""


def race(sizes: Sequence[float], repeats: int) -> list[dict[str, Any]]:
    """Run every way at every size, in turns; print a table for each size and return the figures."""
    ways = ways_here()
    found = []
    step = seconds_per_step()
    for size in sizes:
        lengths = lengths_for(size, step)
        print(
            f"{len(SPARSITIES)} trials of {size:g} s on one thread: {lengths.dense_steps} dense steps and "
            f"{lengths.finetune_steps} of fine-tuning of {1000 * step:.2f} ms, two at a time",
            flush=True,
        )
        taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, command in ways.items():
                taken[way].append(run(way, command(lengths)))
        results = _results(taken)
        for each in sorted(results, key=lambda result: result.seconds):
            print(f"  {each.seconds:7.1f} s  {each.speed:5.2f}x  accuracy {100 * each.accuracy:.1f}%  {each.way}")
        found.append(
            {"trial_seconds": size, "step_seconds": step, **asdict(lengths), "ways": list(map(asdict, results))}
        )
    print("x: times as fast as the fastest peer")
    return found


def seconds_per_step() -> float:
    """Return the seconds of a step on one thread, repeated until other load hardly matters."""
    lengths = Lengths(300, 120, 20)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        run_trial(0.5, lengths, lambda *_: None)
        times.append(time.perf_counter() - began)
    return min(times[1:]) / (lengths.dense_steps + lengths.finetune_steps)


def lengths_for(seconds: float, step: float) -> Lengths:
    """Return the lengths of a trial with a given training time, in the proportion of the presets."""
    dense, finetune = (
        yaml.safe_load((CONF / part / "default.yaml").read_text())["epochs"] for part in ("train", "finetune")
    )
    unit = max(1, round(seconds / step / (dense + finetune)))
    return Lengths(dense * unit, finetune * unit, unit)


def ways_here() -> dict[str, Callable[[Lengths], list[str]]]:
    """Return the command of each installed way for given lengths; print the ways that are left out."""
    missing = [way for way, module in EXTRA.items() if not _installed(module)]
    if missing:
        print(
            f"Left out: {' and '.join(missing)}; `scripts/install peers` installs what is needed (the extra `peers`)."
        )
    return {way: command for way, command in COMMANDS.items() if way not in missing}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _ours(lengths: Lengths) -> list[str]:
    trial = ["model=mlp", "data=digits", "method=l1_unstructured", "schedule=one_shot", "cluster.num_cpus=2"]
    dense = ["train.epochs=null", f"train.steps={lengths.dense_steps}", f"train.eval_every={lengths.eval_every}"]
    tuning = ["finetune.epochs=null", f"finetune.steps={lengths.finetune_steps}"]
    tuning.append(f"finetune.eval_every={lengths.eval_every}")
    axis = f"schedule.sparsity={','.join(map(str, SPARSITIES))}"
    return [sys.executable, "-m", "orchestrator", "-m", *trial, *dense, *tuning, axis]


def _by_hand(lengths: Lengths) -> list[str]:
    return _peer("ray_tasks", *_options(lengths))


def _tune(lengths: Lengths) -> list[str]:
    return _peer("tune_grid", *_options(lengths))


def _joblib(lengths: Lengths) -> list[str]:
    settings = [f"{name}={value}" for name, value in asdict(lengths).items()]
    axis = f"sparsity={','.join(map(str, SPARSITIES))}"
    return _peer("joblib_jobs", "--multirun", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *settings, axis)


def _options(lengths: Lengths) -> list[str]:
    return [f"--{name}={value}" for name, value in asdict(lengths).items()]


def _peer(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"scripts.peers.{module}", *arguments]


COMMANDS: Mapping[str, Callable[[Lengths], list[str]]] = {
    OURS: _ours,
    BY_HAND: _by_hand,
    JOBLIB: _joblib,
    TUNE: _tune,
}


def run(way: str, command: list[str]) -> tuple[float, float]:
    """Run a way in an empty directory; return its seconds and its verified mean accuracy."""
    with tempfile.TemporaryDirectory(prefix="peer") as name:
        folder = Path(name)
        (folder / "work").mkdir()
        log = folder / "log"
        began = time.perf_counter()
        with log.open("w") as output:
            done = subprocess.run(
                command,
                cwd=folder / "work",
                env=_environment(folder),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LIMIT,
                check=False,
            )
        seconds = time.perf_counter() - began
        if done.returncode:
            raise SystemExit(f"{way} ended with {done.returncode}:\n{log.read_text()[-2000:]}")
        return seconds, statistics.mean(_accuracies(way, folder / "work" / "mlflow.db"))


def _accuracies(way: str, database: Path) -> list[float]:
    """Return the test accuracies in MLflow; exit unless it has exactly the eight finished trials."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    trials = [run for run in runs if {"test/accuracy", "sparsity/overall"} <= set(run.data.metrics)]
    sparsities = sorted(round(run.data.metrics["sparsity/overall"], 3) for run in trials)
    if sparsities != list(SPARSITIES) or any(run.info.status != "FINISHED" for run in trials):
        raise SystemExit(f"{way}: MLflow holds sparsities {sparsities}, not {list(SPARSITIES)}, finished")
    return [run.data.metrics["test/accuracy"] for run in trials]


def _results(taken: dict[str, list[tuple[float, float]]]) -> list[Result]:
    seconds = {way: statistics.median(took for took, _ in each) for way, each in taken.items()}
    best = min(took for way, took in seconds.items() if way != OURS)
    return [
        Result(way, seconds[way], best / seconds[way], statistics.mean(accuracy for _, accuracy in each))
        for way, each in taken.items()
    ]


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment with a separate home, one thread, no telemetry, and importable peers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "DO_NOT_TRACK": "true"}
    return {**kept, **quiet, "HOME": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
