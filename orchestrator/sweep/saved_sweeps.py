"""What the commands share that take sweeps of a store: their arguments, and which sweeps are meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from orchestrator.core.errors import OrchestratorError
from orchestrator.store.store import Store
from orchestrator.views.terminal.streams import say


def sweeps_parser(name: str, description: str, none: str = "lists them") -> argparse.ArgumentParser:
    """Return the parser of a command that takes sweeps of a store."""
    parser = argparse.ArgumentParser(prog=f"python -m orchestrator.{name}", description=description)
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=f"a sweep, or how its name begins; none: {none}")
    parser.add_argument("--store", default="store", metavar="URI", help="where they ran (`store.uri`, default: store)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="file system option")
    return parser


def open_store(options: argparse.Namespace) -> Store:
    """Return the store that the options name."""
    odd = [option for option in options.option if "=" not in option]
    if odd:
        raise OrchestratorError(f"`--option` (={odd[0]!r}) must be KEY=VALUE, such as endpoint_url=http://host:9000")
    return Store(options.store, options=dict(option.split("=", 1) for option in options.option))


def list_sweeps(known: Sequence[str], where: str) -> int:
    """Print the sweeps there are; return the exit status."""
    say("\n".join(known) if known else f"{where} holds no sweeps")
    return 0


def chosen_sweeps(known: Sequence[str], names: Sequence[str], where: str) -> list[str]:
    """Return the full names of the sweeps asked for, by how they begin."""
    chosen = []
    for name in names:
        matches = [name] if name in known else [other for other in known if other.startswith(name)]
        if len(matches) != 1:
            fault = f"is how several begin: {', '.join(matches)}" if matches else "is not there"
            raise OrchestratorError(f"`SWEEP` (={name!r}) {fault}; {where} holds: {', '.join(known) or 'none'}")
        chosen += matches
    return chosen
