"""Patterns of messages of Hydra, OmegaConf and Python, and variables in Hydra's frames, that explanations depend on.

A new release may change both. tests/orchestrator/config/test_refusal_messages.py provokes each
message in the installed release, and names a pattern that no longer matches.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.errors import MissingConfigException

READERS = ("hydra._internal.config_repository", "hydra._internal.defaults_list")
"""Modules of Hydra that read files and follow their `defaults`; they call no custom code."""
READER_LOCALS = ("config_path", "path")
"""Local variables in the functions of `READERS` that hold the file being read."""
CHOOSER_LOCALS = ("repo", "overrides", "tree")
"""Local variables in the functions of `READERS` that hold the options, the overrides of files, and the choice."""


COMMAND_LINE = "command-line"
"""Part of the provider of a source of files that `--config-dir` names."""


class Message(Enum):
    """Patterns of messages; the group `key` is the key of the setting, without `+`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = re.compile(pattern)

    # ConfigLoaderImpl._apply_overrides_to_config for a key; Overrides.ensure_overrides_used for a choice
    NOT_OVERRIDDEN = r"^Could not override '(?P<key>[^']+)'(?P<no_default>\. No match in the defaults list)?"
    # ConfigLoaderImpl._apply_overrides_to_config for a key; Overrides.ensure_deletions_used for a choice
    NOT_DELETED = r"^Could not delete (?:from config\. (?:The value of )?)?'(?P<key>[^'=]+)"
    # ConfigLoaderImpl._apply_overrides_to_config
    ALREADY_SET = r"^Could not append to config\. An item is already at '(?P<key>[^'=]+)'"
    # ConfigLoaderImpl._apply_overrides_to_config, around an error of OmegaConf
    NOT_MERGED = r"^Error merging override [+~]*(?P<key>[^= ]+)"
    # ConfigLoaderImpl._apply_overrides_to_config
    UNKNOWN_GROUP = r"^Override [+~]*(?P<key>[^= ]+).* but config group '\S+' does not exist"
    # ConfigLoaderImpl.validate_sweep_overrides_legal, for values with commas
    AMBIGUOUS = r"^Ambiguous value for argument '\+*(?P<key>[^'=]+)"
    # ConfigLoaderImpl.validate_sweep_overrides_legal, for range() and its like
    SWEEP_IN_A_RUN = r"^Sweep parameters '\+*(?P<key>[^'=]+).* requires --multirun"
    # Overrides.set_known_choice
    CHOSEN_TWICE = r"^Multiple values for (?P<key>\S+)\. To override a value use '(?P<way>.*)'"
    # Overrides.__init__, which does not say for which group
    NO_NAME = r"^Config group override must be a string or a list"
    # OmegaConf's format_and_raise, below every message of a node
    FULL_KEY = r"full_key: (?P<key>[^\s\[]+)"
    # OmegaConf's BaseContainer._to_content, DictConfig._get_node and ListConfig._get_node
    NO_VALUE = r"Missing mandatory value"
    # OmegaConf's Container.resolve_parse_tree and all that it calls; Hydra's InputDefault._resolve_interpolation_impl
    INTERPOLATION = r"[Ii]nterpolation"
    # ConfigRepository._extract_defaults_list
    DEFAULTS_NO_LIST = r"^Invalid defaults list in '(?P<file>\S+)', defaults must be a list \(got (?P<kind>\w+)\)"
    # Overrides.ensure_overrides_used, config_not_found_error, ConfigLoaderImpl._compose_config_from_defaults_list
    IN_A_FILE = (
        r"^In '(?P<file>(?!config')[^']+)': (?:\w+ raised while composing config: )?(?P<said>.*?)"
        r"(?: Config search path.*| full_key: ?(?P<key>\S*).*)?$"
    )
    # OmegaConf's DictConfig._validate_get
    KEY_NOT_IN = r"^Key '(?P<key>.+)' not in '(?P<schema>\w+)'"
    # OmegaConf's IntegerNode, FloatNode and other typed nodes, for a value of another type
    WRONG_VALUE = r"^Value '(?P<value>.*)' of type '\w+'"
    # OmegaConf's DictConfig._validate_merge
    NOT_A_MAPPING = r"^Merge error: \w+ is not a subclass of (?P<schema>\w+)\. value: (?P<value>.+)"
    # OmegaConf's BaseContainer._merge_with, where a file has a list at its top or for a mapping
    LIST_FOR_A_MAPPING = r"^Cannot merge DictConfig with ListConfig$"
    # OmegaConf's EnumNode
    NOT_IN_ENUM = r"^Invalid value '(?P<value>.*)', expected one of \[(?P<names>.*)\]"
    # OmegaConf's loader of YAML
    DUPLICATE_KEY = r"^found duplicate key (?P<key>.+)"
    # Python, for an argument that a class lacks; quoted by Hydra's instantiate
    SWEEPER_ARGUMENT = r"BasicSweeper\S* got an unexpected keyword argument '(?P<key>\w+)'"
    # Lines without information for users: types from OmegaConf's format_and_raise, links to the pages of Hydra
    NOISE = r"^(?:object_type|See https)"

    def find(self, text: str) -> re.Match[str] | None:
        """Search a text for the message; `^` is the beginning of the text."""
        return self.pattern.search(text)


