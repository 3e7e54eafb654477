"""Explanations of refused settings: each names the setting, its value, the rule and the remedy.

Hydra and OmegaConf stop at the first mistake. The refused setting is therefore dropped and the other settings are
composed again, until composition succeeds. All mistakes are explained together, and the composed tree tells the keys.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from orchestrator.config.key_rules import violations
from orchestrator.config.refusals.messages import Message, absent_choice, text_of
from orchestrator.config.refusals.refused_choices import (
    explain_choice,
    explain_choice_file,
    explain_unreadable_file,
    leaves,
    rule,
    unknown,
)

Compose = Callable[[list[str]], DictConfig]
"""Composes a configuration from settings; raises what Hydra raises."""

PARSERS = ("hydra", "omegaconf", "yaml", "antlr4")
TARGET = "_target_"
REMOVED = "~"
"""Value that stands for a removed key."""
NAMING = (
    Message.NOT_OVERRIDDEN,
    Message.NOT_DELETED,
    Message.ALREADY_SET,
    Message.NOT_MERGED,
    Message.UNKNOWN_GROUP,
    Message.AMBIGUOUS,
    Message.SWEEP_IN_A_RUN,
    Message.CHOSEN_TWICE,
    Message.FULL_KEY,
)
"""Messages that name the setting. The full key comes last, as it may lie below the setting."""
_NO_NAME = "must be the name of a choice, as in model=cnn"
_SEVERAL = "has several values; add -m to try each of them, or brackets if the key takes a list"
REASONS = {
    Message.AMBIGUOUS: _SEVERAL,
    Message.SWEEP_IN_A_RUN: _SEVERAL,
    Message.ALREADY_SET: "already exists; leave out the +",
    Message.CHOSEN_TWICE: "already has a choice; leave out the +",
    Message.UNKNOWN_GROUP: "names an unknown group; check the spelling",
    Message.NO_NAME: _NO_NAME,
    Message.NO_VALUE: "has no value; give it one",
}
"""Message -> the rule and the remedy."""


def is_refusal(error: BaseException) -> bool:
    """Whether Hydra, OmegaConf or the YAML parser raised an error, of any type."""
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
    ours = isinstance(error, HydraException | OmegaConfBaseException) or module.split(".")[0] in PARSERS
    return ours or bool(explain_unreadable_file(error))


@lru_cache(maxsize=65536)
def parse(override: str) -> Override:
    """Parse one setting; equal texts are parsed once."""
    return OverridesParser.create().parse_override(override)


def explain_command(error: BaseException, conf: Path, arguments: Sequence[str]) -> str:
    """Explain the error that Hydra raised for a command line."""
    if told := explain_unreadable_file(error):
        return told
    found = get_args_parser().parse_args([*arguments])
    if found.config_dir and not Path(found.config_dir).is_dir():
        return f"`--config-dir` (={found.config_dir}) must be an existing directory; check the path."
    own = [f"hydra.searchpath=[file://{Path(found.config_dir).absolute()}]"] if found.config_dir else []
    with initialize_config_dir(str(conf), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        first = {each: value for each in found.overrides if (value := _first(each)) is not None}

        def compose(settings: list[str]) -> DictConfig:
            chosen = [first[each] for each in settings if each in first]
            return loader.load_configuration("config", [*own, *chosen], RunMode.RUN)

        return explain(error, compose, found.overrides, loader.list_groups(""))


def _first(setting: str) -> str | None:
    """Return a setting with the first value of an axis; None if the axis has no value that can be listed."""
    try:
        parsed = parse(setting)
        if not parsed.is_sweep_override():
            return setting
        return f"{setting.partition('=')[0]}={next(iter(parsed.sweep_string_iterator()))}"
    except HydraException:
        return setting
    except (ValueError, StopIteration, NotImplementedError):
        return None


def explain(error: BaseException, compose: Compose, settings: Sequence[str], groups: Collection[str]) -> str:
    """Return a sentence for each refused setting; `error` is the error that `compose` raised for all settings."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark, said = error.problem_mark, ", ".join(filter(None, (error.context, error.problem)))
        where = f"{mark.name}, line {mark.line + 1}"
        if twice := Message.DUPLICATE_KEY.find(str(error.problem)):
            return f"{where}: the key `{twice['key']}` appears twice; remove one of the two."
        return f"{where}, is not valid YAML ({said}); check indentation, brackets and quotes there."
    left, refused = [*settings], list[tuple[str, BaseException]]()
    tree: DictConfig | None = None
    while tree is None:
        key = _key(error, left, groups)
        refused.append((key, error))
        rest = [each for each in left if not _is_below(each, key)]
        if rest == left:
            break
        left = rest
        try:
            tree = compose(left)
        except Exception as following:
            if not is_refusal(following):
                raise
            error = following
    given = {_key_of(each): _value_of(each) for each in settings}
    known = compose([]) if tree is None else tree
    if len(refused) > 1 and Message.AMBIGUOUS.find(text_of(refused[0][1])):
        del refused[0]  # Hydra also says this if it cannot parse a setting after -m
    told = (
        _sentence(key, each, given | _refused_value(key, text_of(each), settings), known, groups)
        for key, each in refused
    )
    return "\n".join(dict.fromkeys(told))


