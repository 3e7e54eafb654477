"""`python -m orchestrator.store report|prune|verify STORE`: look after a store."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from orchestrator.core.errors import OrchestratorError
from orchestrator.store.retention import Pruned, prune, sizes, verify
from orchestrator.store.store import Keep, Store
from orchestrator.views.terminal.streams import say


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m orchestrator.store`; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        settings = dict(option.split("=", 1) for option in options.option)
        store = Store(options.uri, keep=getattr(options, "keep", "needed"), options=settings)
        return {"report": _report, "prune": _prune, "verify": _verify}[options.command](store, options)
    except OrchestratorError as error:
        say(error, amiss=True)
        return 2


def _report(store: Store, _: argparse.Namespace) -> int:
    found = sizes(store)
    if not found:
        say(f"{store!r} holds nothing.")
        return 0
    for category, (files, size) in sorted(found.items(), key=lambda item: -item[1][1]):
        say(f"{category:<20}{files:>10} files{_readable(size):>12}")
    say(f"{len(store.backend.names('stages'))} stages, sweeps: {', '.join(store.sweeps()) or 'none'}")
    idle = prune(store, dry_run=True)
    print(f"prune would free {_readable(idle.bytes)}: {_summary(idle)}")
    _warn(idle)
    return 0


def _prune(store: Store, options: argparse.Namespace) -> int:
    pruned = prune(store, dry_run=options.dry_run)
    print(f"{'would free' if options.dry_run else 'freed'} {_readable(pruned.bytes)}: {_summary(pruned)}")
    for name in store.backend.names("quarantine") if options.quarantine else ():
        if not options.dry_run:
            store.backend.remove_folder(f"quarantine/{name}")
        say(f"{'would remove' if options.dry_run else 'removed'} quarantine/{name}")
    return _warn(pruned)


def _warn(pruned: Pruned) -> int:
    """Say which saved sweeps cannot be read, and what follows; return the exit status."""
    for damage in pruned.damages:
        say(f"{damage}. No weights can be dropped until then: it might need any.", amiss=True)
    return 1 if pruned.damages else 0


def _verify(store: Store, _: argparse.Namespace) -> int:
    stages = len(store.backend.names("stages"))
    damages = verify(store)
    for damage in damages:
        say(damage, amiss=True)
    print(f"{stages - len(damages)} of {stages} stages are intact")
    return 1 if damages else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.store", description="Look after a store.")
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("uri", help="a directory, or a URI such as s3://bucket/prefix")
    common.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="a storage option, such as endpoint_url=..."
    )
    commands.add_parser("report", parents=[common], help="say what takes how much room")
    pruning = commands.add_parser(
        "prune", parents=[common], help="remove weights that nothing starts from, and leftovers"
    )
    pruning.add_argument(
        "--keep", choices=get_args(Keep), default="needed", help="whose weights stay (default: needed)"
    )
    pruning.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    pruning.add_argument("--quarantine", action="store_true", help="remove damaged stages that were set aside as well")
    commands.add_parser("verify", parents=[common], help="check every digest; damaged stages are set aside")
    return parser


def _summary(pruned: Pruned) -> str:
    return f"weights that nothing starts from, {len(pruned.stages)}; leftover files, {len(pruned.leftovers)}"


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


if __name__ == "__main__":
    sys.exit(main())
