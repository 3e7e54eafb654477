"""What is told of a choice of a group that Hydra refuses: of its name, or of what its file holds."""

from __future__ import annotations

import re
from difflib import get_close_matches

TRAININGS = ("train", "finetune")


def of_a_choice(key: str, value: str, text: str) -> str:
    """Say what is wrong with the choice of an option of a group, or with its file; empty where that is not it."""
    if option := re.search(
        r"Could not find '(.+)/(.+)' Available options in '.+': (.*?)(?: Config search path|$)", text
    ):
        listed = option[3].replace(",", " ").split()
        meant = f"did you mean {near[0]}? Or " if (near := get_close_matches(option[2], listed, n=1)) else ""
        return (
            f"`{option[1]}` (={option[2]}) must be one of {', '.join(listed)}; {meant}add your own with --config-dir."
        )
    where, _, part = key.rpartition(".")
    if part in ("optimizer", "scheduler") and where in ("", *TRAININGS) and re.fullmatch(r"[\w.]*", value):
        ways = " or ".join(
            f"`{each}.{part}._target_={value}`" if "." in value else f"`{part}@{each}.{part}={value}`"
            for each in ([where] if where else TRAININGS)
        )
        return f"`{part}` is a part of `train` and of `finetune`; choose it with {ways}."
    if file := re.match(r"In '((?!config')[^']+)': (.*?)(?: full_key|$)", text):
        said = file[2].removeprefix("ConfigKeyError raised while composing config: ").rstrip(".")
        outside = file[1].startswith("sweep/") and re.search(r"Key 'sweep' not in 'Config'|override '\S+@sweep\.", said)
        rule = " A preset begins with `# @package _global_`, in its first line." if outside else ""
        return f"{file[1]}.yaml cannot be composed: {said.partition('. Did you mean')[0] if rule else said}.{rule}"
    if "No match in the defaults list" in text:
        return f"`{key}` (={value}) is a choice that is added: write +{key}={value}."
    return ""