def _refused_value(key: str, said: str, settings: Sequence[str]) -> dict[str, str]:
    """Map a key to its typed value that an error quotes; return {} if the error quotes none."""
    typed = [each for each in settings if _key_of(each) == key]
    about = next((each for each in typed if re.search(rf"{re.escape(each)}(?!\S*[^\s'.])", said)), None)
    return {} if about is None else {key: _value_of(about)}


def _value_of(setting: str) -> str:
    """Return the value of a setting, without the escapes that Hydra puts before the braces of an axis."""
    return REMOVED if setting.startswith("~") else setting.partition("=")[2].replace("\\{", "{").replace("\\}", "}")


def _key_of(setting: str) -> str:
    return setting.lstrip("+~").partition("=")[0]


def _is_below(setting: str, key: str) -> bool:
    """Whether a setting has the key `key`, or a key below it."""
    return _key_of(setting) == key or _key_of(setting).startswith(f"{key}.")


def _key(error: BaseException, settings: Sequence[str], groups: Collection[str]) -> str:
    """Return the key of the setting that caused an error; empty if no setting did."""
    if isinstance(error, OverrideParseException):
        return _key_of(error.override)
    keys, found = [_key_of(each) for each in settings], _named(error, settings, groups)
    if found in keys:
        return found
    absent, parent = absent_choice(error), Message.IN_A_FILE.find(text_of(error))
    file = absent.file if absent else parent["file"] if parent else ""
    group = file.rpartition("/")[0] or None
    above = [key for key in keys if found.startswith((f"{key}.", f"{key}[")) or key == group]
    return max(above, key=len, default=found)


def _named(error: BaseException, settings: Sequence[str], groups: Collection[str]) -> str:
    """Return the key that an error names, or the key of the only setting that can cause it; empty for none."""
    text = text_of(error)
    if absent := absent_choice(error):
        return absent.key
    if isinstance(error, MissingConfigException):
        return str(error.missing_cfg_file).rpartition("/")[0]
    if named := next(filter(None, (message.find(text) for message in NAMING)), None):
        return str(named["key"])
    if Message.NO_NAME.find(text):
        return next((_key_of(each) for each in settings if _names_no_option(each, groups)), "")
    interpolated = [_key_of(each) for each in settings if "${" in each]
    if isinstance(error, AssertionError):  # raised by Hydra for a choice that does not resolve to text
        return next((key for key in interpolated if key.partition("@")[0] in groups), "")
    return next(iter(interpolated), "") if Message.INTERPOLATION.find(text) else ""


def _names_no_option(setting: str, groups: Collection[str]) -> bool:
    """Whether a setting gives a group a value that names no option, as in `model=1.5`."""
    parsed = parse(_first(setting) or setting)
    chooses = _key_of(setting) in groups and not (parsed.is_delete() or parsed.is_sweep_override())
    return chooses and not isinstance(parsed.value(), str | list | dict)


