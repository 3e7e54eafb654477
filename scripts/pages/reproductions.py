#!/usr/bin/env python3
"""Reproduce published numbers by protocols, write records, and make docs/reproductions.md from them.

    scripts/reproduce all                                   # scale default: each within an hour on two cores
    scripts/reproduce snip lottery_ticket --scale full --data ~/data cluster.max_concurrent=2
    scripts/reproduce --page                                # only write the page, from the existing records

A protocol is docs/reproductions/NAME/protocol.yaml; docs/reproductions/README.md explains its keys. Finished stages in
the store are not trained again, so the same command continues after an interruption. Overrides may choose the place and
the hardware of a run; with any other override, nothing is recorded.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import isclose
from operator import sub, truediv
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from orchestrator.__main__ import CONF
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.comparison import Comparison
from orchestrator.compare.statistics import estimate
from orchestrator.config import hydra_options
from orchestrator.config.compose import compose_jobs
from orchestrator.config.schema import ConfigError
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.specs import Plan
from orchestrator.planning.plan import make_plan
from orchestrator.store.finished_stages import folder_of
from orchestrator.store.store import Store
from orchestrator.training.state.checkpointing import environment
from orchestrator.views.report.plain_files import rows_csv, window_row
from scripts.pages import reproductions_page

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reproductions"
SCALES = ("default", "full")
KEPT = (
    *("trial", "model", "data", "line", "method", "seed", "round", "final", "requested_sparsity", "sparsity"),
    *("parameters", "remaining_parameters", "metric", "test", "test_loss", "val", "val_loss", "val_before"),
    *("early_step", "early_val", "steps", "seconds", "score", "scope", "repair", "restart", "rescorings"),
    *("scored_examples", "dead_layers", "stage"),
)
"""Columns of trials.csv in a record; a judge may read these, and figures of further test sets."""
FURTHER = re.compile(r"test_\w+/\w+")
"""Column of a figure of a further test set."""
INTERRUPTED = 130
NEUTRAL = ("cluster", "tracking", "store", "data.root", "data.download", "retry_failed")
"""Keys and groups that may be overridden, because they change no result."""
OF_TRAINED = ("model.weights=", "model.reinitialise=")
"""Overrides that need a trained network."""
COMBINED: Mapping[str, Callable[[float, float], float]] = {"minus": sub, "over": truediv}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Protocol:
    """The plan of a reproduction, written before the first run."""

    name: str
    title: str
    paper: str
    """Number on arXiv."""
    claim: str
    published: Sequence[Mapping[str, Any]]
    scales: Mapping[str, Mapping[str, Any]]
    checks: Sequence[str] = ()
    """Examinations that tell whether the implementation is the cause if an expected figure or order is not found."""


def protocols(folder: Path = FOLDER) -> dict[str, Protocol]:
    """Return the protocols of a folder by name."""
    files = sorted(folder.glob("*/protocol.yaml"))
    return {file.parent.name: Protocol(file.parent.name, **yaml.safe_load(file.read_text())) for file in files}


def record_path(name: str, scale: str, folder: Path = FOLDER) -> Path:
    """Return the path of a reproduction's record."""
    return folder / name / f"{scale}.json"


