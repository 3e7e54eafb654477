"""Hydra job overrides -> plain trial configurations, composing once for each set of group choices.

Composing takes Hydra some 50 ms a job. The jobs of a sweep mostly differ in plain values, and those are set, and so
validated, on one composed configuration: about 0.3 ms a job. Where anything interpolates, and where a value and another
kind of override touch the same key, Hydra composes each job: only then is it certain that the result is Hydra's own.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from orchestrator.config.schema import Config
from orchestrator.core.specs import Job

TRAININGS = ("train", "finetune")
PART_OF_TRAINING = re.compile(
    r"(?:Could not override '|In '|Error merging override )(?:(train|finetune)\.)?(optimizer|scheduler)[/='](\w*)"
)
"""How Hydra begins what it says of `optimizer=adam`, `+optimizer=adam` and `train.optimizer=adam`."""
PARSERS = ("hydra", "omegaconf", "yaml", "antlr4")


@dataclass
class _Base:
    """One composed configuration: the typed tree that values are set on, and its plain form."""

    tree: DictConfig
    plain: Mapping[str, Any]

    @cached_property
    def interpolates(self) -> bool:
        """Whether a value may depend on others, or on when and where it is resolved."""
        return any(_references(OmegaConf.to_container(_without_hydra(self.tree))))


def compose_jobs(loader: ConfigLoader, master: DictConfig, jobs: Sequence[Sequence[str]]) -> Iterator[Job]:
    """Yield a `Job` for each list of overrides; one that Hydra refuses carries Hydra's sentence."""
    bases: dict[tuple[tuple[str, ...], tuple[str, ...]], _Base] = {}
    groups = frozenset(loader.list_groups(""))
    for overrides in jobs:
        try:
            config = _job(loader, master, list(overrides), bases, groups)
        except Exception as error:
            if not is_refusal(error):
                raise
            yield Job(tuple(overrides), error=sentence(error))
        else:
            yield Job(tuple(overrides), config=config)


def _job(
    loader: ConfigLoader,
    master: DictConfig,
    overrides: list[str],
    bases: dict[tuple[tuple[str, ...], tuple[str, ...]], _Base],
    groups: frozenset[str],
) -> Mapping[str, Any]:
    parsed = [parse(override) for override in overrides]
    values = [override for override in parsed if _sets_plain_value(override, groups)]
    others = [override for override in parsed if not _sets_plain_value(override, groups)]
    if any("${" in override for override in overrides) or _touch(values, others, groups):
        return _compose(loader, master, overrides).plain
    shape = (tuple(str(each.input_line) for each in others), tuple(str(each.key_or_group) for each in values))
    if shape not in bases:
        bases[shape] = _compose(loader, master, overrides)
        return bases[shape].plain
    if bases[shape].interpolates:
        return _compose(loader, master, overrides).plain
    return _set(bases[shape], values)


def plain(config: DictConfig) -> dict[str, Any]:
    """Return the resolved plain data of a composed configuration, without its hydra node and its user's variables.

    A variable is a key of the user's own that others refer to, as in `model.width=${width}`.
    """
    tree = _without_hydra(config)
    found = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    assert isinstance(found, dict)
    own = [str(key) for key in found if key not in Config.__dataclass_fields__]
    variables = set(re.findall(r"\w+", " ".join(_references(OmegaConf.to_container(tree))))) if own else set()
    return {str(key): value for key, value in found.items() if key not in own or key not in variables}


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield from re.findall(r"\$\{[^$]*\}", node)
    elif isinstance(node, Mapping | list):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from _references(value)


def is_refusal(error: Exception) -> bool:
    """Whether Hydra, OmegaConf or the YAML parser raised it: not all that they raise of a wrong input is their own."""
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
    return isinstance(error, HydraException | OmegaConfBaseException) or module.split(".")[0] in PARSERS


def sentence(error: BaseException) -> str:
    """Return what Hydra and OmegaConf say of a refused configuration, without their traces."""
    said = [str(error).strip()]
    if error.__cause__ is not None:
        said.append(str(error.__cause__).strip().split("\n")[0])
    text = " ".join(line.strip() for part in said for line in part.splitlines() if line.strip())
    if option := re.search(
        r"Could not find '(.+)/(.+)' Available options in '.+': (.*?)(?: Config search path.*)?$", text
    ):
        group, name, choices = option.groups()
        return f"`{group}` (={name}) must be one of {', '.join(choices.split())}; add your own with --config-dir."
    if part := PART_OF_TRAINING.search(text):
        where, name, choice = part.groups()
        ways = " or ".join(f"`{name}@{each}.{name}={choice or '...'}`" for each in ([where] if where else TRAININGS))
        return f"`{name}` is a part of `train` and of `finetune`; pick a ready one with {ways}."
    if value := re.match(r"Error merging override \+*([^= ]+)=(.*?) (Value .*)$", text):
        key, given, rule = value.groups()
        return f"`{key}` (={given}) has the wrong type: {rule}."
    return text


