"""Custom loss with which workers stop at chosen moments of scoring and training, to be killed there.

The variable HOLD names the moments, as in `obs:1,synflow:50,training:3`: the second time that a worker scores by obs in
a round, and so on. At each moment the first worker writes its process id to a file of that name in the folder HELD, and
waits. Later workers find the file and continue.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from orchestrator.training import training_stages
from pruning.engine import plans
from pruning.scores.weight_scores import Flow

_within = ""
"""Current work of the stage, without preflights: `scoring`, `training`, or neither."""
_calls: Counter[str] = Counter()
_compute_scores, _flow = plans.compute_scores, Flow.scores
_prune_now, _fit = training_stages.prune_now, training_stages._fit


class CrossEntropy(torch.nn.CrossEntropyLoss):
    """Cross entropy of torch, which stops a training at the chosen step."""

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if _within == "training" and torch.is_grad_enabled():
            _passes("training")
        return super().forward(outputs, labels)


def _passes(name: str) -> None:
    moment = f"{name}:{_calls[name]}"
    _calls[name] += 1
    if moment in os.environ.get("HOLD", "").split(","):
        try:
            (Path(os.environ["HELD"]) / moment).open("x").write(str(os.getpid()))
        except FileExistsError:
            return
        time.sleep(300)


def _holding_compute_scores(score: Any, *arguments: Any, **options: Any) -> Any:
    if _within == "scoring" and score.kind != "synflow":
        _passes(score.kind)
    return _compute_scores(score, *arguments, **options)


def _holding_flow(flow: Flow, *arguments: Any, **options: Any) -> Any:
    """Wrap SynFlow's network, which is made once for all re-scorings of a round."""
    if _within == "scoring":
        _passes("synflow")
    return _flow(flow, *arguments, **options)


def _during(what: str, method: Any) -> Any:
    def held(*arguments: Any) -> Any:
        global _within
        _within, before = what, _within
        try:
            return method(*arguments)
        finally:
            _within = before

    return held


if "HOLD" in os.environ:
    plans.compute_scores, Flow.scores = _holding_compute_scores, _holding_flow  # type: ignore[method-assign]
    training_stages.prune_now, training_stages._fit = _during("scoring", _prune_now), _during("training", _fit)