def judged(published: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return our figure for a published one: values by seed, mean, 95% interval, and whether it agrees.

    Args:
        published: an entry of a protocol's `published`.
        rows: trials after rounds, as in trials.csv, with numbers as numbers.
    """
    judge = published["judge"]
    pick = partial(_picked, rows, judge["column"])
    found = pick(judge["of"])
    for name, combine in COMBINED.items():
        if name in judge:
            others = pick(judge[name])
            found = {seed: combine(value, others[seed]) for seed, value in found.items() if seed in others}
    scale, offset = judge.get("scale", 1), judge.get("offset", 0)
    by_seed = {seed: scale * value + offset for seed, value in sorted(found.items())}
    ours = estimate([*by_seed.values()])
    if ours is None:
        return {"id": published["id"], "by_seed": by_seed, "agrees": None}
    off = ours.mean - published["value"]
    low, high = published.get("interval", (published["value"],) * 2)
    beyond = {"least": off > 0, "most": off < 0}.get(published.get("direction", ""), False)
    agrees = beyond or low <= ours.mean <= high or abs(off) <= published["tolerance"] + 1e-9
    return {"id": published["id"], "by_seed": by_seed, "agrees": agrees, **vars(ours)}


def _picked(rows: Sequence[Row], column: str, where: Mapping[str, Any]) -> dict[int, float]:
    """Return seed -> value of the column, in the rows that match `where`: column -> number or pattern of text."""
    found: dict[int, tuple[str, float]] = {}
    for row in rows:
        if all(_holds(row[name], wanted) for name, wanted in where.items()) and (cell := row.get(column)) is not None:
            value = len(cell.split()) if isinstance(cell, str) else cell
            stage, _ = found.setdefault(row["seed"], (row["stage"], value))
            if stage != row["stage"]:
                raise SystemExit(
                    f"`{dict(where)}` selects several stages of seed {row['seed']}; say more in the protocol."
                )
    return {seed: value for seed, (_, value) in found.items()}


def _holds(cell: Any, wanted: Any) -> bool:
    if isinstance(wanted, str):
        return fnmatchcase(str(cell or ""), wanted)
    return cell is not None and isclose(cell, wanted, rel_tol=1e-9, abs_tol=1e-9)


def rows_of(text: str) -> list[Row]:
    """Return the rows of a trials.csv with the columns that are kept, numbers as numbers, each stage's once."""
    found = dict[tuple[str, str], Row]()
    for line in csv.DictReader(io.StringIO(text)):
        further = [name for name in line if FURTHER.fullmatch(name)]
        row = {name: _plain(name, line[name]) for name in (*KEPT, *further)}
        found.setdefault((row["stage"], row["line"]), row)
    return [*found.values()]


def _plain(name: str, cell: str) -> Any:
    if name in ("dead_layers", "line", "trial", "stage"):  # a name may look like a number
        return cell
    if cell in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[cell]
    try:
        number = float(cell)
    except ValueError:
        return cell
    return int(number) if cell.lstrip("-").isdigit() else number


def commands(protocol: Protocol, scale: str, data: str, store: str, overrides: Sequence[str]) -> Iterator[list[str]]:
    """Yield the overrides of each command of a scale, after the commands before it have run.

    `{data}` becomes the folder of the data sets, and `{trained}` the file of the dense network that the command before
    has trained; if it has not run, the network begins with its initial weights, so the command can be planned.
    """
    before: list[str] = []
    for given in protocol.scales[scale]["commands"]:
        filled = [each.replace("{data}", data) for each in given]
        if any("{trained}" in each for each in filled):
            found = trained_weights(before, store)
            filled = [each.replace("{trained}", str(found)) for each in filled]
            filled = [each for each in filled if found or not each.startswith(OF_TRAINED)]
        placed = any(each == "data=digits" or each.startswith("data.root=") for each in filled)
        root = [] if placed else [f"data.root={data}"]
        kept = "store.keep=all"  # what one command has trained the next goes on from
        before = [*filled, *root, f"store.uri={store}", kept, "tracking=none", *overrides]
        yield before


def trained_weights(overrides: Sequence[str], store: str) -> Path | None:
    """Return the file of the only dense network of a command in a store on this machine; None if it is not trained."""
    (key,) = (key for key, stage in planned(overrides).stages.items() if stage.kind == "dense")
    return next(Path(store, folder_of(key)).rglob(WEIGHTS), None)


def main() -> int:
    """Run the reproductions, write records and page, and return the worst exit status of the commands."""
    given = _arguments()
    known, status = protocols(), 0
    names = [*known] if "all" in given.names else given.names
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"`NAME` (={unknown[0]}) must be one of {', '.join(known)}, or all.")
    for name in names:
        if given.scale not in known[name].scales:
            print(f"{name} has no scale {given.scale}: left out")
            continue
        try:
            status = max(status, _reproduce(known[name], given))
        except ConfigError as error:  # such as a package that is not installed
            raise SystemExit(str(error)) from None
        if status == INTERRUPTED:
            break
    if not given.dry_run:
        (ROOT / "docs" / "reproductions.md").write_text(page())
    return status


def page(folder: Path = FOLDER) -> str:
    """Return docs/reproductions.md, from the protocols and the records of a folder."""
    known = protocols(folder)
    places = {(name, scale): record_path(name, scale, folder) for name in known for scale in known[name].scales}
    records = {key: json.loads(path.read_text()) for key, path in places.items() if path.exists()}
    readings = {name: file.read_text() for name in known if (file := folder / name / "reading.md").exists()}
    return reproductions_page.page([vars(protocol) for protocol in known.values()], records, readings)


