"""docs/reference/commands.md as text: the arguments of every command, by their parsers; environment variables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn
from unittest.mock import patch

from orchestrator.__main__ import COMMANDS

HEAD = """\
# Commands

<!-- Made by `.venv/bin/python -m scripts.reference` from the commands' own parsers; edit those, or the text there. -->

Each says the same with `--help`. Installed, `pruning-orchestrator` is `python -m orchestrator`, and its first argument
may be the name of another command, as in `pruning-orchestrator compare`.

All commands end with status 130 when they are interrupted, and with 141 (128 + SIGPIPE) when the reader of their output
has left, as in `... | head -1`; a sweep stops then, and the same command goes on.

## python -m orchestrator

    python -m orchestrator [SETTING ...] [-m] [--config-dir DIR]

Plan and run a trial, or a sweep. A setting is `KEY=VALUE` or `GROUP=OPTION`, of [the configuration](configuration.md).

| argument | what it is |
|---|---|
| `+sweep=PRESET` | the axes and settings of a preset |
| `-m`, `--multirun` | a sweep over values with commas between them, and ranges, as in `'seed=range(3)'` |
| `--config-dir DIR` | groups and presets of your own, `DIR/GROUP/OPTION.yaml` |
| `--cfg job` | print the configuration that results |
| `--help`, `--hydra-help` | groups and settings; all flags of Hydra |

| exit status | |
|---|---|
| 0 | all trials finished |
| 1 | some did not |
| 2 | the configuration was refused, and nothing ran |
| 3 | MLflow does not hold all of the sweep; the last line is the command that completes it |
| 130 | interrupted; the same command goes on |
| 141 | the reader of its output has left; the same command goes on |

130 goes before 2, 2 before 1, 1 before 3.

"""
VARIABLES = """\
## Environment variables

| variable | what it does |
|---|---|
| `MLFLOW_TRACKING_URI` | where the view of a sweep goes, unless `tracking.uri` says it |
| `MLFLOW_EXPERIMENT_NAME` | its experiment, unless `tracking.experiment` says another than the default |
| `RAY_ADDRESS` | the cluster to join, unless `cluster.address` names one |
| `RAY_AUTH_MODE`, `RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH` | how a Ray cluster knows who may join, as Ray reads them |
| `RAY_TMPDIR` | where a Ray of the sweep's own keeps its sockets and logs; else `TMPDIR` |
| `TMPDIR` | where pictures and fetched files are held once a node, in `pruning-orchestrator-UID/` |
| `CUDA_VISIBLE_DEVICES` | the GPUs that there are, as CUDA reads it |
| `CI` | set: the live display is plain lines, as on a terminal that cannot move its cursor |

What MLflow, s3fs, gcsfs and Hugging Face's libraries read (credentials, proxies, caches) holds for the driver and for
each worker. `scripts/install` takes `PYTHON` as the interpreter of `.venv`.
"""


def page() -> str:
    """Return the page."""
    return HEAD + "\n".join(line for name in sorted(COMMANDS) for line in _command(name)) + "\n" + VARIABLES


def parser_of(name: str, arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a command, once it has taken `arguments` as the command would.

    Raises:
        ValueError: it refuses them.
    """
    taken = argparse.ArgumentParser.parse_args

    class Parsed(BaseException):
        pass

    found: list[argparse.ArgumentParser] = []

    def parse(self: argparse.ArgumentParser, _: Any = None, __: Any = None) -> NoReturn:
        found.append(self)
        if arguments:
            taken(self, arguments)
        raise Parsed

    main: Callable[[Sequence[str]], int] = import_module(f"orchestrator.commands.{name}_command").main
    with patch.object(argparse.ArgumentParser, "parse_args", parse):
        try:
            main(arguments)
        except Parsed:
            return found[0]
        except SystemExit as end:
            raise ValueError(f"orchestrator.{name} refuses {' '.join(arguments)}") from end
    raise ValueError(f"orchestrator.{name} reads no arguments")


def _command(name: str) -> Iterator[str]:
    yield from _arguments(parser_of(name), 2)


def _arguments(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """Yield what a parser says of itself, and of the commands within it."""
    yield f"{'#' * level} {parser.prog}\n"
    if parser.description:
        yield f"{parser.description}\n"
    within = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    plain = [each for each in parser._actions if each not in within and "--help" not in each.option_strings]
    if plain:
        yield "| argument | what it is |\n|---|---|"
        for action in plain:
            yield f"| {_shown(action)} | {(action.help or '').replace('|', chr(92) + '|')} |"
        yield ""
    for each in within:
        helps = {choice.dest: choice.help for choice in each._choices_actions}
        for command, inner in each.choices.items():
            inner.description = inner.description or _sentence(helps.get(command))
            yield from _arguments(inner, level + 1)


def _shown(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return f"`{value}`{' ...' if action.nargs in ('*', '+') else ''}"
    value = "" if action.nargs == 0 else f" {'|'.join(map(str, action.choices)) if action.choices else value}"
    return ", ".join(f"`{each}{value}`" for each in action.option_strings).replace("|", "\\|")


def _sentence(text: str | None) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""
