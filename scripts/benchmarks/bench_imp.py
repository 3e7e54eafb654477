#!/usr/bin/env python3
"""Race lottery tickets by the orchestrator against a plain script that finds the same tickets.

    python scripts/benchmarks/bench_imp.py                      # digits, three seeds, ten levels of 300 steps
    python scripts/benchmarks/bench_imp.py --steps 2000 --data mnist --root ROOT

Both train LeNet-300-100 with Adam from the same initialisations on the same batches, prune the smallest 20% of each
layer at each level, and rewind to the initialisation. The benchmark reports times only if the masks are equal. It times
whole processes in turns, with one torch thread each; the orchestrator also writes its store, report and tables.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from orchestrator.core.file_names import MASKS
from orchestrator.core.specs import Plan
from orchestrator.store.store import Store
from pruning import MaskSet

ROOT = Path(__file__).resolve().parents[2]
Masks = dict[int, list[dict[str, torch.Tensor]]]
"""Masks by seed and level."""


def command(given: argparse.Namespace) -> list[str]:
    """Return the arguments of the orchestrator's sweep."""
    settings = [f"steps={given.steps}", "epochs=null", "batch_size=60", f"eval_every={given.steps // 3}", "select=last"]
    return [
        *("-m", "method=lottery_ticket", f"data={given.data}", "model=lenet_300_100", "train=lottery"),
        *("finetune=lottery", f"schedule.rounds={given.levels}", f"schedule.sparsity={1 - 0.8**given.levels!r}"),
        *(f"seed=range({given.seeds})", "tracking=none", "name=tickets", *(f"train.{each}" for each in settings)),
        *(() if given.root is None else (f"data.root={given.root}",)),
    ]


def run(arguments: Sequence[str], folder: Path) -> float:
    """Run Python in `folder`; return the seconds it took."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return time.perf_counter() - began


def ours(given: argparse.Namespace, folder: Path, *cluster: str) -> tuple[float, Store]:
    """Run the sweep with a store of its own."""
    folder.mkdir()
    seconds = run(["-m", "orchestrator", *command(given), *cluster], folder)
    return seconds, Store(str(folder / "store"))


def plan_of(store: Store) -> Plan:
    """Return the plan of the one sweep in the store."""
    (name,) = store.sweeps()
    return Plan.from_json(store.load_sweep(name)["plan"])


def task_of(given: argparse.Namespace, store: Store) -> dict[str, Any]:
    """Return the task of the plain script, with the settings of the sweep's dense stage."""
    dense = next(spec for spec in plan_of(store).stages.values() if spec.kind == "dense")
    return {
        **{part: {**dense.fields[part], **dense.location.get(part, {})} for part in ("data", "model")},
        "seeds": list(range(given.seeds)),
        "levels": given.levels,
        "steps": given.steps,
        "batch": 60,
        "rate": 0.0012,
        "eval_every": given.steps // 3,
    }


def masks_of(store: Store) -> Masks:
    """Return the masks of every round of the sweep."""
    plan = plan_of(store)
    return {
        plan.stages[trial.stages[0]].fields["seed"]: [
            dict(MaskSet.from_bytes(store.read(key, MASKS))) for key in trial.stages if plan.stages[key].kind == "round"
        ]
        for trial in plan.trials
    }


def same(found: Masks, plain: Masks) -> bool:
    """Whether both have the same masks; the plain script names modules in place of parameters."""
    return all(
        torch.equal(masks[f"{name}.weight"].bool(), mask)
        for seed, levels in plain.items()
        for masks, level in zip(found[seed], levels, strict=True)
        for name, mask in level.items()
    )


def main() -> None:
    """Race, and print the ratios of the orchestrator's time to the plain script's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("seeds", 3), ("levels", 10), ("steps", 300), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--root")
    given = parser.parse_args()
    clusters = {"inline": ["cluster=inline"], "two workers": ["cluster=local", "cluster.num_cpus=2"]}
    ratios: dict[str, list[float]] = {name: [] for name in clusters}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _, store = ours(given, place / "first", "cluster=inline")
        (place / "task.json").write_text(json.dumps(task_of(given, store)))
        for repeat in range(given.repeats):
            plain = run([str(ROOT / "scripts/peers/tickets.py"), str(place / "task.json")], place)
            tickets = torch.load(place / "task.json.pt", weights_only=True)
            for name, cluster in clusters.items():
                seconds, store = ours(given, place / f"{name} {repeat}", *cluster)
                if not same(masks_of(store), tickets):
                    sys.exit(f"The masks of {name} are not the plain script's.")
                ratios[name].append(seconds / plain)
                print(f"plain {plain:.1f} s, {name} {seconds:.1f} s: {seconds / plain:.2f}", flush=True)
    for name, found in ratios.items():
        print(f"{name}: {statistics.median(found):.2f} of the plain script's time (median of {given.repeats})")


if __name__ == "__main__":
    main()
