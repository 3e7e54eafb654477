"""Explanations of refused choices and keys: a name, the contents of its file, an unknown key, a key's type."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from orchestrator.config import config_groups
from orchestrator.config.refusals.messages import Message, absent_choice, file_being_read, text_of
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
    if found := config_groups.GROUPS.get(group):
        if takes_all and any(option.name == leaf for option in found.own):
            return f"{start} is a key of every `{group}` that its file leaves out; write +{key}={value}."
        having = [row.name for row in found.rows.values() if any(each.name == leaf for each in found.options(row))]
        if having and not takes_all:
            chosen = OmegaConf.select(tree, f"{group}.kind", throw_on_resolution_failure=False)
            other = f", not of {chosen}" if chosen else ""  # an interpolation may have no value
            return f"{start} is a key of {group}={' or '.join(having)}{other}; pass {group}={having[0]}."
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


TRAININGS = ("train", "finetune")
PARTS = ("optimizer", "scheduler")
"""Groups with a choice for each of `TRAININGS`."""


def explain_choice(key: str, value: str, error: BaseException) -> str:
    """Explain a choice that is not an option of its group; return an empty text for other errors."""
    if absent := absent_choice(error):
        names = {each.rpartition("/")[2]: each for each in absent.options} | {each: each for each in absent.options}
        near = get_close_matches(absent.option, names, n=1)
        hint = f"did you mean {names[near[0]]}? For" if near else "for"
        return (
            f"{f'{absent.file}: ' if absent.file else ''}`{absent.group}` (={absent.option}) must be an option; {hint} "
            f"one of your own, pass --config-dir=DIR with DIR/{absent.group}/{absent.option}.yaml. The options are "
            f"{', '.join(absent.options)}."
        )
    where, _, part = key.rpartition(".")
    if part in PARTS and where in ("", *TRAININGS) and re.fullmatch(r"[\w.]*", value):
        ways = " or ".join(
            f"`{each}.{part}._target_={value}`" if "." in value else f"`{part}@{each}.{part}={value}`"
            for each in ([where] if where else TRAININGS)
        )
        return f"`{part}` is a part of `train` and of `finetune`; choose it with {ways}."
    return ""


def name_typed_choice(reason: str, settings: Collection[str]) -> str:
    """Name the typed choice, as in `deploy` (=onnx), in place of the key that the choice sets.

    Args:
        reason: an error such as "`deploy.formats` (=['onnx']) must ..."
        settings: the typed settings
    """
    head = re.match(r"`(?P<key>(?P<group>\w+)\.\w+)` \(=(?:\['(?P<only>\w+)'\]|(?P<value>\w+))\) ", reason)
    if head is None:
        return reason
    group, choice = head["group"], head["only"] or head["value"]
    chosen = f"{group}={choice}" in settings and not any(each.startswith(f"{head['key']}=") for each in settings)
    return f"`{group}` (={choice}) {reason[head.end() :]}" if chosen else reason


def explain_unreadable_file(error: BaseException) -> str:
    """Explain an error of Python while Hydra read a file; return an empty text for other errors."""
    file = file_being_read(error)
    if file and isinstance(error, UnicodeDecodeError):
        return f"{file} is not in UTF-8: it contains the byte {error.object[error.start]:#x}; save it in UTF-8."
    if file and isinstance(error, RecursionError):
        return f"{file} cannot be composed: its `defaults` lead back to the file itself; remove that line."
    return ""


def explain_choice_file(error: BaseException, tree: DictConfig, groups: Collection[str]) -> str:
    """Explain the first mistake in the file of a choice; return an empty text if Hydra names no file."""
    text = text_of(error)
    if listed := Message.DEFAULTS_NO_LIST.find(text):
        start = f"{listed['file']}.yaml: `defaults` must be a list, but is a {listed['kind']}"
        return f"{start}; write `defaults: [override /GROUP: NAME]`."
    found = Message.IN_A_FILE.find(text)
    if found is None:
        return ""
    file, key, said = f"{found['file']}.yaml", found["key"], found["said"].rstrip(".")
    group = found["file"].rpartition("/")[0]
    absent, default = Message.KEY_NOT_IN.find(said), Message.NOT_OVERRIDDEN.find(said)
    sweep_as_key = absent if absent and absent.groups() == ("sweep", "Config") else None
    if headless := sweep_as_key or (default if default and f"@{group}." in default["key"] else None):
        what = "a preset" if group == "sweep" else "a file that overrides a choice of another group"
        return f"{file} cannot be composed: {headless[0]}; the first line of {what} must be `# @package _global_`."
    looked_for = error.missing_cfg_file if isinstance(error, MissingConfigException) else default and default["key"]
    if looked_for:
        if told := _explain_default(looked_for, group, groups):
            return f"{file}: {told}"
    elif absent and key and absent["key"] == key.rpartition(".")[2]:
        return f"{file}: {' '.join(_explain_key(key, tree))}"
    elif absent and "." in absent["key"]:
        dotted = absent["key"]
        nested = f"{': {'.join(dotted.split('.'))}: ...{'}' * dotted.count('.')}"
        return f"{file}: `{dotted}` is not a key: keys of a file are nested; write `{nested}`."
    return _explain_value(file, key, said, tree) or f"{file} cannot be composed: {f'`{key}`: ' if key else ''}{said}."


def _explain_value(file: str, key: str, said: str, tree: DictConfig) -> str:
    """Explain a wrong value in a file; return an empty text if the schema has no rule for the key."""
    if key and (kind := rule(key, tree)):
        wrong = Message.WRONG_VALUE.find(said)
        value = wrong["value"] if wrong else ""
        start = f"{file}: `{key}`{f' (={value})' if wrong else ''} must be {kind}"
        if kind.startswith("a list"):
            return f"{start}; put the value into brackets."
        if "," in value:
            several = value.strip("[]").replace(", ", ",")
            return f"{start}; several values are an axis: write `{key}: {several}` under hydra.sweeper.params."
        return f"{start}."
    if odd := Message.NOT_IN_ENUM.find(said):
        return f"{file}: `{key}` (={odd['value']}) must be one of {odd['names']}."
    if named := Message.NOT_A_MAPPING.find(said):
        schema, value = named["schema"], named["value"]
        parts = [name for name in map(str, tree) if getattr(OmegaConf.get_type(tree, name), "__name__", "") == schema]
        return (
            f"{file}: `{' or '.join(parts)}` (={value}) must be a mapping; write a choice into `defaults`, as in "
            f"`- override /{parts[0] if parts else 'GROUP'}: {value}`."
        )
    if Message.LIST_FOR_A_MAPPING.find(said):
        return (
            f"{file} has a list in place of a mapping, at its top level or under a key such as hydra.sweeper.params; "
            "write `key: value` there, without dashes and brackets."
        )
    return ""


def _explain_default(name: str, folder: str, groups: Collection[str]) -> str:
    """Explain a wrong line of `defaults` by the name that Hydra looked for; return an empty text for a right name."""
    inside = name.removeprefix(f"{folder}/")
    if word := re.match(r"override\b ?/?(.*)", inside):
        return f"`override /{word[1]}` has no choice; add one, as in `override /{word[1] or 'model'}: NAME`."
    group = inside.partition("@")[0].partition("/")[0]
    if inside != name and group in groups:
        return f"`{group}` needs a slash, or Hydra looks for it in {folder}/; write `override /{group}: ...`."
    part = re.fullmatch(rf"(?:({'|'.join(TRAININGS)})/)?({'|'.join(PARTS)})", inside.partition("@")[0])
    if part:
        way = f"override /{part[2]}@{part[1] or 'train'}.{part[2]}"
        return f"`/{part[0]}` is chosen separately for `train` and `finetune`; write `{way}: ...`."
    if group in groups:
        return ""
    near = get_close_matches(group, groups, n=1)
    known = f"did you mean `/{near[0]}`?" if near else f"the groups are {', '.join(groups)}."
    return f"`/{group}` is not a group; {known}"


def _explain_key(key: str, tree: DictConfig) -> Iterator[str]:
    """Yield the parts of an explanation for an unknown key in a file."""
    yield f"`{key}` is not a key of the configuration;"
    if key in ("default", "Defaults"):
        yield "did you mean `defaults`?"
    elif key in OmegaConf.select(tree, "hydra", default={}):
        yield f"did you mean `hydra.{key}`?"
    elif key.startswith("hydra."):
        yield "check its spelling in Hydra's documentation."
    else:
        yield from suggestions(key, tree)