def _sentence(key: str, error: BaseException, given: dict[str, str], tree: DictConfig, groups: Collection[str]) -> str:
    if isinstance(error, OverrideParseException):
        return _explain_unparsable(error.override, given)
    text, value = text_of(error), given.get(key, "")
    if told := explain_choice(key, value, error) or explain_choice_file(error, tree, groups):
        return told
    if value == REMOVED:
        return f"`~{key}` removes a key that is absent, null or needed by every trial; leave it out, or check its name."
    if absent := Message.NOT_OVERRIDDEN.find(text):
        added = f"`{key}` (={value}) adds a choice; write +{key}={value}."
        return added if absent["no_default"] else _broken_rules(key, value, tree) or unknown(key, given, tree)
    if odd := Message.SWEEPER_ARGUMENT.find(text):
        return f"`hydra.sweeper.{odd['key']}` is not a key; write the axes of a preset under `hydra.sweeper.params`."
    if (twice := Message.CHOSEN_TWICE.find(text)) and key not in given:
        way = twice["way"].replace("override ", "override /", 1)
        return f"{_preset_of(given)}: `{key}` already has a choice; write `{way}`, with the word `override`."
    start = f"`{key}` (={value})" if key in given else f"`{key}`"
    if Message.NO_VALUE.find(text) and TARGET in text:
        group = key.partition(".")[0]
        return f"{start} names no class or function; add `{TARGET}: package.Thing` to its file, or {group}.{TARGET}=..."
    reason = _NO_NAME if isinstance(error, AssertionError) else ""
    if reason := reason or next((REASONS[message] for message in REASONS if message.find(text)), ""):
        return f"{start} {reason}{_decimal(key, value, tree) if reason == _SEVERAL else ''}."
    first = str(error.__cause__ or error).strip().splitlines()[0].rstrip(".")
    if Message.INTERPOLATION.find(text):
        return f"{start} cannot be resolved: {first}; check the text in ${{...}}."
    if Message.NOT_MERGED.find(text) and (kind := rule(key, tree)):
        listed = value.startswith("[")
        if listed == kind.startswith("a list"):
            return f"{start} must be {kind}{_number_notation(key, value, kind)}."
        if listed and key in (OmegaConf.select(tree, "hydra.sweeper.params") or ()):
            return f"{start} must be {kind}; an axis of a preset has no brackets: {key}: {value[1:-1]}."
        return f"{start} must be {kind}; " + (
            f"try several with -m {key}={value[1:-1]}."
            if listed
            else f"pass {key}=[{value}]."
            if value != "null"
            else "leave it out for the default."
        )
    return f"{start} cannot be set: {first}." if key else text


def _broken_rules(key: str, value: str, tree: DictConfig) -> str:
    """Return the rules that a mapping breaks, if the tree has an empty mapping; empty for other values and keys."""
    where, _, leaf = key.rpartition(".")
    node = OmegaConf.select(tree, where, throw_on_resolution_failure=False) if where else tree
    schema = OmegaConf.get_type(node)
    if not value.startswith("{") or not is_dataclass(schema) or key not in leaves(tree):
        return ""
    values: Any = OmegaConf.to_container(node, resolve=False)
    return " ".join(violations(where, schema, {**values, leaf: parse(f"{key}={value}").value()}))


def _decimal(key: str, value: str, tree: DictConfig) -> str:
    """Return how to write a number that was written with a comma, as in 0,05; empty for other values and keys."""
    number = re.fullmatch(r"(-?\d+),(\d+)", value)
    current = OmegaConf.select(tree, key, throw_on_resolution_failure=False)
    takes_decimals = isinstance(current, float) or rule(key, tree).startswith("a number")
    return f"; for a decimal number, write {number[1]}.{number[2]}" if number and takes_decimals else ""


def _explain_unparsable(setting: str, given: dict[str, str]) -> str:
    start = "" if _key_of(setting) in given else f"{_preset_of(given)}: "
    if nested := re.match(r"([\w./@]+)=\{'(\w+)'", setting):
        return f"{start}`{nested[1]}` holds keys, but an axis has one full key: {nested[1]}.{nested[2]}: VALUE,VALUE."
    if start:
        key, _, axis = setting.partition("=")
        return f"{start}the axis `{key}: {axis}` cannot be parsed; write its values as in `{key}: 0,1` or `range(3)`."
    return (
        f"`{setting}` cannot be parsed: a setting is key=value; separate several values by commas without spaces, as "
        "in seed=0,1; quote text with other characters, as in 'name=\"a, b\"'."
    )


def _preset_of(given: dict[str, str]) -> str:
    return f"sweep/{given['sweep']}.yaml" if "sweep" in given else "the preset"


def _number_notation(key: str, value: str, kind: str) -> str:
    """Return how to write a percentage for a number, or a range such as `0..3` for an integer; empty for others."""
    if kind.startswith("a number") and (percent := re.fullmatch(r"(\d+(?:\.\d+)?)%", value)):
        return f"; write {float(percent[1]) / 100:g}"
    if kind.startswith("an integer") and (span := re.fullmatch(r"(\d+)(?:\.\.|-|:)(\d+)", value)):
        return f"; try each with -m '{key}=range({span[1]},{int(span[2]) + 1})'"
    return ""
