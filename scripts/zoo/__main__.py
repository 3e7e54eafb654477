"""Run stock architectures through the engine, and write docs/reference/architectures.md from the results.

    python -m scripts.zoo                                    # what is missing, then the page; many hours
    python -m scripts.zoo --only 'torchvision/resnet*' --again 'torchvision/resnet18'
    python -m scripts.zoo --list timm                        # names of the networks
    python -m scripts.zoo --page                             # the page alone

Each network runs in a process of its own with a limit of processor time for each part and a limit of memory. Results
are appended to a file when a network is done, and the last outcome of a part counts, so that the next call does only
what is missing.
Needs torchvision, timm, ultralytics, transformers and torch-pruning, each installed by pip with
`--no-deps -c constraints.txt`, and what ultralytics imports: opencv-python-headless, polars, polars-runtime-32,
py-cpuinfo and ultralytics-thop.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.zoo.libraries import LIBRARIES, missing, names_of, versions  # noqa: E402
from scripts.zoo.page import PARTS, page, read, read_random  # noqa: E402
from scripts.zoo.processes import Limits, checked  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "architectures.md"
RESULTS = PAGE.with_suffix(".jsonl")
RANDOM = PAGE.with_name("random_networks.jsonl")
CACHE = ROOT / "build" / "zoo"


def listed(libraries: Sequence[str]) -> dict[str, list[str]]:
    """Return the networks of each library that is installed; say which are not."""
    found = {}
    for library in libraries:
        if absent := missing(library):
            print(f"{library}: left out, {', '.join(absent)} is not installed", file=sys.stderr)
            continue
        found[library] = names_of(library, CACHE)
    return found


def run(names: Mapping[str, Sequence[str]], given: argparse.Namespace) -> None:
    """Check the networks of each library, and append each result when it is there."""
    done = read(given.results)
    wanted = missing_parts([name for each in names.values() for name in each], done.networks, given)
    new = [json.dumps({"library": each, "networks": len(names[each])}) for each in names]
    known = [json.dumps({"library": each, "networks": size}) for each, size in done.lengths.items()]
    limits, lock = Limits(given.seconds, given.gigabytes), threading.Lock()
    releases, commit = versions(), current_commit()

    def one(name: str) -> None:
        parts = checked(name, wanted[name], limits)
        dated = {part: outcome | {"commit": commit} for part, outcome in parts.items()}
        line = {"name": name, "date": f"{datetime.now(UTC):%Y-%m-%d}", "versions": releases, "parts": dated}
        with lock:
            with given.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{name:<48}", *(f"{part}: {found['verdict']}" for part, found in parts.items()), flush=True)

    given.results.parent.mkdir(parents=True, exist_ok=True)
    with given.results.open("a") as file:
        file.writelines(f"{line}\n" for line in new if line not in known)
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(one, wanted))


def current_commit() -> str:
    """Return the commit of the engine, with a + if files differ from it; empty outside of a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def missing_parts(names: Sequence[str], done: Mapping[str, Any], given: argparse.Namespace) -> dict[str, list[str]]:
    """Return network -> the parts to run of those that match: those without an outcome, or all of them again."""
    found = {}
    for name in names:
        if not any(fnmatch(name, pattern) for pattern in given.only or ["*"]):
            continue
        anew = any(fnmatch(name, pattern) for pattern in given.again or ())
        known = {} if anew or name not in done else done[name]["parts"]
        left = [part for part in given.parts or PARTS if part not in known]
        if left and (not known or known["build"]["verdict"] == "right"):
            found[name] = left
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=LIBRARIES, help="print the names of a library's networks")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names to run, as `timm/*`; may be repeated")
    parser.add_argument("--again", action="append", metavar="PATTERN", help="names to run although they have a result")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="parts to run; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time")
    parser.add_argument("--seconds", type=float, default=180, help="limit of each part, of processor time")
    parser.add_argument("--gigabytes", type=float, default=8, help="limit of each process")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results")
    parser.add_argument("--page", action="store_true", help="write the page from the results, and run nothing")
    return parser.parse_args(arguments)


def main() -> None:
    """Run what is missing, and write the page."""
    given = parsed()
    if given.list:
        print("\n".join(listed([given.list]).get(given.list, ())))
        return
    if not given.page:
        needed = [each for each in LIBRARIES if any(_may_match(pattern, each) for pattern in given.only or ["*"])]
        run(listed(needed), given)
    if given.results == RESULTS or given.page:
        PAGE.write_text(page(read(given.results), read_random(RANDOM)))


def _may_match(pattern: str, library: str) -> bool:
    """Return whether a pattern may match a network of a library."""
    first, slash, _ = pattern.partition("/")
    return not slash or fnmatch(library, first)


if __name__ == "__main__":
    main()
