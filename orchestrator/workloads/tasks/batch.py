"""Batches of any form: a tensor, a tuple that ends with its labels, a dict (Hugging Face), or an object.

In a dict or an object, the labels have one of the names in `LABELS`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.core.errors import OrchestratorError

LABELS = ("labels", "label", "targets", "target", "y")
LISTED = 3
"""Parts of a sequence that a description lists."""
_OUTPUTS = ("logits", "out", "predictions")


class BatchError(OrchestratorError):
    """Batch, or output of a network, that a task cannot use."""


def moved(batch: Any, device: torch.device) -> Any:
    """Return `batch` with all its tensors on `device`, at any depth; other values are unchanged."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **{name: moved(value, device) for name, value in vars(batch).items()})
    return batch.to(device) if hasattr(batch, "to") else batch


def transformed(example: Any, transform: Callable[[Any], Any] | None) -> Any:
    """Return `example` after `transform`, which gets the inputs of a tuple or list, else the whole example."""
    if transform is None:
        return example
    if isinstance(example, list | tuple):
        return (transform(example[0]), *example[1:])
    return transform(example)


def size(batch: Any) -> int:
    """Return the number of examples in `batch`: the length of its first tensor."""
    first = next(tensors(batch), None)
    if first is None or first.ndim == 0:
        raise BatchError(f"a batch of `data` must hold a tensor whose first dimension is the batch, not {kind(batch)}.")
    return len(first)


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of `batch`, inputs before labels."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for name in sorted(batch, key=lambda name: name in LABELS):
            yield from tensors(batch[name])
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors(value)
    elif hasattr(batch, "__dict__"):
        yield from tensors(vars(batch))


def labels_of(batch: Any) -> Tensor:
    """Return the labels of `batch`: the last of a tuple, or the entry with a name in `LABELS`; raise if none."""
    found = given_labels(batch)
    if found is None:
        boxes = " For images with boxes pass task=detection." if targets_of(batch) else ""
        raise BatchError(
            f"a batch of `data` must hold a tensor of labels, but {kind(batch)} has none; return (inputs, labels), or "
            f"a dict with labels under one of the names {', '.join(LABELS)}.{boxes}"
        )
    return found


def targets_of(batch: Any) -> Sequence[Mapping[str, Tensor]]:
    """Return the targets of a batch of images with boxes, see `Detection`; empty for another batch."""
    held = batch[1] if isinstance(batch, list | tuple) and len(batch) == 2 else ()
    known = isinstance(held, list | tuple) and all(isinstance(t, Mapping) and {"boxes", "labels"} <= {*t} for t in held)
    return held if known else ()


def given_labels(batch: Any) -> Tensor | None:
    """Return the labels of `batch` as `labels_of` does; None if it has none."""
    if isinstance(batch, list | tuple) and len(batch) > 1:
        found = batch[-1]
    else:
        held = batch if isinstance(batch, Mapping) else {n: getattr(batch, n) for n in LABELS if hasattr(batch, n)}
        found = next((held[name] for name in LABELS if name in held), None)
    return found if isinstance(found, Tensor) else None


def arguments(model: nn.Module, batch: Any, *, labels: bool = True) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments to call `model` with for `batch`: (positional, by name).

    From a tuple, all but its labels go by position. From a dict, the entries that `forward` takes go by name, and all
    entries if it also has `**kwargs`; if `forward` names none of them, all but the labels go by position. `labels` says
    whether a dict's labels may be passed, so that a model can compute its own loss.
    """
    if isinstance(batch, list | tuple):
        return tuple(batch[:-1] if len(batch) > 1 else batch), {}
    if isinstance(batch, Mapping):
        takes, any_too = _takes(type(model).forward)
        asked = [name for name in batch if name in takes and name not in LABELS]
        if asked or (any_too and not takes):
            return (), {n: v for n, v in batch.items() if (any_too or n in takes) and (labels or n not in LABELS)}
        return tuple(value for name, value in batch.items() if name not in LABELS), {}
    return (batch,), {}


@cache
def _takes(forward: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return the names of the parameters of `forward`, and whether it has `**kwargs`."""
    parameters = inspect.signature(forward).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
    return frozenset(named), any(p.kind == p.VAR_KEYWORD for p in parameters)


def answer_of(model: nn.Module, batch: Any, *, labels: bool = True) -> Any:
    """Return the result of `model` for `batch`."""
    given, named = arguments(model, batch, labels=labels)
    return model(*given, **named)


def outputs_of(answer: Any) -> Tensor:
    """Return the outputs in a model's result: the tensor itself, or `logits` of an object or dict (transformers).

    The boxes of a detector of transformers follow its logits in the last dimension. A pair of a tensor and a dict is
    that of a detector of ultralytics.
    """
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        answer = answer[0]
    if isinstance(answer, Tensor):
        return answer
    if isinstance(boxes := getattr(answer, "pred_boxes", None), Tensor):
        return torch.cat([answer.logits, boxes], -1)
    found = (answer.get(name) if isinstance(answer, Mapping) else getattr(answer, name, None) for name in _OUTPUTS)
    for outputs in found:
        if isinstance(outputs, Tensor):
            return outputs
    raise BatchError(
        f"`model` must return a tensor of outputs, such as logits of shape (batch, classes), or an object or dict "
        f"with `logits`, not {type(answer).__name__}; wrap the model in a module that does."
    )


def own_loss(answer: Any) -> Tensor | None:
    """Return the loss that a model has computed itself; None if it has not."""
    if isinstance(answer, Tensor):
        return None
    found = answer.get("loss") if isinstance(answer, Mapping) else getattr(answer, "loss", None)
    return found if isinstance(found, Tensor) else None


def kind(value: Any) -> str:
    """Describe a batch, or a part of one, by types, shapes and dtypes."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {kind(part)}" for name, part in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        more = [f"{len(value) - LISTED} more"] if len(value) > LISTED else []
        return "(" + ", ".join([*map(kind, value[:LISTED]), *more]) + ")"
    return type(value).__name__


def named_kind(value: Any) -> str:
    """Describe a value in a sentence: its type, and the shape of a tensor or array."""
    return f"a {type(value).__name__}" + (f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else "")
