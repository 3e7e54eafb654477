"""What each round trains on from: the configuration's `restart`, in the one form that a stage's key has. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.config.parts.method_choices import decides_itself, prunes_channels

WHOLE = ("channel", "group")
"""Kinds of units that are whole channels."""
Place = int | str
"""A step of a training; where only its epochs are known, epochs as in 2.5ep."""


def restart_of(config: Mapping[str, Any], *, last: bool) -> dict[str, Any]:
    """Return what the fields of a round say of its restart, {} for one that fine-tunes what it has pruned.

    `weights` is keep, step or reinit; `step` the place of those; `rates` that from which the round trains on by
    `train`, absent where it fine-tunes; `optimizer` restored or fresh; `control` shuffle, invert or small.

    Args:
        last: whether it is the last round, which alone is a control.
    """
    asked, train = config["restart"], config["train"]
    control = asked["control"] if last else "none"
    anew = control in ("reinit", "small")
    weights, rates = ("reinit", None) if anew else (asked["weights"], asked["rates"])
    if rates is None and (weights != "keep" or config["schedule"]["at"] == "start"):
        rates = asked["step"] if weights == "step" else 0
    found: dict[str, Any] = {}
    if rates is not None:
        found = {"weights": weights, "rates": place(rates, train)}
        found["optimizer"] = asked["optimizer"] if found["rates"] else "restored"  # at step 0 there is nothing of it
    if weights == "step":
        found["step"] = place(asked["step"], train)
    return found | ({"control": control} if control in ("shuffle", "invert", "small") else {})


def place(asked: Any, train: Mapping[str, Any]) -> Place:
    """Return a place in a training, asked for as a step, a fraction or epochs, in its one form."""
    if isinstance(asked, int):
        return asked
    if isinstance(asked, float) and train["steps"] is not None:
        return round(asked * int(train["steps"]))
    epochs = asked * int(train["epochs"]) if isinstance(asked, float) else _epochs(asked)
    return f"{epochs:.10g}ep" if epochs else 0


def _epochs(text: str) -> float:
    return float(text.removesuffix("ep"))


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each restart that a configuration asks for and that cannot be."""
    restart, schedule, train = config["restart"], config["schedule"], config["train"]
    weights, rounds = restart["weights"], int(schedule["rounds"])
    if (weights == "step") != (restart["step"] is not None):
        yield (
            f"`restart.step` (={restart['step']}) is the step of the weights that `restart.weights` (={weights}) goes "
            "back to; pass both, as in restart=rewind restart.step=0, or neither."
        )
        return
    if schedule["at"] == "start" and rounds > 1:
        yield (
            f"`schedule.rounds` (={rounds}) must be 1 with schedule.at=start, where a network is pruned before it is "
            f"trained; to score anew between steps without training pass schedule.rounds=1 schedule.inner={rounds}, "
            "to train in between and go back to the initialisation schedule.at=trained restart=rewind restart.step=0."
        )
    if restart["control"] == "shuffle" and rounds > 1 and weights == "keep":
        yield (
            "`restart.control` (=shuffle) would bring back weights that earlier rounds have made zero, with "
            f"restart.weights=keep and `schedule.rounds` (={rounds}); pass restart=rewind, or schedule.rounds=1."
        )
    method, unit = config["method"], config["unit"]["kind"]
    chosen = decides_itself(method) or schedule["amount"] is not None
    whole = prunes_channels(method) or method.get("_target_") if chosen else unit in WHOLE
    if restart["control"] == "small" and not whole:
        named = f"`method` (={method.get('name')})" if chosen else f"`unit` (={unit})"
        yield (
            f"`restart.control` (=small) trains the dense network that is left without whole channels, and {named} "
            "takes none out; pass method=magnitude unit=group, or another control."
        )
    if "rates" in restart_of(config, last=True):
        yield from _training_violations(config, train)


def _training_violations(config: Mapping[str, Any], train: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of the dense training keeps rounds from training on from a step of it."""
    if not (train["epochs"] or train["steps"]):
        yield (
            "`restart` and schedule.at=start have rounds train by `train`, which trains nothing (train.epochs=0); "
            "pass its length, or restart=keep schedule.at=trained."
        )
    if config["finetune"]["teacher"] is not None:
        yield (
            f"`finetune.teacher` (={config['finetune']['teacher']}) teaches rounds that fine-tune, and by `restart` or "
            "schedule.at=start they train by `train`; pass finetune.teacher=null."
        )
    for name in ("step", "rates"):
        yield from _place_violations(f"restart.{name}", config["restart"][name], train)


def _place_violations(key: str, asked: Any, train: Mapping[str, Any]) -> Iterator[str]:
    length = train["steps"] if train["epochs"] is None else train["epochs"]
    if isinstance(asked, str) and train["epochs"] is None:
        yield (
            f"`{key}` (={asked}) counts epochs, and the training is as long as `train.steps` (={length}); pass a step "
            "as an int, or a fraction of the training as a float."
        )
    elif (isinstance(asked, str) and _epochs(asked) > length) or (
        isinstance(asked, int) and train["epochs"] is None and asked > length
    ):
        unit = "steps" if train["epochs"] is None else "epochs"
        yield f"`{key}` (={asked}) must lie in the dense training, whose `train.{unit}` are {length}; pass fewer."
    if asked and train["_target_"] is not None and place(asked, train) != 0:
        yield (
            f"`{key}` (={asked}) must be 0 with `train._target_` (={train['_target_']}): a function of your own says "
            "itself when it ends; pass 0, or null for the built-in loop."
        )
