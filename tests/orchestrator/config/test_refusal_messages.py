"""Patterns of messages match the messages of the installed Hydra, OmegaConf and Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.types import RunMode
from hydra.utils import instantiate

from orchestrator.__main__ import CONF
from orchestrator.config import hydra_options
from orchestrator.config.compose import plain
from orchestrator.config.refusals.messages import Message, absent_choice, file_being_read, text_of

Provoke = Callable[..., Exception]
GLOBAL = "# @package _global_\n"


@pytest.fixture(scope="module")
def provoke(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provoke]:
    """Compose a command line, with a preset if one is given, and return the error."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "sweep").mkdir()
    hydra_options.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()

        def raised(setting: str = "", *, preset: bytes = b"") -> Exception:
            (folder / "sweep" / "preset.yaml").write_bytes(preset)
            settings = [f"hydra.searchpath=[file://{folder}]", setting or "+sweep=preset"]
            try:
                config = loader.load_configuration("config", settings, RunMode.RUN)
                plain(config)
                instantiate(config.hydra.sweeper)
            except Exception as error:
                return error
            pytest.fail(f"{setting or preset!r} is refused no longer")

        yield raised


class Case(NamedTuple):
    """Smallest command line or preset that provokes a message, and the groups that its pattern finds."""

    message: Message
    setting: str = ""
    preset: str = ""
    groups: dict[str, str | None] = {}  # noqa: RUF012 - never changed


CASES = (
    Case(Message.NOT_OVERRIDDEN, "sed=1", groups={"key": "sed", "no_default": None}),
    Case(Message.NOT_OVERRIDDEN, "sweep=x", groups={"key": "sweep", "no_default": ". No match in the defaults list"}),
    Case(
        Message.NOT_OVERRIDDEN,
        preset="defaults: [override /model: cnn]",
        groups={"key": "model@sweep.model", "no_default": None},
    ),
    Case(Message.NOT_DELETED, "~sweep", groups={"key": "sweep"}),
    Case(Message.NOT_DELETED, "~model=x", groups={"key": "model"}),
    Case(Message.NOT_DELETED, "~sed", groups={"key": "sed"}),
    Case(Message.NOT_DELETED, "~seed=x", groups={"key": "seed"}),
    Case(Message.ALREADY_SET, "+seed=1", groups={"key": "seed"}),
    Case(Message.NOT_MERGED, "++seed=x", groups={"key": "seed"}),
    Case(Message.NOT_MERGED, "~train.epochs", groups={"key": "train.epochs"}),
    Case(Message.UNKNOWN_GROUP, "+modle@x=cnn", groups={"key": "modle@x"}),
    Case(Message.AMBIGUOUS, "+sed=0,1", groups={"key": "sed"}),
    Case(Message.SWEEP_IN_A_RUN, "+sed=range(3)", groups={"key": "sed"}),
    Case(
        Message.CHOSEN_TWICE,
        preset=f"{GLOBAL}defaults: [/model: lenet5]",
        groups={"key": "model", "way": "override model: lenet5"},
    ),
    Case(Message.NO_NAME, "model=1.5"),
    Case(Message.FULL_KEY, "model.channels.0=x", groups={"key": "model.channels"}),
    Case(Message.NO_VALUE, "seed=???"),
    Case(Message.INTERPOLATION, "seed=${no.such}"),
    Case(Message.INTERPOLATION, "seed=${no:such}"),
    Case(Message.INTERPOLATION, "seed=${name.such}"),
    Case(Message.INTERPOLATION, "model=${no.such}"),
    Case(Message.DEFAULTS_NO_LIST, preset="defaults: x", groups={"file": "sweep/preset", "kind": "str"}),
    Case(
        Message.IN_A_FILE,
        preset="defaults: [override /x: y]",
        groups={
            "file": "sweep/preset",
            "said": "Could not override 'x@sweep.x'. No match in the defaults list.",
            "key": None,
        },
    ),
    Case(
        Message.IN_A_FILE,
        preset="defaults: [/x: y]",
        groups={"file": "sweep/preset", "said": "Could not find 'x/y'", "key": None},
    ),
    Case(
        Message.IN_A_FILE,
        preset=f"{GLOBAL}sed: 1",
        groups={"file": "sweep/preset", "said": "Key 'sed' not in 'Config'", "key": "sed"},
    ),
    Case(Message.KEY_NOT_IN, preset=f"{GLOBAL}seed.x: 1", groups={"key": "seed.x", "schema": "Config"}),
    Case(Message.KEY_NOT_IN, preset="seed: 1", groups={"key": "sweep", "schema": "Config"}),
    Case(Message.WRONG_VALUE, preset=f"{GLOBAL}seed: 0,1", groups={"value": "0,1"}),
    Case(Message.WRONG_VALUE, preset=f"{GLOBAL}seed: [0, 1]", groups={"value": "[0, 1]"}),
    Case(Message.NOT_A_MAPPING, preset=f"{GLOBAL}train: x", groups={"schema": "Train", "value": "x"}),
    Case(Message.LIST_FOR_A_MAPPING, preset=f"{GLOBAL}- x"),
    Case(
        Message.NOT_IN_ENUM,
        preset=f"{GLOBAL}hydra: {{mode: RAN}}",
        groups={"value": "RAN", "names": "RUN, MULTIRUN"},
    ),
    Case(Message.SWEEPER_ARGUMENT, preset=f"{GLOBAL}hydra: {{sweeper: {{parms: 1}}}}", groups={"key": "parms"}),
    Case(Message.NOISE, "seed=???"),
    Case(Message.NOISE, "seed=0,"),
)


