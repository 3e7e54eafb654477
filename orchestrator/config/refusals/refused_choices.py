"""What is told of a choice of a group that Hydra refuses: of its name, or of what its file holds."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Iterator
from difflib import get_close_matches

from omegaconf import DictConfig, OmegaConf

from orchestrator.config.refusals.refused_keys import meant, rule

TRAININGS = ("train", "finetune")
PARTS = ("optimizer", "scheduler")
"""Groups that are chosen for each of them."""
READERS = ("hydra._internal.config_repository", "hydra._internal.defaults_list")
"""Modules of Hydra that read files and follow their `defaults`; no code of anybody else runs below them."""


def of_a_choice(key: str, value: str, text: str) -> str:
    """Say what is wrong with the choice of an option of a group; empty where that is not it."""
    if option := re.search(
        r"Could not find '(.+)/(.+)' Available options in '.+': (.*?)(?: Config search path|$)", text
    ):
        listed = option[3].replace(",", " ").split()
        hint = f"did you mean {near[0]}? Or " if (near := get_close_matches(option[2], listed, n=1)) else ""
        return f"`{option[1]}` (={option[2]}) must be one of {', '.join(listed)}; {hint}add your own with --config-dir."
    where, _, part = key.rpartition(".")
    if part in PARTS and where in ("", *TRAININGS) and re.fullmatch(r"[\w.]*", value):
        ways = " or ".join(
            f"`{each}.{part}._target_={value}`" if "." in value else f"`{part}@{each}.{part}={value}`"
            for each in ([where] if where else TRAININGS)
        )
        return f"`{part}` is a part of `train` and of `finetune`; choose it with {ways}."
    return ""


def as_chosen(reason: str, settings: Collection[str]) -> str:
    """Name the choice that was typed, `deploy` (=onnx), in place of the key that holds the name of the choice.

    Args:
        reason: as in "`deploy.formats` (=['onnx']) must ..."
        settings: what was typed
    """
    head = re.match(r"`(?P<key>(?P<group>\w+)\.\w+)` \(=(?:\['(?P<only>\w+)'\]|(?P<value>\w+))\) ", reason)
    if head is None:
        return reason
    group, choice = head["group"], head["only"] or head["value"]
    chosen = f"{group}={choice}" in settings and not any(each.startswith(f"{head['key']}=") for each in settings)
    return f"`{group}` (={choice}) {reason[head.end() :]}" if chosen else reason


def of_a_file_not_read(error: BaseException) -> str:
    """Say why Hydra could not read a file to its end, where it met no mistake that it knows; empty for all else."""
    read = [
        str(path)
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") in READERS
        and (path := frame.f_locals.get("config_path") or frame.f_locals.get("path"))
    ]
    file = f"{read[-1].removesuffix('.yaml')}.yaml" if read else ""
    if file and isinstance(error, UnicodeDecodeError):
        return f"{file} is not in UTF-8, as it has the byte {error.object[error.start]:#x}; save it in UTF-8."
    if file and isinstance(error, RecursionError):
        return f"{file} cannot be composed: its `defaults` lead back to it; take that line out."
    return ""


def in_a_file(text: str, tree: DictConfig, groups: Collection[str]) -> str:
    """Say what is wrong in the file of a choice, of which Hydra tells the first mistake; empty where it names none."""
    if listed := re.match(r"Invalid defaults list in '(\S+)', defaults must be a list \(got (\w+)\)", text):
        start = f"{listed[1]}.yaml: `defaults` must be a list, and is a {listed[2]}"
        return f"{start}; write `defaults: [override /GROUP: NAME]`."
    found = re.match(r"In '((?!config')[^']+)': (.*?)(?: Config search path.*| full_key: ?(\S*).*)?$", text)
    if found is None:
        return ""
    file, key = f"{found[1]}.yaml", found[3]
    said = re.sub(r"^\w+ raised while composing config: ", "", found[2]).rstrip(".")
    group = found[1].rpartition("/")[0]
    if re.search(rf"Key 'sweep' not in 'Config'|override '\S+@{group}\.", said):
        what = "A preset" if group == "sweep" else "What overrides a choice of another group"
        said = said.partition(". Did you mean")[0]
        return f"{file} cannot be composed: {said}. {what} begins with `# @package _global_`, in its first line."
    if named := re.match(r"Could not (?:override|find|load) '([^']+)'", said):
        if told := _of_a_default(named[1], group, groups):
            return f"{file}: {told}"
    elif key and said.startswith(f"Key '{key.rpartition('.')[2]}' not in"):
        return f"{file}: {' '.join(_of_a_key(key, tree))}"
    elif dotted := re.match(r"Key '(\S+\.\S+)' not in", said):
        nested = f"{': {'.join(dotted[1].split('.'))}: ...{'}' * dotted[1].count('.')}"
        return f"{file}: `{dotted[1]}` is no key, as keys of a file are nested; write `{nested}`."
    return _of_a_value(file, key, said, tree) or f"{file} cannot be composed: {said}."


def _of_a_value(file: str, key: str, said: str, tree: DictConfig) -> str:
    """Say what a value of a file must be, where its key may be there; empty where that is not known."""
    if key and (kind := rule(key, tree)):
        value = re.match(r"Value '(.*)' of type '(\w+)'", said)
        start = f"{file}: `{key}`{f' (={value[1]})' if value else ''} must be {kind}"
        if kind.startswith("a list"):
            return f"{start}; put it into brackets."
        if value and "," in value[1]:
            several = value[1].strip("[]").replace(", ", ",")
            return f"{start}; several are an axis, below hydra.sweeper.params: `{key}: {several}`."
        return f"{start}."
    if named := re.match(r"Merge error: \w+ is not a subclass of (\w+)\. value: (.+)", said):
        parts = [name for name in map(str, tree) if getattr(OmegaConf.get_type(tree, name), "__name__", "") == named[1]]
        return (
            f"{file}: `{' or '.join(parts)}` (={named[2]}) must be a mapping; a choice is made in `defaults`, as in "
            f"`- override /{parts[0] if parts else 'GROUP'}: {named[2]}`."
        )
    if said == "Cannot merge DictConfig with ListConfig":
        return (
            f"{file} has a list where a mapping belongs, at its top or below a key such as hydra.sweeper.params; write "
            "`key: value` there, without dashes and brackets."
        )
    return ""


def _of_a_default(name: str, folder: str, groups: Collection[str]) -> str:
    """Say what is wrong with a line of `defaults`, by what Hydra looked for; empty where that cannot be said."""
    inside = name.removeprefix(f"{folder}/")
    if word := re.match(r"override\b ?/?(.*)", inside):
        return f"`override /{word[1]}` chooses nothing; name a choice, as in `override /{word[1] or 'model'}: NAME`."
    group = inside.partition("@")[0].partition("/")[0]
    if inside != name and group in groups:
        return f"`{group}` is looked for in {folder}/ where it has no slash; write `override /{group}: ...`."
    part = re.fullmatch(rf"(?:({'|'.join(TRAININGS)})/)?({'|'.join(PARTS)})", inside.partition("@")[0])
    if part:
        way = f"override /{part[2]}@{part[1] or 'train'}.{part[2]}"
        return f"`/{part[0]}` is chosen for `train` and for `finetune`, each its own; write `{way}: ...`."
    if group in groups:
        return ""
    near = get_close_matches(group, groups, n=1)
    known = f"did you mean `/{near[0]}`?" if near else f"there are {', '.join(groups)}."
    return f"`/{group}` is not a group; {known}"


def _of_a_key(key: str, tree: DictConfig) -> Iterator[str]:
    """Yield what is to be told of a key that a file must not have."""
    yield f"`{key}` is not a key of the configuration;"
    if key in ("default", "Defaults"):
        yield "did you mean `defaults`?"
    elif key in OmegaConf.select(tree, "hydra", default={}):
        yield f"did you mean `hydra.{key}`?"
    elif key.startswith("hydra."):
        yield "check its spelling in Hydra's documentation."
    else:
        yield from meant(key, tree)
