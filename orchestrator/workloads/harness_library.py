"""Evaluation of a language model by lm-evaluation-harness: its figures, and the score of each document."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from math import fsum, isclose, isfinite
from typing import Any
from unittest.mock import DEFAULT, patch

from torch import nn

from orchestrator.core.errors import Cancelled, DataError
from orchestrator.core.metrics import Metric
from orchestrator.core.plain_data import digest
from orchestrator.core.records import Answers
from orchestrator.core.specs import HarnessFields
from orchestrator.planning.harness_tasks import LIBRARY, content, task_manager
from orchestrator.planning.pinned_content import release_of
from pruning.graph.tracing import quiet

PLAIN = "none"
"""Name of the filter that changes nothing."""


@dataclass(frozen=True)
class Evaluation:
    """Result of a task, group or tag."""

    figures: Mapping[str, float]
    """Task and metric, as in `arc_easy/acc` -> value; of a group also those of its members."""
    metrics: tuple[Metric, ...]
    answers: Mapping[str, Answers]
    """Figure -> score of each document, for figures that are means over documents."""
    documents: int
    warnings: tuple[str, ...]


def evaluation(network: nn.Module, tokenizer: Any, asked: HarnessFields, place: Mapping[str, Any]) -> Evaluation:
    """Evaluate a network of transformers in memory, as the command `lm_eval` does its saved files.

    Args:
        network: the network, on its device.
        tokenizer: tokenizer of transformers.
        asked: the task, and the settings of its evaluation.
        place: `include_path`, and the `directory` to which paths of data files are relative.

    Raises:
        DataError: the task has another definition or data than the sweep was planned with, or the library fails
    """
    where = place["include_path"]
    with chdir(place["directory"] if os.path.isdir(place["directory"]) else os.curdir):
        if (release_of(LIBRARY), content(asked.task, where)) != (asked.release, asked.content):
            raise DataError(
                f"`harness.tasks` (={asked.task}) must have the definition, the data files and the release of lm_eval "
                f"({asked.release}) that the sweep was planned with; run the same command again."
            )
        return read_results(_evaluated(network, tokenizer, asked, task_manager(asked.task, where)))


def _evaluated(network: nn.Module, tokenizer: Any, asked: HarnessFields, manager: Any) -> Any:
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    settings = {"num_fewshot": asked.shots, "limit": asked.limit, "bootstrap_iters": 0, "task_manager": manager}
    slow = dict.fromkeys(("add_env_info", "get_git_commit_hash"), DEFAULT)  # run pip and git for seconds
    try:
        with quiet(), patch.multiple(evaluator, **slow):
            model = HFLM(pretrained=network, tokenizer=tokenizer, batch_size=asked.batch_size)
            return evaluator.simple_evaluate(model, tasks=[asked.task], **settings)
    except Cancelled:
        raise
    except Exception as error:  # the library and the code of a task raise many types
        text = " ".join(str(error).split())[:300].rstrip(".")
        raise DataError(
            f"`harness.tasks` (={asked.task}) cannot be evaluated by lm_eval: {type(error).__name__}: {text}; its "
            "traceback is in the log. Try the task by the command lm_eval, and download its data set first."
        ) from error


def read_results(found: Mapping[str, Any]) -> Evaluation:
    """Return the figures in the results of `simple_evaluate`."""
    better = {name: higher for each in found["higher_is_better"].values() for name, higher in each.items()}
    figures, answers, warnings = dict[str, float](), dict[str, Answers](), list[str]()
    metrics: dict[str, Metric] = {}
    for task, values in found["results"].items():
        samples = [sample for leaf in _leaves(task, found["group_subtasks"]) for sample in found["samples"][leaf]]
        for (name, kept), value in _figures(values):
            own = re.sub(r"\W+", "_", name if kept == PLAIN else f"{name}_{kept}")[:40]
            if better.get(name) is None or not isfinite(value):
                warnings.append(f"{task}/{own} is left out: it is not finite, or its better direction is not known")
                continue
            scores = _scores(samples, name, kept, value)
            metrics[own] = Metric(own, "", "higher" if better[name] else "lower", 0.0, ".4f" if scores else ".4g")
            figures[f"{task}/{own}"] = value
            answers |= {f"{task}/{own}": scores} if scores else {}
    documents = sum(each["effective"] for each in found["n-samples"].values())
    return Evaluation(figures, tuple(metrics.values()), answers, documents, tuple(warnings))


def _leaves(task: str, members: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the tasks of a group; a task itself."""
    if task not in members:
        yield task
    for member in members.get(task, ()):
        yield from _leaves(member, members)


def _figures(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield (metric, filter) and value, without the standard errors."""
    for key, value in values.items():
        name, comma, kept = key.partition(",")
        if comma and not name.endswith("_stderr") and isinstance(value, int | float):
            yield (name, kept), float(value)


def _scores(samples: Sequence[Mapping[str, Any]], name: str, kept: str, value: float) -> Answers | None:
    """Return the score of each document; None for a figure that is not their mean, such as a perplexity."""
    chosen = [sample for sample in samples if sample["filter"] == kept]
    scores = [sample.get(name) for sample in chosen]
    if not scores or not all(isinstance(score, int | float) for score in scores):
        return None
    numbers = tuple(float(score) for score in scores if score is not None)
    if not isclose(fsum(numbers) / len(numbers), value, rel_tol=1e-9, abs_tol=1e-12):
        return None
    return Answers(digest("".join(sample["doc_hash"] for sample in chosen)), numbers)
