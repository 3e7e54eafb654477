"""How a network is trained, and what a round trains on from: plain dataclasses, no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.catalogue.tasks import OPTIONAL_TARGET, has_target
from orchestrator.config.key_rules import key
from orchestrator.core.plain_data import canonical_json
from pruning.catalogue.value_rules import Rule, at_least, is_number, one_of, whole, within

LOOPS_OWN = ("accumulate", "penalty", "ema", "compile", "patience")
"""Keys of a training that the built-in loop alone goes by."""
_EPOCHS = re.compile(r"(\d+(?:\.\d+)?)ep")
"""A place in a training by its epochs, as in 2ep."""


def _is_place(value: Any) -> bool:
    if isinstance(value, str):
        return _EPOCHS.fullmatch(value) is not None
    return is_number(value) and 0 <= value <= (1 if isinstance(value, float) else math.inf)


_COUNT = whole(1)
_LENGTH = whole(0).or_null(", or null; pass 0 to train nothing")
_FLAG = Rule(lambda value: isinstance(value, bool), "be true or false")
_PLACE = Rule(
    _is_place, "be a step as an int, a fraction of the training as a float in [0, 1], or epochs as in 2ep"
).or_null(", or null")
_CLIP = Rule(lambda value: is_number(value) and value > 0, "be greater than 0").or_null("; pass null to clip nothing")
_METRIC = Rule(lambda value: isinstance(value, str) and value.isidentifier(), "be loss, or a metric of the task")


@dataclass
class Train:
    """How a network is trained (`train`) or fine-tuned after each pruning round (`finetune`)."""

    _target_: str | None = None
    """A training function of the user's own, package.module.function; null is the built-in loop."""
    options: dict[str, Any] = field(default_factory=dict)
    """What it takes beside the keys here; the built-in loop takes none."""
    epochs: int | None = key(15, _LENGTH)
    """Passes over the training split; exactly one of `epochs` and `steps` is given, 0 trains nothing."""
    steps: int | None = key(None, _LENGTH)
    """Optimizer steps."""
    batch_size: int = key(64, _COUNT)
    """Examples of a training batch."""
    eval_batch_size: int = key(512, _COUNT)
    """Examples of a batch that is evaluated."""
    drop_last: bool = key(False, _FLAG)
    """Leave out the last batch of an epoch when it is smaller than `batch_size`."""
    accumulate: int = key(1, _COUNT)
    """Batches whose gradients make one optimizer step; the last step of an epoch takes what is left."""
    optimizer: dict[str, Any] = key({}, Rule(has_target, "have a `_target_`; pass one, as in torch.optim.SGD"))
    """`_target_` and arguments, as in `torch.optim.SGD`; `optimizer@train.optimizer=adam` picks a ready one."""
    scheduler: dict[str, Any] | None = key(None, OPTIONAL_TARGET)
    """`_target_` and arguments; a `T_max`, `total_steps` or `total_iters` that is null becomes the number of steps."""
    scheduler_interval: str = key("step", one_of("step", "epoch"))
    """The scheduler advances after each `step` or each `epoch`; ReduceLROnPlateau after each evaluation."""
    loss: Any = key(None, OPTIONAL_TARGET)
    """`_target_` and arguments of a callable (outputs, labels) -> loss; null is the model's own, else the task's."""
    precision: str = key("fp32", one_of("fp32", "bf16", "fp16"))
    """fp32, or autocast to bf16 or fp16; fp16 scales the loss and needs CUDA."""
    penalty: float = key(0.0, at_least(0, ": lambda of network slimming; pass 1e-4, say, or 0 for none"))
    """Of the absolute scales of BatchNorm: penalty sign(gamma) is added to their gradients, before they are clipped."""
    clip_norm: float | None = key(None, _CLIP)
    """Largest L2 norm of all gradients taken as one vector."""
    ema: float | None = key(None, within(": the decay of an average; pass 0.999").or_null(", or null for no averages"))
    """Decay of a moving average of the weights over the steps, which is evaluated and kept; null keeps the weights."""
    compile: bool = key(False, _FLAG)
    """Compile forward and loss of the training step by torch.compile: other bits, and some time before the first."""
    eval_every: int | None = key(None, _COUNT.or_null())
    """Steps between two evaluations on the validation split; null is once an epoch. The last step is always one."""
    select: str = key("best", one_of("best", "last"))
    """Which weights are kept: the `best` on the validation split (the earliest of equals), or the `last`."""
    monitor: str | None = key(None, _METRIC.or_null())
    """What best means, for `select` and `patience`: `loss`, or a metric of the task; null is its primary one."""
    patience: int | None = key(None, _COUNT.or_null())
    """Stop after this many evaluations in a row without a new best; null trains to the end."""
    checkpoint_minutes: float = key(5.0, at_least(0, " minutes; pass 0 to keep none"))
    """Minutes between two checkpoints, at least; 0 keeps none. No part of what identifies a result."""
    teacher: str | None = key(None, one_of("dense").or_null(", or null"))
    """Of `finetune`: `dense` has the loss be in part that of the outputs of the dense network; null: of the data."""
    teacher_weight: float = key(
        0.5, Rule(lambda value: is_number(value) and 0 < value <= 1, "lie in (0, 1]: the teacher's part of the loss")
    )
    """The teacher's part of the loss; the rest is that of the data."""
    teacher_temperature: float = key(
        2.0, Rule(lambda value: is_number(value) and value > 0, "be greater than 0; pass 1 to leave outputs be")
    )
    """Classes' outputs of both networks are divided by it."""
    depends: list[str] = field(default_factory=list)
    """Files and directories that an own optimizer, scheduler or loss reads: their contents are part of the results."""

    @staticmethod
    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is wrong with the learning rate of one of torch's optimizers, and with the length."""
        for part in ("optimizer", "scheduler", "loss"):
            if isinstance(node := values.get(part), Mapping) and "depends" in node:
                yield f"`{where}.{part}.depends` (={node['depends']}) is not read there; give it as `{where}.depends`."
        if values.get("options") and not values.get("_target_"):
            yield (
                f"`{where}.options` (={values['options']}) are for a training function of your own; pass "
                f"`{where}._target_`, or leave them out."
            )
        for name in LOOPS_OWN if values.get("_target_") else ():
            if values.get(name, default := getattr(Train(), name)) != default:
                yield (
                    f"`{where}.{name}` (={values[name]}) is what the built-in loop goes by; leave it at "
                    f"{canonical_json(default)} for a training function of your own, and give what that is to know "
                    f"under `{where}.options`."
                )
        optimizer, epochs, steps = (values.get(name) for name in ("optimizer", "epochs", "steps"))
        rated = isinstance(optimizer, Mapping) and str(optimizer.get("_target_")).startswith("torch.optim.")
        lr = optimizer.get("lr") if rated and optimizer else None
        if lr is not None and not (is_number(lr) and lr >= 0):
            yield f"`{where}.optimizer.lr` (={lr}) must be a number of at least 0: the learning rate; pass 0.001, say."
        if (epochs is None) == (steps is None):
            given, remedy = ("neither", ".") if epochs is None else ("both", f": add `{where}.epochs=null`.")
            yield (
                f"`{where}.epochs` (={epochs}) and `{where}.steps` (={steps}) are {given} given; pass exactly "
                f"one{remedy}"
            )


@dataclass
class Restart:
    """What a round trains on from once its masks are chosen, and the control that the last round may be."""

    weights: str = key("keep", one_of("keep", "step", "reinit"))
    """`keep` what was pruned, go back to a `step` of the dense training, or draw them anew (`reinit`)."""
    step: Any = key(None, _PLACE)
    """Whose weights and buffers `step` means."""
    rates: Any = key(None, _PLACE)
    """From which step of the dense training a round trains on by `train`, to its end; null: `step`, 0 for weights that
    are drawn anew or a network that was never trained, else none of it, and rounds fine-tune by `finetune`."""
    optimizer: str = key("restored", one_of("restored", "fresh"))
    """Where a round trains on by `train`: the optimizer's state is that of the step, under the masks, or none."""
    control: str = key("none", one_of("none", "shuffle", "reinit", "invert", "small"))
    """Of the last round: masks shuffled in each tensor, weights drawn anew under them, the scores inverted, or the
    small dense network that the masks leave, drawn anew."""
