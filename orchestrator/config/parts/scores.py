"""What ranks entries, as a group of a configuration: plain dataclasses, no torch.

What a score is called with besides lies beside its kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.config.parts.model_and_data import Component
from orchestrator.config.rules import Rule, is_number, key, one_of, whole

_MANY = whole(1).or_null(", or null")
_MODE = one_of("train", "eval").or_null(", or null: train for a network at its start, eval for a trained one")
_ABOVE_0 = Rule(lambda value: is_number(value) and value > 0, "be above 0")


@dataclass
class Score(Component):
    """What ranks entries, by weights alone; and which examples of the training split a score or a repair reads."""

    examples: int | None = key(None, _MANY)
    """How many at most, at each re-scoring; null: none, unless `per_class`."""
    per_class: int | None = key(None, _MANY)
    """How many of each class, instead."""
    batch_size: int | None = key(None, _MANY)
    """Of their batches; null: all in one."""

    @staticmethod
    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is wrong with the two ways to say how much is read."""
        if values.get("examples") is not None and values.get("per_class") is not None:
            yield (
                f"`{where}.examples` (={values['examples']}) and `{where}.per_class` (={values['per_class']}) are both "
                f"given; pass exactly one: add `{where}.examples=null` or `{where}.per_class=null`."
            )


@dataclass
class ScoreOfData(Score):
    """What ranks entries by what the network does on examples."""

    examples: int | None = key(128, _MANY)

    @staticmethod
    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield that examples are needed, where there are none."""
        yield from Score.across(where, values)
        if values.get("examples", 128) is None and values.get("per_class") is None:
            yield (
                f"`{where}.examples` (=null) must be given, or `{where}.per_class`: {values.get('kind')} reads data; "
                f"pass {where}.examples=128."
            )


@dataclass
class ScoreOfGradient(ScoreOfData):
    """What ranks entries by the gradient of the mean loss."""

    batch_norm: str | None = key(None, _MODE)
    """`train` normalises by each batch's own statistics, `eval` by the running ones."""


@dataclass
class Grasp(ScoreOfGradient):
    """The gradient flow that an entry gives; outputs are divided by `temperature`."""

    kind: str | None = "grasp"
    examples: int | None = key(None, _MANY)
    per_class: int | None = key(10, _MANY)
    temperature: float = key(200.0, _ABOVE_0)
    """Divides the network's outputs."""


@dataclass
class Taylor(ScoreOfGradient):
    """The squared change of the loss to first order, by mini-batch, averaged."""

    kind: str | None = "taylor"
    examples: int | None = key(1920, _MANY)
    batch_size: int | None = key(64, _MANY)
    form: str = key("entry", one_of("entry", "filter", "gate", "bn"))
    """What is scored: an `entry`; a `filter` by its weights, by a `gate` on its output, or by the gate of its `bn`."""
    per_example: bool = False
    """With `gate`: squares are taken of each example's gradient, and not of a batch's."""


@dataclass
class Synflow(Score):
    """What an entry gives to the sum of the outputs for an input of ones, in a network of magnitudes."""

    kind: str | None = "synflow"
    examples: int | None = key(1, _MANY)
    """Of which it sees the shape alone."""
    bias: bool = False
    """Biases flow in, as |b|; else they are 0, as in the paper."""


@dataclass
class ScoreByExample(ScoreOfData):
    """What ranks entries by the curvature of the loss, from each example apart."""

    examples: int | None = key(1000, _MANY)
    batch_size: int | None = key(100, _MANY)


@dataclass
class Obs(ScoreByExample):
    """What removing an entry costs where the others make up for it."""

    kind: str | None = "obs"
    damping: float = key(1e-5, _ABOVE_0)
    """Added to the diagonal of the Fisher matrix."""
    block: int | None = key(None, _MANY)
    """The inverse is of such blocks of consecutive entries; null: of all together."""


SCORES: Mapping[str, type] = {
    "magnitude": Score,
    "random": Score,
    "gradient": ScoreOfGradient,
    "snip": ScoreOfGradient,
    "grasp": Grasp,
    "synflow": Synflow,
    "taylor": Taylor,
    "fisher": ScoreByExample,
    "obd": ScoreByExample,
    "obs": Obs,
    "lamp": Score,
    "bn_scale": Score,
    "fpgm": Score,
    "wanda": ScoreOfData,
}
"""Kind -> its keys; what a kind stands for is in `pruning.scores.SCORES`."""
