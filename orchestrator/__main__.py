"""Command line `python -m orchestrator`, or `pruning-orchestrator`: run a sweep, and explain mistakes in sentences.

The first arguments `compare`, `export`, `gate`, `sync`, `store`, `allocate` and `layers` run those commands in place of
a sweep.

Exit status: 0 all trials finished, 1 some did not, 2 the configuration was refused, 3 the MLflow view is incomplete,
130 interrupted, 141 the reader of the output has closed it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import traceback
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.redact import secrets_in, without
from orchestrator.execution import interrupts
from orchestrator.views.terminal.standard_streams import ended_quietly, say, show_what_can_be_shown

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONF = next(
    folder for folder in (Path(__file__).parent / "conf", Path(__file__).parent.parent / "conf") if folder.is_dir()
)
"""Packaged configuration: inside the wheel, or beside the package in a checkout."""

SPACED = re.compile(r"(?:^|\0)(?P<key>[\w.@/+~]+)(?:\0=\0?|=\0(?=[^\0=-]+(?:\0|$)))(?P<value>[^\0]+)")
"""Setting with spaces around its equals sign, such as `seed = 3`, in arguments joined by NUL."""
COMMANDS = ("compare", "gate", "sync", "store", "export", "allocate", "layers")
"""First arguments that run the `main` of a module in `orchestrator.commands`."""


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] and sys.argv[1] in COMMANDS:  # before a file in the working directory can shadow a package
        run_command(sys.argv.pop(1))
    with ended_quietly():
        _run_sweep()


def run_command(name: str) -> NoReturn:
    """Run a command of `COMMANDS` with the arguments of this process, and end the process."""
    with interrupts.leaving_on_interrupt():
        command = import_module(f"orchestrator.commands.{name}_command").main
    with interrupts.ending_on_interrupt(), ended_quietly():
        sys.exit(command())


def _run_sweep() -> None:
    runs_nothing = any(each.lower() == "dry_run=true" for each in sys.argv[1:])
    interrupts.leave_when_interrupted(interrupts.INTERRUPTED if runs_nothing else interrupts.LEAVING)
    show_what_can_be_shown()
    import hydra  # late, so that Ctrl-C ends the import without a traceback

    from orchestrator.config import hydra_options
    from orchestrator.config.config_groups import with_own_options

    @hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
    def compose(config: DictConfig) -> None:
        """Run the single trial of a command without axes; the launcher plugin runs all other jobs."""
        from orchestrator.sweep.launch import run_single

        try:
            run_single(config)
        except OrchestratorError as error:  # Hydra would print its own report of the error
            sys.exit(_say(str(error), error.exit_status))

    sys.argv[1:] = with_own_options(_ordered(sys.argv[1:]))
    hydra_options.register()
    if told := [*hydra_options.shadowed(_config_dir(sys.argv[1:]), CONF)]:
        sys.exit(_say("\n".join(told), 2))
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for custom models and data, as with `python -m`
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra passes errors on, and they are printed below
    try:
        compose()
        if (launch := sys.modules.get("orchestrator.sweep.launch")) and launch.BEHIND:
            sys.exit(_say("\n".join(map(str, launch.BEHIND)), launch.BEHIND[0].exit_status))
    except OrchestratorError as error:
        sys.exit(_say(str(error), error.exit_status))
    except BrokenPipeError:
        raise
    except Exception as error:
        from orchestrator.config.refusals.refused_settings import explain_command, is_refusal

        if not is_refusal(error):
            sys.exit(_say(traceback.format_exc(), 1))
        sys.exit(_say(explain_command(error, CONF, sys.argv[1:]), 2))


def _ordered(arguments: list[str]) -> list[str]:
    """Return the arguments with settings before options, as argparse needs; exit for any other argument."""
    from hydra._internal.utils import get_args_parser

    if spaced := SPACED.search("\0".join(arguments)):
        typed = " ".join(spaced[0].strip("\0").split("\0"))
        setting = shlex.quote(f"{spaced['key']}={spaced['value']}")
        sys.exit(_say(f"`{typed}`: a setting has no spaces around its equals sign; write {setting}.", 2))
    if arguments and arguments[0].isidentifier():  # not a setting or option
        near = get_close_matches(arguments[0], COMMANDS, n=1)
        meant = f"did you mean {near[0]}? They are" if near else "commands are"
        text = f"`{arguments[0]}` is not a command, and a setting is key=value; {meant} {', '.join(COMMANDS)}."
        sys.exit(_say(text, 2))
    parser = get_args_parser()
    found, rest = parser.parse_known_args(arguments)
    if odd := next((each for each in rest if each.startswith("-")), None):
        if near := get_close_matches(odd.partition("=")[0], parser._option_string_actions, n=1, cutoff=0.8):
            sys.exit(_say(f"`{odd}` is not an option; did you mean {near[0]}? --help lists all options.", 2))
        setting = odd.lstrip("-").replace("-", "_")
        setting = f"{'+' * (setting.partition('=')[0] == 'sweep')}{setting}{'' if '=' in setting else '=...'}"
        text = f"`{odd}` is not an option; a setting has no dashes and an equals sign: {setting}; --help lists both."
        sys.exit(_say(text, 2))
    settings = [*found.overrides, *rest]
    return [*settings, *(each for each in arguments if each not in settings)]


def _config_dir(arguments: list[str]) -> Path | None:
    """Return the folder of `--config-dir`; None if that option is not given."""
    from hydra._internal.utils import get_args_parser

    named = get_args_parser().parse_known_args(arguments)[0].config_dir
    return Path(named) if named else None


def _say(text: str, status: int) -> int:
    typed = {name: value for name, _, value in (argument.partition("=") for argument in sys.argv[1:])}
    say(without(text, secrets_in(typed)), amiss=True)
    return status


if __name__ == "__main__":
    main()
