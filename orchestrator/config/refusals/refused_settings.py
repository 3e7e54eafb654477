"""What is told of settings that Hydra refuses: argument, value, rule and remedy, and of all of them at once.

Hydra and OmegaConf stop at the first mistake. What they refuse is left out here and the rest composed again, until it
composes: so every mistake is told, and which keys there are is known from what the other settings choose.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from pathlib import Path

from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from orchestrator.config.refusals.refused_choices import in_a_file, of_a_choice, of_a_file_not_read
from orchestrator.config.refusals.refused_keys import rule, unknown

Compose = Callable[[list[str]], DictConfig]
"""Composes a configuration from settings; raises what Hydra raises."""

PARSERS = ("hydra", "omegaconf", "yaml", "antlr4")
REMOVED = "~"
"""What stands for the value of a key that is taken away."""
_NAMED = re.compile(
    r"(?:Could not (?:override|delete) |already at |delete from config\. |delete from config\. The value of |"
    r"Ambiguous value for argument |Sweep parameters )'\+*(?P<quoted>[^'=]+)|"
    r"(?:Error merging override|^Override) [+~]*(?P<line>[^= ]+)=|Multiple values for (?P<group>[^ ]+)\. |"
    r"Could not find '(?P<option>.+)/[^/']+'|full_key: (?P<full>[^\s\[]+)"
)
"""How Hydra and OmegaConf name the setting that they refuse."""
_REASONS = (
    (
        r"Ambiguous value|requires --multirun",
        "has several values: add -m to try each of them, or brackets where the key takes a list",
    ),
    (r"item is already at|Multiple values for", "is there already: leave out the +"),
    (r"config group '\S+' does not exist", "chooses of a group that is not there: check the spelling"),
    (r"must be a string or a list", "must be the name of a choice, as in model=cnn"),
    (r"Missing mandatory value", "has no value: give it one"),
)
"""What Hydra says -> the rule and the remedy."""


def is_refusal(error: BaseException) -> bool:
    """Whether Hydra, OmegaConf or the YAML parser raised it: not all that they raise of a wrong input is their own."""
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
    ours = isinstance(error, HydraException | OmegaConfBaseException) or module.split(".")[0] in PARSERS
    return ours or bool(of_a_file_not_read(error))


@lru_cache(maxsize=65536)
def parse(override: str) -> Override:
    """Parse one setting; equal texts are parsed once."""
    return OverridesParser.create().parse_override(override)


def explain_command(error: BaseException, conf: Path, arguments: Sequence[str]) -> str:
    """Return what is wrong with a command line, of which Hydra says `error`."""
    if told := of_a_file_not_read(error):
        return told
    found = get_args_parser().parse_args([*arguments])
    if found.config_dir and not Path(found.config_dir).is_dir():
        return f"`--config-dir` (={found.config_dir}) must be a directory, and there is none; check where you are."
    own = [f"hydra.searchpath=[file://{Path(found.config_dir).absolute()}]"] if found.config_dir else []
    with initialize_config_dir(str(conf), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        first = {each: value for each in found.overrides if (value := _first(each)) is not None}

        def compose(settings: list[str]) -> DictConfig:
            chosen = [first[each] for each in settings if each in first]
            return loader.load_configuration("config", [*own, *chosen], RunMode.RUN)

        return explain(error, compose, found.overrides, loader.list_groups(""))


def _first(setting: str) -> str | None:
    """Return a setting with the first of its values where it is an axis; None where it has none to be had here."""
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
    """Return a sentence for each of `settings` that is refused; `error` is what `compose` raised of them."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark, said = error.problem_mark, ", ".join(filter(None, (error.context, error.problem)))
        return f"{mark.name}, line {mark.line + 1}, is no YAML ({said}); check indentation, brackets and quotes there."
    left, refused = [*settings], list[tuple[str, BaseException]]()
    tree: DictConfig | None = None
    while tree is None:
        key = _key(error, left, groups)
        refused.append((key, error))
        rest = [each for each in left if not _belongs(each, key)]
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
    if len(refused) > 1 and "Ambiguous" in str(
        refused[0][1]
    ):  # as Hydra says, too, where it cannot read that -m is meant
        del refused[0]
    told = (
        _sentence(key, each, given | _refused_value(key, _said(each), settings), known, groups) for key, each in refused
    )
    return "\n".join(dict.fromkeys(told))


def _refused_value(key: str, said: str, settings: Sequence[str]) -> dict[str, str]:
    """Map a key to the value that an error quotes; empty if the error quotes none of the values that were typed."""
    typed = [each for each in settings if _key_of(each) == key]
    quoted = [each for each in typed if re.search(rf"{re.escape(each)}(?!\S*[^\s'.])", said)]
    added = [each for each in typed if "already at" in said and re.match(r"\+(?!\+)", each)]
    about = next(iter((*added, *quoted)), None)
    return {} if about is None else {key: _value_of(about)}


def _value_of(setting: str) -> str:
    """Return the value of a setting, without the escapes that Hydra puts before the braces of an axis."""
    return REMOVED if setting.startswith("~") else setting.partition("=")[2].replace("\\{", "{").replace("\\}", "}")


def _key_of(setting: str) -> str:
    return setting.lstrip("+~").partition("=")[0]


def _belongs(setting: str, key: str) -> bool:
    """Whether a setting is that of `key`, or of what a choice with that key would have."""
    return _key_of(setting) == key or _key_of(setting).startswith(f"{key}.")