@pytest.mark.slow  # the messages change with a release of Hydra alone
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.message.name}-{case.setting or case.preset}")
def test_each_pattern_matches_its_message(provoke: Provoke, case: Case) -> None:
    error = provoke(case.setting, preset=case.preset.encode())
    texts = [text_of(error)]
    if case.message is Message.NOISE:
        texts = [line.strip() for line in str(error).splitlines()]
    elif case.message is not Message.IN_A_FILE and (file := Message.IN_A_FILE.find(texts[0])):
        texts.append(file["said"])
    found = next(filter(None, map(case.message.find, texts)), None)

    assert found, f"Message.{case.message.name} no longer matches what is said: {texts}"
    assert found.groupdict() == case.groups, f"Message.{case.message.name} finds other groups in: {texts}"


def test_each_pattern_has_a_case() -> None:
    tried = {Message.DUPLICATE_KEY, *(case.message for case in CASES)}

    assert [message.name for message in Message if message not in tried] == []


@pytest.mark.parametrize(
    ("preset", "kind"),
    [(b"seed: \xff", UnicodeDecodeError), (GLOBAL.encode() + b"defaults: [/sweep/preset]", RecursionError)],
)
def test_the_frames_of_hydra_name_the_file_that_it_reads(
    provoke: Provoke, preset: bytes, kind: type[Exception]
) -> None:
    error = provoke(preset=preset)

    assert isinstance(error, kind)
    assert file_being_read(error) == "sweep/preset.yaml"
    assert file_being_read(provoke("seed=x")) == ""


def test_the_yaml_parser_names_a_key_that_stands_twice(provoke: Provoke) -> None:
    error = provoke(preset=b"seed: 1\nseed: 2")

    assert isinstance(error, yaml.MarkedYAMLError)
    found = Message.DUPLICATE_KEY.find(str(error.problem))
    assert found is not None
    assert found["key"] == "seed"


@pytest.mark.parametrize(
    ("setting", "preset", "found"),
    [
        ("optimizer@train.optimizer=x", "", ("optimizer@train.optimizer", "optimizer", "x", "")),
        ("+sweep=a/x", "", ("sweep", "sweep", "a/x", "")),
        ("", f"{GLOBAL}defaults: [override /model: x]", ("model", "model", "x", "sweep/preset.yaml")),
    ],
)
def test_the_frames_of_hydra_tell_where_an_absent_choice_is_made(
    provoke: Provoke, setting: str, preset: str, found: tuple[str, ...]
) -> None:
    absent = absent_choice(provoke(setting, preset=preset.encode()))

    assert absent is not None
    assert (absent.key, absent.group, absent.option, absent.file) == found
    assert absent.group != "sweep" or "reproduce/snip" in absent.options


def test_the_errors_of_hydra_carry_the_choice_and_the_setting(provoke: Provoke) -> None:
    choice, default, setting = provoke("scope=x"), provoke(preset=b"defaults: [/x/y]"), provoke("seed=0,")

    assert isinstance(choice, MissingConfigException)
    assert choice.missing_cfg_file == "scope/x"
    assert {"global", "layer"} <= {*choice.options}
    assert isinstance(default, MissingConfigException)
    assert (default.missing_cfg_file, default.options) == ("x/y", None)
    assert isinstance(setting, OverrideParseException)
    assert setting.override == "seed=0,"
    assert isinstance(provoke("train=${oc.decode:'3'}"), AssertionError)
