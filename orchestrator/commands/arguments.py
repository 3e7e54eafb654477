"""What the commands share that work on a store: its arguments, which sweeps are meant, and how they are listed."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import NoReturn

from orchestrator.core.errors import OrchestratorError
from orchestrator.planning.number_formats import byte_size
from orchestrator.store.saved_sweep import summaries
from orchestrator.store.store import Keep, Store
from orchestrator.views.terminal.standard_streams import say

SHOWN = 100
"""Letters of a command in a list on a terminal."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose refusals fit on a line and say what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong; exit with 2."""
        found = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)", message)
        word = found and (found[1] or found[2])
        close = get_close_matches(word, self._words(), n=1) if word else []
        meant = f"did you mean `{close[0]}`? " if close else ""
        message = re.sub(r" \((choose from .*)\)$", r"; \1", message)
        say(f"{message}; {meant}--help lists all", amiss=True)
        self.exit(2)

    def _words(self) -> Iterator[str]:
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action.choices, dict):  # commands, each with a parser of its own
                for name, parser in action.choices.items():
                    yield name
                    yield from parser._words()


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which store is meant."""
    parser.add_argument(
        "--store", default="store", metavar="URI", help="where sweeps ran (`store.uri`, default: store)"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of its file system, such as endpoint_url=...",
    )


def sweeps_parser(name: str, description: str, none: str = "lists them") -> argparse.ArgumentParser:
    """Return the parser of a command that takes sweeps of a store."""
    parser = CommandParser(prog=f"python -m orchestrator.{name}", description=description)
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=f"a sweep, or how its name begins; none: {none}")
    add_store(parser)
    return parser


def open_store(options: argparse.Namespace, keep: Keep = "needed") -> Store:
    """Return the store that the options name; raise StoreError where there is none.

    Its messages name `store.uri`: call it, and use the store, within `given_as("--store")`.
    """
    return Store(options.store, keep, file_system(options.option, "--option")).opened(exists=True)


def file_system(given: Sequence[str], argument: str) -> dict[str, str]:
    """Return the options of a file system that are given as KEY=VALUE."""
    odd = [option for option in given if "=" not in option]
    if odd:
        raise OrchestratorError(f"`{argument}` (={odd[0]!r}) must be KEY=VALUE, such as endpoint_url=http://host:9000")
    return dict(option.split("=", 1) for option in given)


def list_sweeps(known: Sequence[str], where: str) -> int:
    """Print the sweeps there are; return the exit status."""
    say("\n".join(known) if known else f"{where} holds no sweeps")
    return 0


def list_store(store: Store) -> int:
    """Print the sweeps of a store, a line each; return the exit status."""
    found = summaries(store)
    width = max((len(each.name) for each in found), default=0)
    for each in found:
        saved = "-" if each.saved is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(each.saved))
        trials = f"{each.finished}/{each.trials} trials"
        command = " ".join(each.command.split()).removeprefix("python -m orchestrator ")  # where they differ
        command = f"{command[:SHOWN]}..." if len(command) > SHOWN and sys.stdout.isatty() else command
        say(f"{each.name:<{width}}  {saved:<16}  {each.status:<10} {trials:>14} {byte_size(each.bytes):>9}  {command}")
    if not found:
        say(f"{store} holds no sweeps")
    return 0
