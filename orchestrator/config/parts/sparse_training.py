"""Rules of trainings in which masks change: a `dynamics` with code, `schedule.at`, and the training of the rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pruning.catalogue.dynamics import DYNAMICS, DynamicsRow, own_row
from pruning.schedule import step_of


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each broken rule; an unknown dynamics breaks none of these."""
    row, at = row_of(config["dynamics"]), config["schedule"]["at"]
    if row is None:
        return
    if not row.in_training:
        if at == "during":
            yield (
                f"`schedule.at` (=during) needs a dynamics that changes masks within the training, but `dynamics` is "
                f"{row.name}; pass dynamics=rigl, for example, or schedule.at=start."
            )
        return
    if at == "start":
        yield (
            f"`schedule.at` (=start) prunes before the training, but dynamics={row.name} changes masks within it; pass "
            "schedule.at=during, or schedule.at=trained to change them while the trained network is fine-tuned."
        )
    if config["prune"]["holding"] == "hooks":
        yield (
            f"`prune.holding` (=hooks) holds fixed masks, but dynamics={row.name} changes them; pass "
            "prune.holding=keeper."
        )
    if (control := config["restart"]["control"]) != "none":
        yield (
            f"`restart.control` (={control}) changes masks or weights of a round before its training, but "
            f"dynamics={row.name} changes the masks within it; pass restart.control=none, and dynamics=static for a "
            "control with a fixed mask."
        )
    yield from _length_violations(config, row)


def row_of(node: Mapping[str, Any]) -> DynamicsRow | None:
    """Return the row of a configured dynamics; None for an unknown name."""
    target = node.get("_target_")
    return DYNAMICS.get(str(node.get("kind"))) if target is None else own_row(str(target))


def _length_violations(config: Mapping[str, Any], row: DynamicsRow) -> Iterator[str]:
    """Yield the broken rules of the length of the training in which masks change."""
    restarted = config["restart"]["weights"] != "keep" or config["restart"]["rates"] is not None
    where = "train" if config["schedule"]["at"] != "trained" or restarted else "finetune"
    training, node = config[where], config["dynamics"]
    if where == "finetune" and not (training["epochs"] or training["steps"]):
        yield (
            f"`finetune` trains nothing (finetune.epochs=0), but dynamics={row.name} changes masks while it trains; "
            "pass finetune.epochs=5, for example, or schedule.at=during."
        )
    if training["steps"] and not restarted:
        yield from place_violations(node, int(training["steps"]), f"{where}.steps")


def place_violations(node: Mapping[str, Any], length: int, what: str) -> Iterator[str]:
    """Yield a sentence if masks change outside of a training.

    Args:
        node: the configuration of the dynamics.
        length: number of steps of the training.
        what: the key or the words for the length.
    """
    row = row_of(node)
    options = {option.name: option.default for option in (row.options if row else ())} | dict(node)
    begin, until = (step_of(options.get(name, default), length) for name, default in (("begin", 0.0), ("until", 1.0)))
    if not begin < until <= length:
        given = ", ".join(f"`dynamics.{name}` (={options[name]})" for name in ("begin", "until") if name in options)
        yield (
            f"{given} must give steps begin < until <= {length}, the steps of the training ({what}), but give {begin} "
            f"and {until}; up to 1 a place is a fraction of the training."
        )
