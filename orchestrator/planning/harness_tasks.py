"""Tasks of lm-evaluation-harness: whether they exist, and the content of those that the user defined."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from orchestrator.core.plain_data import digest
from orchestrator.core.redact import redact
from orchestrator.planning.file_places import BESIDE_TOKENIZER, GENERATION, Misplaced, absolute
from orchestrator.planning.pinned_content import TOKENIZERS, from_transformers, place_digest, release_of, unusable

LIBRARY = "lm_eval"
"""Package of the harness."""
FILES = ("json", "csv", "text", "parquet", "arrow")
"""Data sets of the package datasets that read files."""
NEAR = 3
"""Number of similar names that a refusal lists."""


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each task, package, file or network without which the harness cannot evaluate a trial."""
    harness, model, data = (config[name] for name in ("harness", "model", "data"))
    said = f"`harness.tasks` (={', '.join(harness['tasks'])})"
    if not harness["tasks"]:
        return
    if not from_transformers(model):
        yield f"{said} needs a language model of transformers; pass model=huggingface or model=smollm2."
    elif data.get("kind") != "text" or data["tokenizer"] in TOKENIZERS:
        yield f"{said} needs the tokenizer of the network; pass data=text data.tokenizer=model."
    if release_of(LIBRARY) is None:
        yield f"{said} needs the package lm-eval, which is not installed: pip install 'pruning-orchestrator[harness]'."
        return
    place = harness["include_path"]
    if place is not None and not os.path.isdir(absolute(place)):
        yield f"`harness.include_path` (={redact(place)}) must be a directory of task definitions; check the path."
        return
    for name in harness["tasks"]:
        yield from unusable("harness.tasks", name, partial(content, name, place))


def fields(config: Mapping[str, Any], location: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the plain `HarnessFields` of each task of a trial.

    Args:
        config: configuration of the trial, without violations
        location: paths of the trial's files, as `pinned` returns them
    """
    harness = config["harness"]
    if not harness["tasks"]:
        return
    tokenizer, model = Path(location["data"]["tokenizer"]).parent, Path(location["model"]["path"])
    places = [*(tokenizer / name for name in BESIDE_TOKENIZER), model / GENERATION]
    known = {name: harness[name] for name in ("shots", "limit", "batch_size")} | {
        "release": release_of(LIBRARY),
        "beside": {place.name: place_digest(str(place)) for place in places if place.is_file()},
    }
    for name in harness["tasks"]:
        yield {"task": name, **known, "content": content(name, harness["include_path"])}


def task_manager(name: str, include_path: str | None) -> Any:
    """Return the library's `TaskManager` that knows a task.

    The library's own definitions are read only for names that are no task in `include_path`, because that takes ten
    seconds or more.
    """
    if include_path is None:
        return _manager(None, "", defaults=True)
    place = absolute(include_path)
    state = digest(repr([(path, place_digest(path)) for path in _below(place, "*.yaml")]))
    found = _manager(place, state, defaults=False)
    return found if name in found.all_subtasks else _manager(place, state, defaults=True)


@lru_cache(maxsize=4)
def _manager(include_path: str | None, _state: str, *, defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=defaults)


def content(name: str, include_path: str | None) -> str:
    """Return a digest of the definitions, code and data files of a task in `include_path`; empty for other tasks.

    A group stands for all definitions there.

    Raises:
        Misplaced: there is no such task, or a data file is missing
    """
    manager = task_manager(name, include_path)
    index = manager.task_index
    if name not in index:
        near = " or ".join(get_close_matches(name, index, NEAR)) or "one of `lm_eval ls tasks`"
        raise Misplaced(
            f"is not a task of lm_eval {release_of(LIBRARY)}; pass {near}, or the directory of your own tasks as "
            "harness.include_path."
        )
    if include_path is None:
        return ""
    place, names = absolute(include_path), [name] if name in manager.all_subtasks else sorted(index)
    own = [index[each] for each in names if str(index[each].yaml_path).startswith(f"{place}{os.sep}")]
    if not own:
        return ""
    files = [*_below(place, "*.py"), *(path for each in own for path in _data_files(each.cfg))]
    parts = [[each.cfg for each in own], [place_digest(path) for path in files]]
    return digest(json.dumps(parts, sort_keys=True, default=str).replace(place, ""))


def _below(place: str, pattern: str) -> list[str]:
    return sorted(str(path) for path in Path(place).rglob(pattern))


def _data_files(definition: Mapping[str, Any]) -> Iterator[str]:
    """Yield the local data files that the definition of a task names.

    Raises:
        Misplaced: a file is missing
    """
    source, pending = str(definition.get("dataset_path")), [(definition.get("dataset_kwargs") or {}).get("data_files")]
    while pending:
        value = pending.pop()
        if isinstance(value, str) and "://" not in value and (source in FILES or os.path.exists(value)):
            found = sorted(glob.glob(absolute(value), recursive=True))
            if not found:
                raise Misplaced(
                    f"names the data file {value}, which does not exist; check the path, relative to the working "
                    "directory."
                )
            yield from found
        elif isinstance(value, list | Mapping):
            pending += value.values() if isinstance(value, Mapping) else value
    if os.path.isdir(source):
        yield from (path for path in _below(source, "*") if os.path.isfile(path))
