"""Schemas and rules of `train`, `finetune` and `restart`, also for trainings in which masks change; no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.catalogue.tasks import OPTIONAL_TARGET, has_target
from orchestrator.config.key_rules import Unread, key
from orchestrator.core.plain_data import canonical_json
from orchestrator.core.restart_kinds import CONTROLS, RESTARTS, listed
from pruning.catalogue.dynamics import DYNAMICS, DynamicsRow, own_row
from pruning.catalogue.rows import Rule, at_least, is_number, one_of, whole, within
from pruning.schedule import step_of


def row_of(node: Mapping[str, Any]) -> DynamicsRow | None:
    """Return the row of a configured dynamics; None for an unknown name."""
    target = node.get("_target_")
    return DYNAMICS.get(str(node.get("kind"))) if target is None else own_row(str(target))


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


LOOPS_OWN = ("accumulate", "penalty", "ema", "compile", "patience", "lora_rank")
"""Keys of a training that only the built-in loop reads."""
_EPOCHS = re.compile(r"(\d+(?:\.\d+)?)ep")
"""Place in a training in epochs, as in 2ep."""


def _is_place(value: Any) -> bool:
    if isinstance(value, str):
        return _EPOCHS.fullmatch(value) is not None
    return is_number(value) and 0 <= value <= (1 if isinstance(value, float) else math.inf)


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


_COUNT = whole(1)
_LENGTH = whole(0).or_null(", or null; pass 0 to train nothing")
_FLAG = Rule(lambda value: isinstance(value, bool), "be true or false")
_PLACE = Rule(
    _is_place, "be a step as an int, a fraction of the training as a float in [0, 1], or epochs as in 2ep"
).or_null(", or null")
_CLIP = Rule(_is_positive, "be greater than 0").or_null("; pass null to clip nothing")
_METRIC = Rule(lambda value: isinstance(value, str) and value.isidentifier(), "be loss, or a metric of the task")

UNTAUGHT, FULL_RANK = Unread("teacher", at_default=True), Unread("lora_rank")


@dataclass
class Train:
    """Training of the dense network (`train`), or fine-tuning after each pruning round (`finetune`)."""

    _target_: str | None = None
    """Training function of your own, package.module.function; null: the built-in loop."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of that function; the built-in loop takes none."""
    epochs: int | None = key(15, _LENGTH)
    """Passes over the training split; pass exactly one of `epochs` and `steps`; 0 trains nothing."""
    steps: int | None = key(None, _LENGTH)
    """Optimizer steps."""
    batch_size: int = key(64, _COUNT)
    """Examples in a training batch."""
    eval_batch_size: int = key(512, _COUNT)
    """Examples in an evaluation batch."""
    drop_last: bool = key(False, _FLAG)
    """Leave out the last batch of an epoch if it is smaller than `batch_size`."""
    accumulate: int = key(1, _COUNT)
    """Batches in one optimizer step; the last step of an epoch takes the remaining batches."""
    optimizer: dict[str, Any] = key({}, Rule(has_target, "have a `_target_`; pass one, as in torch.optim.SGD"))
    """`_target_` and arguments, as in `torch.optim.SGD`; `optimizer@train.optimizer=adam` chooses a ready one."""
    scheduler: dict[str, Any] | None = key(None, OPTIONAL_TARGET)
    """`_target_` and arguments; a null `T_max`, `total_steps` or `total_iters` becomes the number of steps."""
    scheduler_interval: str = key("step", one_of("step", "epoch"))
    """Advance the scheduler after each `step` or each `epoch`; ReduceLROnPlateau advances after each evaluation."""
    loss: Any = key(None, OPTIONAL_TARGET)
    """`_target_` and arguments of a callable (outputs, labels) -> loss; null: the model's loss, else the task's."""
    precision: str = key("fp32", one_of("fp32", "bf16", "fp16"))
    """fp32, or autocast to bf16 or fp16; fp16 scales the loss and needs CUDA."""
    penalty: float = key(0.0, at_least(0, ": lambda of network slimming; pass 1e-4, for example, or 0 for none"))
    """Penalty on the absolute scales of BatchNorm: adds penalty * sign(gamma) to their gradients before clipping."""
    clip_norm: float | None = key(None, _CLIP)
    """Maximum L2 norm of all gradients together."""
    ema: float | None = key(None, within(": the decay of an average; pass 0.999").or_null(", or null for no averages"))
    """Decay of a moving average of the weights, which is evaluated and kept; null keeps the weights themselves."""
    compile: bool = key(False, _FLAG)
    """Compile forward pass and loss of a training step by torch.compile; changes bits, and delays the first step."""
    eval_every: int | None = key(None, _COUNT.or_null())
    """Steps between evaluations on the validation split; null: once an epoch. The last step is always evaluated."""
    select: str = key("best", one_of("best", "last"))
    """Weights that are kept: the `best` on the validation split (the earliest if equal), or the `last`."""
    monitor: str | None = key(None, _METRIC.or_null())
    """Figure for `select` and `patience`: `loss`, or a metric of the task; null: the primary metric."""
    patience: int | None = key(None, _COUNT.or_null())
    """Stop after this many evaluations in a row without a new best; null: train to the end."""
    checkpoint_minutes: float = key(5.0, at_least(0, " minutes; pass 0 to keep none"), unread=Unread())
    """Minimum minutes between checkpoints; 0 keeps none. Not part of a result's key."""
    teacher: str | None = key(None, one_of("dense", "tuned").or_null(", or null"))
    """Only for `finetune`: adds a loss against the outputs of the `dense` network, or of the dense network fine-tuned
    for as many steps as the pruned one (`tuned`), without a teacher; null: no teacher."""
    teacher_weight: float = key(
        0.5,
        Rule(lambda value: is_number(value) and 0 < value <= 1, "lie in (0, 1]: the teacher's part of the loss"),
        unread=UNTAUGHT,
    )
    """Weight of the teacher's loss; the loss of the data has the rest."""
    teacher_temperature: float = key(
        2.0,
        Rule(_is_positive, "be greater than 0; pass 1 to leave outputs as they are"),
        unread=UNTAUGHT,
    )
    """Temperature by which class outputs of both networks are divided."""
    lora_rank: int | None = key(None, _COUNT.or_null("; pass null to train all weights"), unread=FULL_RANK)
    """Only for `finetune`: train low-rank updates of linear layers under the masks, of this rank; null: all weights."""
    lora_alpha: float = key(16.0, Rule(_is_positive, "be greater than 0"), unread=FULL_RANK)
    """Scale of the updates, divided by `lora_rank`."""
    lora_targets: list[str] = key(
        ["*"], Rule(bool, "hold at least one pattern; pass ['*'] for all linear layers"), unread=FULL_RANK
    )
    """Patterns on the names of the weights that get an update, as in `*.q_proj.weight`."""
    depends: list[str] = field(default_factory=list)
    """Files and directories that a custom optimizer, scheduler or loss reads; their contents are in a result's key."""

    @staticmethod
    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield broken rules of `depends`, `options`, the learning rate of a torch optimizer, and the length."""
        for part in ("optimizer", "scheduler", "loss"):
            if isinstance(node := values.get(part), Mapping) and "depends" in node:
                yield f"`{where}.{part}.depends` (={node['depends']}) is not read there; pass `{where}.depends`."
        if values.get("options") and not values.get("_target_"):
            yield (
                f"`{where}.options` (={values['options']}) are for a training function of your own; pass "
                f"`{where}._target_`, or leave them out."
            )
        for name in LOOPS_OWN if values.get("_target_") else ():
            if values.get(name, default := getattr(Train(), name)) != default:
                yield (
                    f"`{where}.{name}` (={values[name]}) is only for the built-in loop; leave it at "
                    f"{canonical_json(default)} for a training function of your own, and pass that function's "
                    f"arguments under `{where}.options`."
                )
        optimizer, epochs, steps = (values.get(name) for name in ("optimizer", "epochs", "steps"))
        rated = isinstance(optimizer, Mapping) and str(optimizer.get("_target_")).startswith("torch.optim.")
        lr = optimizer.get("lr") if rated and optimizer else None
        if lr is not None and not (is_number(lr) and lr >= 0):
            yield f"`{where}.optimizer.lr` (={lr}) must be a number of at least 0; pass 0.001, for example."
        if (epochs is None) == (steps is None):
            given, remedy = "neither", "."
            if epochs is not None:
                given, remedy = "both", f": add `{where}.epochs=null` or `{where}.steps=null` (a preset may set it)."
            yield (
                f"`{where}.epochs` (={epochs}) and `{where}.steps` (={steps}) are {given} given; pass exactly "
                f"one{remedy}"
            )


@dataclass
class Restart:
    """Start of the training in a round after pruning, and the control experiment of the last round."""

    weights: str = key("keep", one_of(*RESTARTS), meaning=f"Weights that a round trains from: {listed(RESTARTS)}.")
    step: Any = key(None, _PLACE)
    """Place in the dense training whose weights and buffers `weights=step` uses."""
    rates: Any = key(None, _PLACE)
    """Place in the dense training from which a round continues by `train`, to its end; null: `step`, or 0 for new
    weights or a network that is not trained yet, else rounds fine-tune by `finetune`."""
    optimizer: str = key("restored", one_of("restored", "fresh"))
    """Optimizer of a round that continues by `train`: its state at that place, masked (`restored`), or `fresh`."""
    control: str = key("none", one_of(*CONTROLS), meaning=f"Control of the last round: {listed(CONTROLS)}.")
