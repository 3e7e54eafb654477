"""Explanations of keys: suggestions for an unknown key, and the type rule of a known key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches

from omegaconf import DictConfig, OmegaConf

from orchestrator.config import config_groups
from orchestrator.config.well_formed import described, hints


def rule(key: str, tree: DictConfig) -> str:
    """Return the type of `key` in words, as in "a number, or null"; empty if the schema has no type for it."""
    if key.startswith("hydra."):
        return ""
    where, _, leaf = key.rpartition(".")
    schema = OmegaConf.get_type(OmegaConf.select(tree, where, throw_on_resolution_failure=False) if where else tree)
    return described(hints(schema)[leaf]) if is_dataclass(schema) and leaf in hints(schema) else ""


def unknown(key: str, given: Mapping[str, str], tree: DictConfig) -> str:
    """Explain an unknown key: suggest existing keys, and how to add a key to a group that accepts more keys."""
    value, (group, _, leaf) = given.get(key, ""), key.rpartition(".")
    start, known = f"`{key}` (={value})", list(leaves(tree))
    if key == "method.scope":
        return f"{start} is a group; pass scope={value}."
    if key in known:
        adds = (
            "adds keys to a mapping"
            if value.startswith("{")
            else f"is a key of only some choices of `{key.partition('.')[0]}`"
        )
        return f"{start} {adds}; write ++{key}={value}."
    if any(name.startswith(f"{key}.") for name in known):
        return f"{start} has new keys for the existing mapping; write +{key}={value}."
    node = OmegaConf.select(tree, group, throw_on_resolution_failure=False) if group else tree
    takes_all = group and (group in known or (isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict))
    takes_all = takes_all or f"{group}._target_" in given
    own = config_groups.GROUPS[group].own if group in config_groups.GROUPS else ()
    if takes_all and any(option.name == leaf for option in own):
        return f"{start} is a key of every `{group}` that its file leaves out; write +{key}={value}."
    parts = [f"{start} is not a key of the configuration;", *suggestions(key, tree, within=bool(takes_all))]
    if takes_all:
        parts.append(f"{'if' if len(parts) == 1 else 'If'} your `{group}` takes this key, write +{key}={value}.")
    elif any(f"${{{key}}}" in other for other in given.values()):
        parts.append(f"To add it as a variable, write +{key}={value}.")
    return " ".join(parts)


def suggestions(key: str, tree: DictConfig, *, within: bool = False) -> Iterator[str]:
    """Yield suggestions for an unknown key, then the keys of its group, or the top-level keys.

    Args:
        key: the unknown key.
        tree: the composed configuration.
        within: suggest only keys of the group of `key`, as that group accepts any key.
    """
    known, (group, _, leaf) = list(leaves(tree)), key.rpartition(".")
    siblings = [name.removeprefix(f"{group}.") for name in known if name.startswith(f"{group}.")] if group else []
    tops = dict.fromkeys(name.partition(".")[0] for name in known)
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    children = dict.fromkeys(name.partition(".")[0] for name in siblings)
    in_group = [f"{group}.{name}" for name in get_close_matches(leaf, children, n=1)]
    near = [] if group else get_close_matches(key, tops, n=1, cutoff=0.7)
    near = near or get_close_matches(key, known, n=3, cutoff=0.7)
    close = in_group if within else same_leaf or in_group or near
    if close:
        yield f"did you mean {' or '.join(f'`{name}`' for name in close[:3])}?"
    if siblings:
        yield f"`{group}` has the keys {', '.join(siblings)}."
    elif not close and not within:
        yield f"its top-level keys are {', '.join(tops)}."


def leaves(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the leaf keys of a configuration, without the node `hydra`."""
    for key in config:
        node, name = config._get_node(key), prefix + str(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation() and len(node):
            yield from () if name == "hydra" else leaves(node, f"{name}.")
        else:
            yield name
