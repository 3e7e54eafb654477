"""What is told of a key that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from omegaconf import DictConfig, OmegaConf


def unknown(key: str, given: dict[str, str], tree: DictConfig) -> str:
    """Say that there is no such key, which there are, and how to add one where that would be accepted."""
    value, (group, _, leaf) = given.get(key, ""), key.rpartition(".")
    start, known = f"`{key}` (={value})", list(_leaves(tree))
    if key == "method.scope":
        return f"{start} is a group of its own: pass scope={value}."
    if key in known:
        return f"{start} is a key of some of the choices of `{key.partition('.')[0]}`; write ++{key}={value}."
    if any(name.startswith(f"{key}.") for name in known):
        return f"{start} has keys that are not there, and a mapping is merged into what is there: write +{key}={value}."
    siblings = [name for name in known if name.startswith(f"{group}.")] if group else []
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    in_group = [f"{group}.{name}" for name in get_close_matches(leaf, [s.rpartition(".")[2] for s in siblings], n=1)]
    node = OmegaConf.select(tree, group, throw_on_resolution_failure=False) if group else tree
    takes_all = group and (group in known or (isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict))
    takes_all = takes_all or f"{group}._target_" in given
    tops = dict.fromkeys(name.partition(".")[0] for name in known)
    near = get_close_matches(key, list(dict.fromkeys([*tops, *known])), n=3, cutoff=0.7)
    close = in_group if takes_all else same_leaf or in_group or near
    parts = [f"{start} is not a key of the configuration;"]
    if close:
        parts.append(f"did you mean {' or '.join(f'`{name}`' for name in close[:3])}?")
    if siblings:
        parts.append(f"`{group}` has the keys {', '.join(name.removeprefix(f'{group}.') for name in siblings)}.")
    elif not close and not takes_all:
        parts.append(f"its top-level keys are {', '.join(tops)}.")
    if takes_all:
        parts.append(f"{'if' if len(parts) == 1 else 'If'} your `{group}` takes it, add it with +{key}={value}.")
    elif any(f"${{{key}}}" in other for other in given.values()):
        parts.append(f"A variable of your own is added with +{key}={value}.")
    return " ".join(parts)


def _leaves(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        node, name = config._get_node(key), prefix + str(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation() and len(node):
            yield from () if name == "hydra" else _leaves(node, f"{name}.")
        else:
            yield name
