"""Print the bits of results: digests of weights, masks, metrics and scoring for every trial and stage of a few sweeps.

    python scripts/golden_bits.py                     # the main job, run in a temporary directory
    python scripts/golden_bits.py --all               # every case below: a minute or two
    python scripts/golden_bits.py --against HEAD~1    # every case by this tree and that commit; status 1 if they differ
    python scripts/golden_bits.py STORE               # the sweeps in that store

Two versions of the code that print the same lines on one machine, with one release of torch, have the same results.
Keys of stages are left out: they may change where the bits do not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import unified_diff
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SMALL = ("cluster=inline", "model.channels=[4,8]", "train.epochs=2", "finetune.epochs=1", "seed=0")
METHODS = (
    *("magnitude", "random", "lamp", "erk", "snip", "iterative_snip", "force", "grasp", "synflow", "taylor", "fisher"),
    *("obd", "obs", "wanda", "fpgm", "slimming", "n_m", "lottery_ticket", "lr_rewinding", "identity"),
    *("random_unstructured", "l1_unstructured", "global_random_unstructured", "global_l1_unstructured"),
    *("random_structured", "ln_structured", "longer"),
)
CASES: Mapping[str, Sequence[str]] = {
    "main": ("+sweep=random_amounts",),
    "methods": (
        *("-m", *SMALL, f"method={','.join(METHODS)}", "schedule.sparsity=0.5", "prune.exclude=[conv1.weight]"),
    ),
    "allocations": ("-m", *SMALL, "scope=layer,uniform,uniform_plus,er,erk,lamp,row", "schedule.sparsity=0.5"),
    "repairs": (
        *("-m", *SMALL, "method=magnitude", "repair=obs,obs_joint,least_squares,bn_stats"),
        *("unit=entry,channel", "score.examples=64", "schedule.sparsity=0.5"),
    ),
    "biases": (
        *("-m", *SMALL, "method=magnitude", "repair=absorb_bias,least_squares", "unit=channel", "score.examples=64"),
        *("model.batch_norm=false", "schedule.sparsity=0.5"),
    ),
    "blocks": (
        *("-m", *SMALL, "method=magnitude", "unit=block", "unit.size=3", "unit.reduce=l1,l2", "scope=global,layer"),
        "prune.exclude=[classifier.fc1.weight]",
    ),
    "controls": (
        *("-m", *SMALL, "method=magnitude,l1_unstructured,ln_structured", "restart.control=shuffle,reinit"),
        *("schedule=one_shot", "schedule.sparsity=0.5"),
    ),
    "amounts": ("-m", *SMALL, "schedule=amount", "method=l1_unstructured,ln_structured", "schedule.amount=0.3,1"),
    "rewinding": (
        *("-m", *SMALL, "method=magnitude,random_unstructured", "restart=rewind", "restart.step=3,0.5"),
        *("optimizer@train.optimizer=adam", "train.ema=0.9"),
    ),
    "rates": ("-m", *SMALL, "method=magnitude,random_unstructured", "restart=lr_rewind,reinit"),
    "language": (
        *("-m", "+sweep=language_model", "cluster=inline", "data.root=text.txt", "data.block=16", "model.width=16"),
        *("model.layers=1", "train.steps=20", "train.epochs=null", "finetune.steps=5", "finetune.epochs=null"),
        *("schedule.sparsity=0.5", "seed=0", "method=random_unstructured,l1_unstructured,magnitude"),
    ),
    "grouped": (
        *("-m", *SMALL, "method=magnitude,taylor", "unit=group", "scope=global", "scope.budget=macs", "deploy=shrink"),
        *("deploy.seconds=0.1", "repair=bn_stats", "score.examples=256", "schedule.sparsity=0.5", "schedule.rounds=2"),
    ),
    "distilled": ("-m", *SMALL, "finetune.teacher=dense", "schedule.sparsity=0.5", "method=magnitude"),
}
"""Name -> the command line of a sweep, with options that earlier commits also accept."""
TEXT = "".join(f"{n} times {m} is {n * m}, and {n} and {m} are {n + m}.\n" for n in range(40) for m in range(9))


def bits(store: Path) -> Iterator[str]:
    """Yield a line for each stage of each trial of the sweeps in `store`."""
    for manifest in sorted((store / "sweeps").glob("*.json")):
        for trial in json.loads(manifest.read_text())["plan"]["trials"]:
            deployed = [key for key in trial.get("measured", ()) if _record(store, key)]
            for key in (*trial["stages"], *(_record(store, key)["spec"]["inputs"]["network"] for key in deployed)):
                record = _record(store, key)
                title = "deploy" if record["kind"] == "deploy" else f"round {record['round']}"
                yield f"{trial['name']:<44} {title}  {_digests(record)}"


def _record(store: Path, key: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((store / "stages" / key / "record.json").read_text())["record"]
    return found


def _digests(record: Mapping[str, Any]) -> str:
    metrics = [record["before"], record["after"], [[point["step"], point["metrics"]] for point in record["curve"]]]
    sizes = [record["parameters"], record["macs_remaining"], record["measurements"].get("bytes")]
    scoring = record["details"].get("scoring")
    return " ".join(
        f"{name} {digest[:12] or '-':<12}"
        for name, digest in (
            ("weights", record["weights_digest"]),
            ("masks", record["mask_digest"]),
            ("metrics", _digest(metrics)),
            ("scoring", _digest(scoring) if scoring else ""),
            ("sizes", _digest(sizes)),
        )
    ).rstrip()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def run(cases: Sequence[str], tree: Path) -> Iterator[str]:
    """Yield the lines of cases, each run in a temporary directory by the code in `tree`."""
    for name in cases:
        yield f"# {name}"
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "text.txt").write_text(TEXT)
            command = [sys.executable, "-m", "orchestrator", *CASES[name], "tracking=none", f"name={name}"]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name} failed in {tree}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            yield from bits(Path(folder) / "store")


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Yield a temporary working tree of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> None:
    """Print the bits of a store or of new sweeps, or compare the bits of two commits."""
    parser = argparse.ArgumentParser(description="Print the bits of results.")
    parser.add_argument("store", nargs="?", type=Path, help="store whose sweeps are printed; default: run the main job")
    parser.add_argument("--all", action="store_true", help=f"run every case: {', '.join(CASES)}")
    parser.add_argument("--case", action="append", choices=CASES, help="run this case; may be repeated")
    parser.add_argument(
        "--against", metavar="COMMIT", help="also run the cases (default: all) at that commit; print the differences"
    )
    given = parser.parse_args()
    cases = given.case or ([*CASES] if given.all or given.against else ["main"])
    if given.store:
        print(*bits(given.store), sep="\n")
    elif not given.against:
        for line in run(cases, ROOT):
            print(line, flush=True)
    else:
        with checkout(given.against) as tree:
            before, now = [*run(cases, tree)], [*run(cases, ROOT)]
        changed = [*unified_diff(before, now, given.against, "this tree", lineterm="", n=0)]
        print(*changed or [f"{len(now)} lines, none differs from {given.against}"], sep="\n")
        sys.exit(bool(changed))


if __name__ == "__main__":
    main()
