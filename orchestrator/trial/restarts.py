"""Restarts of rounds: the canonical form of the configuration's `restart` for a stage's key. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.config.method_choices import decides_itself, prunes_channels
from orchestrator.core.restart_kinds import CONTROLS, RESTARTS
from orchestrator.core.stage_fields import Place
from pruning.choices.axes import TRANSFORMER_UNITS

WHOLE = ("channel", "group", *TRANSFORMER_UNITS)
"""Units that are whole channels, or whole parts of a transformer."""


def restart_of(config: Mapping[str, Any], *, last: bool) -> dict[str, Any]:
    """Return the field `restart` of a round; {} for a round that fine-tunes its pruned network.

    `weights` and `control` are rows of `orchestrator.core.restart_kinds`; `step` is the place of weights; `rates` is
    the place from which the round continues by `train`, absent for fine-tuning; `optimizer` is restored or fresh.

    Args:
        config: configuration of the trial.
        last: whether the round is the last one; only the last round is a control.
    """
    asked, train = config["restart"], config["train"]
    control = CONTROLS[asked["control"] if last else "none"]
    weights = RESTARTS[control.weights or asked["weights"]]
    rates = None if control.weights else asked["rates"]
    if rates is None and (not weights.keeps or config["schedule"]["at"] != "trained"):
        rates = asked["step"] if weights.at_step else 0
    found: dict[str, Any] = {}
    if rates is not None:
        found = {"weights": weights.name, "rates": place(rates, train)}
        found["optimizer"] = asked["optimizer"] if found["rates"] else "restored"  # step 0 has no optimizer state
    if weights.at_step:
        found["step"] = place(asked["step"], train)
    return found | ({"control": control.name} if control.name != "none" and control.in_key else {})


def place(asked: Any, train: Mapping[str, Any]) -> Place:
    """Return the canonical form of a place in a training, given as a step, a fraction or epochs."""
    if isinstance(asked, int):
        return asked
    if isinstance(asked, float) and train["steps"] is not None:
        return round(asked * int(train["steps"]))
    epochs = asked * int(train["epochs"]) if isinstance(asked, float) else _epochs(asked)
    return f"{epochs:.10g}ep" if epochs else 0


def _epochs(text: str) -> float:
    return float(text.removesuffix("ep"))


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each broken rule of a configuration's restart."""
    restart, schedule, train = config["restart"], config["schedule"], config["train"]
    weights, control, rounds = RESTARTS[restart["weights"]], CONTROLS[restart["control"]], int(schedule["rounds"])
    if weights.at_step != (restart["step"] is not None):
        among = " or ".join(name for name, row in RESTARTS.items() if row.at_step)
        yield (
            f"`restart.step` (={restart['step']}) must be given if and only if `restart.weights` (={weights.name}) is "
            f"{among}; pass restart=rewind restart.step=0, or restart.step=null."
        )
        return
    if schedule["at"] == "start" and rounds > 1:
        yield (
            f"`schedule.rounds` (={rounds}) must be 1 with schedule.at=start, which prunes a network before its "
            f"training; pass schedule.rounds=1 schedule.inner={rounds} to score several times without training, or "
            "schedule.at=trained restart=rewind restart.step=0 to train in between and rewind to the initialisation."
        )
    if schedule["at"] == "during" and rounds > 1:
        yield (
            f"`schedule.rounds` (={rounds}) must be 1 with schedule.at=during, where masks change within one training; "
            "pass schedule.rounds=1, or schedule.at=trained to change them while each round fine-tunes."
        )
    if control.shuffles and rounds > 1 and weights.keeps:
        yield (
            f"`restart.control` (={control.name}) would bring back weights that earlier rounds set to zero, with "
            f"restart.weights={weights.name} and `schedule.rounds` (={rounds}); pass restart=rewind, or "
            "schedule.rounds=1."
        )
    method, unit = config["method"], config["unit"]["kind"]
    chosen = decides_itself(method) or schedule["amount"] is not None
    whole = prunes_channels(method) or method.get("_target_") if chosen else unit in WHOLE
    if control.small and not whole:
        named = f"`method` (={method.get('name')})" if chosen else f"`unit` (={unit})"
        yield (
            f"`restart.control` (={control.name}) trains the dense network that remains without the pruned channels, "
            f"but {named} prunes no whole channels; pass method=magnitude unit=group, or another control."
        )
    if "rates" in restart_of(config, last=True):
        yield from _training_violations(config, train)


def _training_violations(config: Mapping[str, Any], train: Mapping[str, Any]) -> Iterator[str]:
    """Yield the broken rules of rounds that continue from a step of the dense training."""
    if not (train["epochs"] or train["steps"]):
        yield (
            "With `restart`, schedule.at=start or schedule.at=during, rounds train by `train`, which trains nothing "
            "(train.epochs=0); pass train.epochs=15, for example, or restart=keep schedule.at=trained."
        )
    if config["finetune"]["teacher"] is not None:
        yield (
            f"`finetune.teacher` (={config['finetune']['teacher']}) is for rounds that fine-tune, but with `restart`, "
            "schedule.at=start or schedule.at=during they train by `train`; pass finetune.teacher=null."
        )
    if config["finetune"]["lora_rank"] is not None:
        yield (
            f"`finetune.lora_rank` (={config['finetune']['lora_rank']}) is for rounds that fine-tune, but with "
            "`restart`, schedule.at=start or schedule.at=during they train by `train`; pass finetune.lora_rank=null."
        )
    for name in ("step", "rates"):
        yield from _place_violations(f"restart.{name}", config["restart"][name], train)


def _place_violations(key: str, asked: Any, train: Mapping[str, Any]) -> Iterator[str]:
    length = train["steps"] if train["epochs"] is None else train["epochs"]
    if isinstance(asked, str) and train["epochs"] is None:
        yield (
            f"`{key}` (={asked}) counts epochs, but `train.steps` (={length}) gives the length of the training; pass a "
            "step as an int, or a fraction of the training as a float."
        )
    elif (isinstance(asked, str) and _epochs(asked) > length) or (
        isinstance(asked, int) and train["epochs"] is None and asked > length
    ):
        unit = "steps" if train["epochs"] is None else "epochs"
        yield f"`{key}` (={asked}) must be at most `train.{unit}` (={length}); pass fewer."
    if asked and train["_target_"] is not None and place(asked, train) != 0:
        yield (
            f"`{key}` (={asked}) must be 0 with `train._target_` (={train['_target_']}): a function of your own "
            "decides its length; pass 0, or train._target_=null for the built-in loop."
        )