def text_of(error: BaseException) -> str:
    """Return the messages of an error and of its cause in one line, without `Message.NOISE`."""
    said = [str(error).strip()]
    if error.__cause__ is not None:
        said.append(str(error.__cause__).strip())
    lines = [line.strip() for part in said for line in part.splitlines()]
    return " ".join(dict.fromkeys(line for line in lines if line and not Message.NOISE.find(line)))


def file_being_read(error: BaseException) -> str:
    """Return the file that Hydra was reading at an error, from variables in Hydra's frames; empty for none."""
    read = [
        str(path)
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") in READERS
        and (path := next(filter(None, map(frame.f_locals.get, READER_LOCALS)), None))
    ]
    return f"{read[-1].removesuffix('.yaml')}.yaml" if read else ""


@dataclass(frozen=True)
class AbsentChoice:
    """Choice that is not an option of its group.

    Args:
        key: the group, with its package if that differs, as in `optimizer@train.optimizer`.
        group: the group.
        option: the chosen name.
        options: the existing names: those of the user's own, then the others, then those in subfolders, as in
            `reproduce/snip`.
        file: the file whose `defaults` contain the choice; empty for the command line.
    """

    key: str
    group: str
    option: str
    options: tuple[str, ...]
    file: str


def absent_choice(error: BaseException) -> AbsentChoice | None:
    """Return the absent choice of an error, from variables in Hydra's frames; None for other errors."""
    if not isinstance(error, MissingConfigException) or not error.options:
        return None
    found: dict[str, Any] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") in READERS:
            found |= {name: frame.f_locals[name] for name in CHOOSER_LOCALS if name in frame.f_locals}
    choice = found["tree"].node
    key, group = choice.get_override_key(), choice.get_group_path()
    parent = Message.IN_A_FILE.find(text_of(error))
    file = parent["file"] if parent else ""
    if override := found["overrides"].override_metadata.get(key):
        file = override.containing_config_path or ""
    option = str(error.missing_cfg_file).removeprefix(f"{group}/")
    return AbsentChoice(key, group, option, _options(found["repo"], group), f"{file}.yaml" if file else "")


def _options(repository: Any, group: str) -> tuple[str, ...]:
    """Return the names of a group's options, then the names in its subfolders."""
    below = [
        f"{folder}/{name}"
        for folder in repository.get_group_options(group, ObjectType.GROUP)
        for name in _options(repository, f"{group}/{folder}")
    ]
    own = [
        name
        for source in repository.get_sources()
        if COMMAND_LINE in source.provider and source.is_group(group)
        for name in source.list(group, ObjectType.CONFIG)
    ]
    return tuple(dict.fromkeys([*own, *repository.get_group_options(group, ObjectType.CONFIG), *below]))
