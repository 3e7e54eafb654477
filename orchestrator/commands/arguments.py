"""Shared parts of commands: arguments, opening the store, lists of sweeps, and files that a command line names."""

from __future__ import annotations

import argparse
import errno
import os
import re
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from orchestrator.core.errors import OrchestratorError
from orchestrator.planning.number_formats import byte_size
from orchestrator.store import saved_sweep
from orchestrator.store.backends import given_as
from orchestrator.store.saved_sweep import SavedSweep, summaries
from orchestrator.store.store import Keep, Store
from orchestrator.views.terminal.standard_streams import say, show_what_can_be_shown

SHOWN = 100
"""Maximum length of a sweep's command in a list on a terminal."""


class CommandParser(argparse.ArgumentParser):
    """Argument parser with one-line errors that suggest the nearest word."""

    def error(self, message: str) -> NoReturn:
        """Print the error with a suggestion, and exit with status 2."""
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
            if isinstance(action.choices, dict):  # subcommands, each with its own parser
                for name, parser in action.choices.items():
                    yield name
                    yield from parser._words()


def run_command(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], arguments: Sequence[str] | None
) -> int:
    """Parse arguments and run a command; return its exit status, 2 for a mistake, which is printed."""
    show_what_can_be_shown()
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except OrchestratorError as error:
        say(error, amiss=True)
    except OSError as error:
        if getattr(options, "output", None) is None:
            raise
        say(f"`--output` (={options.output!r}) cannot be written: {error.strerror or error}", amiss=True)
    return 2


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a sweep, and those that name its store."""
    parser.add_argument(
        "sweep", nargs="?", metavar="SWEEP", help="name of a sweep, or its beginning (default: the last saved)"
    )
    add_store(parser)


def named_sweep(options: argparse.Namespace) -> tuple[Store, SavedSweep]:
    """Return the store and the sweep that the options name."""
    with given_as("--store"):
        store = open_store(options)
        return store, saved_sweep.load(store, saved_sweep.chosen_sweep(store, options.sweep))


def say_default(options: argparse.Namespace, sweep: SavedSweep) -> None:
    """Print which sweep a command took if the user named none."""
    if options.sweep is None:
        say(f"sweep {sweep.info.name}, the last that was saved")


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a store."""
    parser.add_argument(
        "--store", default="store", metavar="URI", help="the `store.uri` of the sweeps (default: store)"
    )
    add_option(parser, "--option", "option of the store's file system, such as endpoint_url=...")


def add_option(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Add an argument for options of a file system, which can be repeated."""
    parser.add_argument(name, action="append", default=[], metavar="KEY=VALUE", help=text)


def sweeps_parser(name: str, description: str, none: str = "lists them") -> argparse.ArgumentParser:
    """Return the parser of a command that takes sweeps of a store.

    Args:
        name: name of the command
        description: first line of its help
        none: what the command does without sweeps, for the help
    """
    parser = CommandParser(prog=f"python -m orchestrator.{name}", description=description)
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=f"name of a sweep, or its beginning; none: {none}")
    add_store(parser)
    return parser


def open_store(options: argparse.Namespace, keep: Keep = "needed") -> Store:
    """Return the store that the options name; raise StoreError if there is none.

    Errors of the store name `store.uri`, so call this, and use the store, within `given_as("--store")`.
    """
    return Store(options.store, keep, file_system(options.option, "--option")).opened(exists=True)


def file_system(given: Sequence[str], argument: str) -> dict[str, str]:
    """Parse options of a file system, each given as KEY=VALUE."""
    invalid = [option for option in given if "=" not in option]
    if invalid:
        raise OrchestratorError(
            f"`{argument}` (={invalid[0]!r}) must be KEY=VALUE, such as endpoint_url=http://host:9000"
        )
    return dict(option.split("=", 1) for option in given)


def list_sweeps(known: Sequence[str], where: str) -> int:
    """Print the names of the sweeps; return the exit status."""
    say("\n".join(known) if known else f"{where} holds no sweeps")
    return 0


def list_store(store: Store) -> int:
    """Print a line for each sweep of a store; return the exit status."""
    found = summaries(store)
    width = max((len(each.name) for each in found), default=0)
    for each in found:
        saved = "-" if each.saved is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(each.saved))
        trials = f"{each.finished}/{each.trials} trials"
        command = " ".join(each.command.split()).removeprefix("python -m orchestrator ")  # all begin alike
        command = f"{command[:SHOWN]}..." if len(command) > SHOWN and sys.stdout.isatty() else command
        say(f"{each.name:<{width}}  {saved:<16}  {each.status:<10} {trials:>14} {byte_size(each.bytes):>9}  {command}")
    if not found:
        say(f"{store} holds no sweeps")
    return 0


KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode), "a device"),
)


def read_named(argument: str, path: Path) -> bytes | None:
    """Return the content of the file that `argument` names; None if there is no such file.

    Raises:
        OrchestratorError: it is not a regular file (reading a FIFO might wait for ever), or it cannot be read
    """
    with _explained(argument, path, "read"):
        try:
            _refuse_others(path)
            return path.read_bytes()
        except FileNotFoundError:
            return None


def replace_named(argument: str, path: Path, content: bytes) -> None:
    """Replace the file that `argument` names atomically: on an error the old content stays. Links are followed.

    Raises:
        OrchestratorError: it is not a regular file, or it cannot be written
    """
    with _explained(argument, path, "written"):
        full = Path(os.path.realpath(path))
        with suppress(FileNotFoundError):
            _refuse_others(full)
        aside = full.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            with open(aside, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileNotFoundError):
                aside.chmod(stat.S_IMODE(full.stat().st_mode))
            aside.replace(full)
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)


def check_output_folder(argument: str, path: Path) -> None:
    """Raise OrchestratorError if no file can be written below the folder that `argument` names.

    The folder may be missing; the nearest existing folder above it is checked then.
    """
    with _explained(argument, path, "written", "folder"):
        folder = path.absolute()
        while not os.path.lexists(folder):
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a directory")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"permission denied in {folder}")


@contextmanager
def _explained(argument: str, path: Path, done: str, kind: str = "file") -> Iterator[None]:
    """Turn an OSError into an OrchestratorError that names the argument and the path."""
    try:
        yield
    except OSError as error:
        raise OrchestratorError(
            f"`{argument}` (={path}) cannot be {done}: {error.strerror or error}; name another {kind}."
        ) from None


def _refuse_others(path: Path) -> None:
    """Raise OSError if a path is not a regular file."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(f"it is {next((kind for holds, kind in KINDS if holds(mode)), 'not a regular file')}")
