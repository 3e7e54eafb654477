"""Text of docs/reference/commands.md: the arguments of every command, from its parser, and environment variables."""

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

After this page you can look up every command, argument, exit status and environment variable. Each command prints its
part of this page with `--help`. After an installation, `pruning-orchestrator` is short for `python -m orchestrator`;
its first argument can be the name of another command, as in `pruning-orchestrator compare`.

Every command ends with status 130 if it is interrupted, and with 141 (128 + SIGPIPE) if the reader of its output has
left, as in `... | head -1`. A sweep then stops; the same command continues it.

## python -m orchestrator

    python -m orchestrator [SETTING ...] [-m] [--config-dir DIR]

Plan and run a trial or a sweep. A setting is `KEY=VALUE` or `GROUP=OPTION`, see [Configuration](configuration.md).

| argument | meaning |
|---|---|
| `+sweep=PRESET` | the axes and settings of a preset |
| `-m`, `--multirun` | a sweep over values separated by commas, or over ranges, as in `'seed=range(3)'` |
| `--config-dir DIR` | groups and presets of your own, `DIR/GROUP/OPTION.yaml` |
| `--cfg job` | print the resulting configuration |
| `--help`, `--hydra-help` | groups and settings; all flags of Hydra |

| exit status | |
|---|---|
| 0 | all trials finished |
| 1 | some trials did not finish |
| 2 | the configuration was refused, and nothing ran |
| 3 | MLflow lacks a part of the sweep; the last line is the command that completes it |
| 130 | interrupted; the same command continues |
| 141 | the reader of the output has left; the same command continues |

If several apply, the status is the first of 130, 2, 1, 3.

"""
VARIABLES = """\
## Environment variables

| variable | what it does |
|---|---|
| `MLFLOW_TRACKING_URI` | tracking server of the view, unless `tracking.uri` is set |
| `MLFLOW_EXPERIMENT_NAME` | experiment of the view, unless `tracking.experiment` differs from its default |
| `RAY_ADDRESS` | cluster to join, unless `cluster.address` names one |
| `RAY_AUTH_MODE`, `RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH` | authentication of a Ray cluster, as Ray reads them |
| `RAY_TMPDIR` | folder for the sockets and logs of a Ray that the sweep starts; default `TMPDIR` |
| `TMPDIR` | folder for images and fetched files, kept once for each node in `pruning-orchestrator-UID/` |
| `CUDA_VISIBLE_DEVICES` | visible GPUs, as CUDA reads it |
| `CI` | if set, the live display is plain lines, as on a terminal that cannot move its cursor |

Variables of MLflow, s3fs, gcsfs and Hugging Face's libraries (credentials, proxies, caches) apply to the driver and to
each worker. `scripts/install` uses the interpreter `PYTHON` for `.venv`.
"""


def page() -> str:
    """Return the page."""
    return HEAD + "\n".join(line for name in sorted(COMMANDS) for line in _command(name)) + "\n" + VARIABLES


def parser_of(name: str, arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a command, after it has parsed `arguments`.

    Raises:
        ValueError: the parser refuses the arguments.
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
    """Yield the description and the arguments of a parser, and of its subcommands."""
    yield f"{'#' * level} {parser.prog}\n"
    if parser.description:
        yield f"{parser.description}\n"
    within = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    plain = [each for each in parser._actions if each not in within and "--help" not in each.option_strings]
    if plain:
        yield "| argument | meaning |\n|---|---|"
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
