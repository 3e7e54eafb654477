"""Restarts of rounds: the canonical form of the configuration's `restart` for a stage's key. Pure."""

from __future__ import annotations

from typing import Any

from orchestrator.config.schema import Config
from orchestrator.config.training import Train
from orchestrator.core.restart_kinds import CONTROLS, RESTARTS
from orchestrator.core.stage_kinds import Place


def restart_of(trial: Config, *, last: bool) -> dict[str, Any]:
    """Return the field `restart` of a round; {} for a round that fine-tunes its pruned network.

    `weights` and `control` are rows of `orchestrator.core.restart_kinds`; `step` is the place of weights; `rates` is
    the place from which the round continues by `train`, absent for fine-tuning; `optimizer` is restored or fresh.

    Args:
        trial: the trial.
        last: whether the round is the last one; only the last round is a control.
    """
    asked, train = trial.restart, trial.train
    control = CONTROLS[asked.control if last else "none"]
    weights = RESTARTS[control.weights or asked.weights]
    rates = None if control.weights else asked.rates
    if rates is None and (not weights.keeps or trial.schedule.at != "trained"):
        rates = asked.step if weights.at_step else 0
    found: dict[str, Any] = {}
    if rates is not None:
        found = {"weights": weights.name, "rates": place(rates, train)}
        found["optimizer"] = asked.optimizer if found["rates"] else "restored"  # step 0 has no optimizer state
    if weights.at_step:
        found["step"] = place(asked.step, train)
    return found | ({"control": control.name} if control.name != "none" and control.in_key else {})


def place(asked: Any, train: Train) -> Place:
    """Return the canonical form of a place in a training, given as a step, a fraction or epochs."""
    if isinstance(asked, int):
        return asked
    if isinstance(asked, float) and train.steps is not None:
        return round(asked * train.steps)
    epochs = asked * (train.epochs or 0) if isinstance(asked, float) else epochs_of(asked)
    return f"{epochs:.10g}ep" if epochs else 0


def epochs_of(text: str) -> float:
    """Return the epochs in a place such as 2.5ep."""
    return float(text.removesuffix("ep"))
