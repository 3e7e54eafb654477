"""Composition of plain trial configurations from Hydra's job overrides, once for each set of group choices.

Hydra composes a job in about 50 ms. The jobs of a sweep differ mostly in plain values, which are set and validated on
one composed configuration in about 0.3 ms. Hydra composes every job if a value interpolates, or if a value and another
kind of override touch the same key: the result is then certainly the same as Hydra's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict

from orchestrator.config.refusals.messages import Message
from orchestrator.config.refusals.refused_settings import explain, is_refusal, parse
from orchestrator.config.schema import Config
from orchestrator.core.specs import Job


@dataclass
class _Base:
    """Composed configuration: a typed tree to set values on, and its plain form."""

    tree: DictConfig
    plain: Mapping[str, Any]
    parts: dict[tuple[str, ...], Any] = field(default_factory=dict)
    """Key of the tree, and the settings in it -> its plain value: jobs have few combinations of settings in a part."""

    @cached_property
    def interpolates(self) -> bool:
        """Whether a value may depend on other values, or on the time and place of resolution."""
        return any(_references(OmegaConf.to_container(_without_hydra(self.tree))))


def compose_jobs(loader: ConfigLoader, master: DictConfig, jobs: Sequence[Sequence[str]]) -> Iterator[Job]:
    """Yield a `Job` for each list of overrides; a job that Hydra refuses carries the explanation."""
    bases: dict[tuple[tuple[str, ...], tuple[str, ...]], _Base] = {}
    groups = frozenset(loader.list_groups(""))
    refused: dict[tuple[str, ...], str] = {}
    for overrides in jobs:
        keys = tuple(each if (key := each.partition("=")[0]) in groups else key for each in overrides)
        if keys in refused:
            yield Job(tuple(overrides), error=refused[keys])
            continue
        if told := several_deploys(overrides):
            yield Job(tuple(overrides), error=told)
            continue
        try:
            config = _job(loader, master, list(overrides), bases, groups)
        except Exception as error:
            if not is_refusal(error):
                raise
            told = explain(error, lambda settings: _compose(loader, master, settings).tree, overrides, groups)
            if Message.NOT_OVERRIDDEN.find(str(error)):  # for every value of these keys
                refused[keys] = told
            yield Job(tuple(overrides), error=told)
        else:
            yield Job(tuple(overrides), config=config)


def several_deploys(overrides: Sequence[str]) -> str:
    """Return the error for a list of choices of `deploy`, as Hydra keeps only the last one; empty if there is none."""
    listed = next((each.partition("=")[2] for each in overrides if re.match(r"deploy=\[.*,", each)), "")
    return listed and (
        f"`deploy` (={listed}) must be one choice, as the last one would replace the others; pass "
        f"deploy.formats={listed}."
    )


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
    """Return the resolved plain data of a composed configuration, without its hydra node and without variables.

    A variable is an added key that other keys refer to, as in `model.width=${width}`.
    """
    tree = _without_hydra(config)
    found = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    assert isinstance(found, dict)
    own = [str(key) for key in found if key not in Config.__dataclass_fields__]
    variables = set(re.findall(r"\w+", " ".join(_references(OmegaConf.to_container(tree))))) if own else set()
    return {str(key): value for key, value in found.items() if key not in own or key not in variables}


def _without_hydra(config: DictConfig) -> DictConfig:
    return (
        OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]) if "hydra" in config else config
    )


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield from re.findall(r"\$\{[^$]*\}", node)
    elif isinstance(node, Mapping | list):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from _references(value)


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
    """Whether a value's key equals, contains or lies in a key that is set in another way: then order matters."""
    set_otherwise = [each for each in others if each.key_or_group not in groups or isinstance(each.value(), dict)]
    ours, theirs = ([f"{each.key_or_group}." for each in overrides] for overrides in (values, set_otherwise))
    return any(own.startswith(other) or other.startswith(own) for own in ours for other in theirs)


def _compose(loader: ConfigLoader, master: DictConfig, overrides: list[str]) -> _Base:
    config = loader.load_sweep_config(master, overrides)
    with open_dict(config):
        config.hydra.job.id, config.hydra.job.num = "0", 0
    holder = HydraConfig.instance()
    previous = holder.cfg
    holder.set_config(config)  # `${hydra:...}` must resolve here: workers have no Hydra
    try:
        values = plain(config)
    finally:
        holder.cfg = previous
    return _Base(config, values)


def _set(base: _Base, overrides: Sequence[Override]) -> Mapping[str, Any]:
    """Return the plain configuration with other values; parts with equal settings are set once, and shared."""
    settings: dict[str, list[str]] = {}
    for override in overrides:
        key = re.split(r"[.\[]", str(override.key_or_group))[0]
        settings.setdefault(key, [key]).append(str(override.input_line))
    parts = {key: tuple(each) for key, each in settings.items()}
    if missing := {key: part for key, part in parts.items() if part not in base.parts}:
        ConfigLoaderImpl._apply_overrides_to_config(list(overrides), base.tree)
        base.parts |= {part: _plain_node(base.tree, key) for key, part in missing.items()}
    return {**base.plain, **{key: base.parts[part] for key, part in parts.items()}}


def _plain_node(tree: DictConfig, key: str) -> Any:
    value = tree[key]
    return OmegaConf.to_container(value, throw_on_missing=True) if OmegaConf.is_config(value) else value