def _key(error: BaseException, settings: Sequence[str], groups: Collection[str]) -> str:
    """Return the key of the setting that an error is about, empty where none is."""
    if isinstance(error, OverrideParseException):
        return _key_of(error.override)
    named, file = _NAMED.search(_said(error)), re.search(r"^In '(.+)/[^/']+'", _said(error))
    found = next(filter(None, named.groups()), "") if named else ""
    keys = [_key_of(each) for each in settings]
    if named is None and "must be a string or a list" in str(error):  # which one it does not say
        found = next((_key_of(each) for each in settings if _names_no_option(each, groups)), "")
    if not found and "nterpolation" in str(error):
        found = next((_key_of(each) for each in settings if "${" in each), "")
    if found in keys:
        return found
    above = [key for key in keys if found.startswith((f"{key}.", f"{key}[")) or (file and file[1] == key)]
    return max(above, key=len, default=found)


def _names_no_option(setting: str, groups: Collection[str]) -> bool:
    """Return whether a setting gives a group a value that names no option, as in `model=1.5`."""
    parsed = parse(_first(setting) or setting)
    chooses = _key_of(setting) in groups and not (parsed.is_delete() or parsed.is_sweep_override())
    return chooses and not isinstance(parsed.value(), str | list | dict)


def _said(error: BaseException) -> str:
    """Return what Hydra and OmegaConf say, in a line and without their traces."""
    said = [str(error).strip()]
    if error.__cause__ is not None:
        said.append(str(error.__cause__).strip())
    lines = [line.strip() for part in said for line in part.splitlines()]
    return " ".join(dict.fromkeys(line for line in lines if line and not line.startswith(("object_type", "See https"))))


def _sentence(key: str, error: BaseException, given: dict[str, str], tree: DictConfig, groups: Collection[str]) -> str:
    if isinstance(error, OverrideParseException):
        return _of_what_cannot_be_read(error.override, given)
    text, value = _said(error), given.get(key, "")
    if told := of_a_choice(key, value, text) or in_a_file(text, tree, groups):
        return told
    if value == REMOVED:
        return f"`~{key}` takes away what is not there, or what every trial needs: leave it out, or check the spelling."
    if "No match in the defaults list" in text:
        return f"`{key}` (={value}) is a choice that is added: write +{key}={value}."
    if text.startswith("Could not override"):
        return unknown(key, given, tree)
    if odd := re.search(r"BasicSweeper\S* got an unexpected keyword argument '(\w+)'", text):
        return f"`hydra.sweeper.{odd[1]}` is no key of it; the axes of a preset stand under `hydra.sweeper.params`."
    if (twice := re.match(r"Multiple values for (\S+)\. To override a value use '(.*)'", text)) and key not in given:
        way = twice[2].replace("override ", "override /", 1)
        return f"{_preset_of(given)}: `{key}` is chosen a second time; write `{way}`, with the word `override` as here."
    start = f"`{key}` (={value})" if key in given else f"`{key}`"
    for pattern, reason in _REASONS:
        if re.search(pattern, text):
            return f"{start} {reason}."
    first = str(error.__cause__ or error).strip().splitlines()[0].rstrip(".")
    if re.search(r"[Ii]nterpolation|resolver", text):
        return f"{start} cannot be resolved: {first}; check what stands in ${{...}}."
    if text.startswith("Error merging") and (kind := rule(key, tree)):
        listed = value.startswith("[")
        if listed == kind.startswith("a list"):
            return f"{start} must be {kind}{_as_meant(key, value, kind)}."
        if listed and key in (OmegaConf.select(tree, "hydra.sweeper.params") or ()):
            return f"{start} must be {kind}; an axis of a preset has no brackets: {key}: {value[1:-1]}."
        return f"{start} must be {kind}; " + (
            f"try several with -m {key}={value[1:-1]}." if listed else f"pass {key}=[{value}]."
        )
    return f"{start} cannot be taken: {first}." if key else text


def _of_what_cannot_be_read(setting: str, given: dict[str, str]) -> str:
    start = "" if _key_of(setting) in given else f"{_preset_of(given)}: "
    if nested := re.match(r"([\w./@]+)=\{'(\w+)'", setting):
        return f"{start}`{nested[1]}` holds keys, and an axis is written as one: {nested[1]}.{nested[2]}: VALUE,VALUE."
    if start:
        key, _, axis = setting.partition("=")
        return f"{start}the axis `{key}: {axis}` cannot be read; write its values as in `{key}: 0,1` or `range(3)`."
    return (
        f"`{setting}` cannot be read: a setting is key=value, several values have commas and no spaces, as "
        "in seed=0,1, and text with other signs stands in quotes, as in 'name=\"a, b\"'."
    )


def _preset_of(given: dict[str, str]) -> str:
    return f"sweep/{given['sweep']}.yaml" if "sweep" in given else "the preset"


def _as_meant(key: str, value: str, kind: str) -> str:
    """Return how to write a number that was written as elsewhere: `90%` where it is any, `0..3` where it is whole."""
    if kind.startswith("a number") and (percent := re.fullmatch(r"(\d+(?:\.\d+)?)%", value)):
        return f"; write {float(percent[1]) / 100:g}"
    if kind.startswith("an integer") and (span := re.fullmatch(r"(\d+)(?:\.\.|-|:)(\d+)", value)):
        return f"; try each with -m '{key}=range({span[1]},{int(span[2]) + 1})'"
    return ""