@lru_cache(maxsize=65536)
def parse(override: str) -> Override:
    """Parse one override; equal texts are parsed once."""
    return OverridesParser.create().parse_override(override)


def _sets_plain_value(override: Override, groups: frozenset[str]) -> bool:
    return (
        override.type == OverrideType.CHANGE
        and override.package is None
        and override.key_or_group not in groups
        and "/" not in override.key_or_group
        and not override.is_hydra_override()
        and not isinstance(override.value(), dict)
    )


def _touch(values: Sequence[Override], others: Sequence[Override], groups: frozenset[str]) -> bool:
    """Whether a value's key is, holds or lies in one that is set in another way: then their order matters."""
    set_otherwise = [each for each in others if each.key_or_group not in groups or isinstance(each.value(), dict)]
    ours, theirs = ([f"{each.key_or_group}." for each in overrides] for overrides in (values, set_otherwise))
    return any(own.startswith(other) or other.startswith(own) for own in ours for other in theirs)


def _compose(loader: ConfigLoader, master: DictConfig, overrides: list[str]) -> _Base:
    config = loader.load_sweep_config(master, overrides)
    with open_dict(config):
        config.hydra.job.id, config.hydra.job.num = "0", 0
    holder = HydraConfig.instance()
    previous = holder.cfg
    holder.set_config(config)  # `${hydra:...}` resolves here or nowhere: workers have no Hydra
    try:
        values = plain(config)
    finally:
        holder.cfg = previous
    return _Base(config, values)


def _set(base: _Base, overrides: Sequence[Override]) -> Mapping[str, Any]:
    ConfigLoaderImpl._apply_overrides_to_config(list(overrides), base.tree)
    changed = {re.split(r"[.\[]", str(override.key_or_group))[0]: None for override in overrides}
    return {**base.plain, **{key: _plain_node(base.tree, key) for key in changed}}


def _plain_node(tree: DictConfig, key: str) -> Any:
    value = tree[key]
    return OmegaConf.to_container(value, throw_on_missing=True) if OmegaConf.is_config(value) else value


def explain(error: BaseException, conf: Path, arguments: Sequence[str]) -> str:
    """Return a sentence for a refused command line; for a key that does not exist, the keys that do."""
    text = sentence(error)
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown is None:
        return text
    key = unknown.group(1)
    with initialize_config_dir(str(conf), version_base="1.3"):
        known = list(_leaves(_composed(_group_choices(arguments))))
    return f"`{key}` is not a key of the configuration; {_suggestion(key, known)}"


def _group_choices(arguments: Sequence[str]) -> list[str]:
    """Return those of a command line's overrides that choose an option of a group: they decide which keys there are."""
    groups = GlobalHydra.instance().config_loader().list_groups("")
    return [each for each in arguments if "," not in each and each.partition("=")[0] in groups]


def _composed(choices: list[str]) -> DictConfig:
    """Return the configuration with these choices, without them where they are a part of what is wrong."""
    try:
        return compose("config", choices)
    except HydraException:
        return compose("config")


def _suggestion(key: str, known: Sequence[str]) -> str:
    group, _, leaf = key.rpartition(".")
    siblings = [name for name in known if name.startswith(f"{group}.")] if group else []
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    in_group = [f"{group}.{name}" for name in get_close_matches(leaf, [s.rpartition(".")[2] for s in siblings], n=1)]
    close = same_leaf or in_group or get_close_matches(key, known, n=3, cutoff=0.7)
    parts = []
    if close:
        parts.append(f"did you mean {' or '.join(f'`{name}`' for name in close[:3])}?")
    if siblings:
        parts.append(f"`{group}` has the keys {', '.join(name.removeprefix(f'{group}.') for name in siblings)}.")
    elif not close:
        parts.append(f"its top-level keys are {', '.join(dict.fromkeys(name.split('.')[0] for name in known))}.")
    return " ".join(parts) + f" To add a key of your own, write +{key}=..."


def _leaves(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, config):
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and len(node):
            yield from _leaves(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