def planned(overrides: Sequence[str]) -> Plan:
    """Return the plan of a command, with its axes expanded as by Hydra's sweeper; errors of planning pass through."""
    hydra_options.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("config", [*overrides], RunMode.MULTIRUN)
        axes = [f"{key}={values}" for key, values in master.hydra.sweeper.params.items()]
        parsed = OverridesParser.create(config_loader=loader).parse_overrides([*axes, *overrides])
        (jobs,) = BasicSweeper.split_arguments(parsed, None)
        return make_plan([*compose_jobs(loader, master, jobs)])


def _reproduce(protocol: Protocol, given: argparse.Namespace) -> int:
    """Run the commands of a protocol, each in its own process, and write the record of their results."""
    status, asked = 0, list[list[str]]()
    for overrides in commands(protocol, given.scale, given.data, given.store, given.overrides):
        asked.append(overrides)
        print(f"$ python -m orchestrator {shlex.join(overrides)}", flush=True)
        if given.dry_run:
            plan = planned(overrides)
            print(f"{len(plan.trials)} trials, {len(plan.stages)} stages")
        elif not given.record and status != INTERRUPTED:
            status = max(status, _wait(subprocess.Popen([sys.executable, "-m", "orchestrator", *overrides])))
    changed = [each for each in given.overrides if not each.lstrip("+~").startswith(NEUTRAL)]
    if given.dry_run or changed:
        print(f"Nothing is recorded{f', because {changed[0]} is not in the protocol' if changed else ''}.")
        return status
    if status and not given.record:
        print("Nothing is recorded: a command did not finish. Run it again, or pass --record for what has finished.")
        return status
    found = [_compared(given.store, overrides) for overrides in asked]
    rows = {f"{row['stage']} {row['line']}": row for each in found for row in rows_of(rows_csv(each).decode())}
    windows = [window_row(pair) for each in found for pair in each.windows]
    record = json.dumps(_record(protocol, given.scale, [*rows.values()], windows), indent=1)
    record_path(protocol.name, given.scale).write_text(f"{record}\n")
    return status


def _record(protocol: Protocol, scale: str, rows: Sequence[Row], windows: Sequence[Row]) -> dict[str, Any]:
    work = {row["stage"]: row["seconds"] for row in rows}
    of_protocol = [
        "git",
        "-C",
        str(ROOT),
        "log",
        "-1",
        "--format=%H",
        "--",
        f"docs/reproductions/{protocol.name}/protocol.yaml",
    ]
    return {
        "name": protocol.name,
        "scale": scale,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "protocol": subprocess.run(of_protocol, capture_output=True, text=True, check=False).stdout.strip(),
        "environment": environment(),
        "command": f"scripts/reproduce {protocol.name} --scale {scale}",
        "work_seconds": round(sum(work.values()), 1),
        "figures": [judged(each, rows) for each in protocol.published],
        **({"windows": windows} if windows else {}),
        "trials": rows,
    }


def _compared(uri: str, overrides: Sequence[str]) -> Comparison:
    """Return the comparison of a command's finished stages in a store, whoever ran them."""
    plan = planned(overrides)
    return compare_trials(plan, Store(uri).opened(exists=True).finished(plan.stages))


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a command and return its exit status; Ctrl-C reaches the command as well as this process."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="reproductions, or all; OVERRIDEs of the orchestrator")
    parser.add_argument("--scale", choices=SCALES, default="default", help="length of the runs")
    parser.add_argument("--data", default="data", metavar="ROOT", help="folder of the data sets (default: data)")
    parser.add_argument("--store", default="store", metavar="URI", help="where finished stages are kept")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run and write nothing")
    parser.add_argument("--record", action="store_true", help="run nothing: record what the store holds")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_intermixed_args()
    given.overrides = [each for each in given.names if "=" in each or each.startswith(("+", "~"))]
    given.names = [each for each in given.names if each not in given.overrides]
    if bool(given.names) == given.page:
        parser.error("pass the names of reproductions, or all; --page takes none")
    return given


if __name__ == "__main__":
    sys.exit(main())
