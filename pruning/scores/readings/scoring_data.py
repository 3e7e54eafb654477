"""Scoring data: weighted batches and means over them in float64, and a network's losses, gradients and outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pruning.holding.parameter import hooked
from pruning.refused import RefusedType
from pruning.scores.readings.network import BatchNormMode, Masks, Network, Weight, network, weights_of

Batches: TypeAlias = Iterable[Any] | None
Loss: TypeAlias = Callable[[nn.Module, Any], Tensor] | None
Size: TypeAlias = Callable[[Any], float] | None
Make: TypeAlias = Callable[[], Mapping[str, Tensor]]
Remember: TypeAlias = Callable[[Sequence[str], Make], Mapping[str, Tensor]] | None


@dataclass(frozen=True)
class ScoringInput:
    """Arguments that all scores and repairs share: the network and the scoring data; see `pruning.scores`."""

    model: nn.Module
    batches: Batches = None
    loss: Loss = None
    size: Size = None
    masks: Masks | None = None
    generator: torch.Generator | None = None
    parameters: Iterable[str] | None = None
    remember: Remember = None
    noted: dict[str, Any] = field(default_factory=dict)
    """Details that scores add to a plan: `tokens` of each expert, and `limits`, a sentence on experts without any."""

    def __post_init__(self) -> None:
        """Refuse a weight of batches that is no function."""
        if self.size is not None and not callable(cast(object, self.size)):
            raise RefusedType("size", self.size).because(
                "must be a function of a batch, its weight; the inputs of a block are a field of the unit: type "
                "unit={'kind': 'block', 'size': 8}."
            )

    def weights(self) -> dict[str, Weight]:
        """Return name -> weight to score; see `weights_of`."""
        return weights_of(self.model, self.masks, self.parameters)

    def network(self, batch_norm: BatchNormMode = "eval") -> AbstractContextManager[Network]:
        """Copy the network for a score; see `pruning.scores.readings.network.network`."""
        return network(self.model, self.masks, self.parameters, batch_norm=batch_norm)

    def remembered(self, key: Sequence[str], make: Make) -> Mapping[str, Tensor]:
        """Return name -> statistics that `make` computes, or an equal result from `remember`; see `pruning.plan`."""
        return make() if self.remember is None else self.remember(key, make)


def weighted_batches(score: str, batches: Batches, size: Size = None) -> Iterator[tuple[Any, float]]:
    """Yield (batch, weight) for each batch of a weight above 0.

    Args:
        score: name of the score, for the error.
        batches: any iterable; read once.
        size: (batch) -> its weight; None takes the length of the batch's first tensor.

    Raises:
        ValueError: there is no batch of a weight above 0.
    """
    empty = True
    for batch in () if batches is None else batches:
        weight = float(example_count(batch) if size is None else size(batch))
        if weight > 0:
            empty = False
            yield batch, weight
    if empty:
        given = "None" if batches is None else "empty"
        raise ValueError(
            f"`batches` (={given}) must hold scoring data, which `{score}` reads; pass batches of the training split."
        )


def checked_batches(score: str, net: Network, batches: Batches, *, several: bool = False) -> Batches:
    """Return `batches`, checked as they are read if BatchNorm normalises by the statistics of each batch.

    Args:
        score: name of the score, for the error.
        net: the network; with BatchNorm in training mode, there must be one batch of two examples or more.
        batches: the batches to check.
        several: allow several batches.
    """
    if batches is None or not any(isinstance(m, _BatchNorm) and m.training for m in net.model.modules()):
        return batches
    return _checked_batches(score, batches, several)


def _checked_batches(score: str, batches: Iterable[Any], several: bool) -> Iterator[Any]:
    for index, batch in enumerate(batches):
        first = next(tensors(batch), None)
        if first is not None and first.dim() and len(first) == 1:
            raise ValueError(
                f"`batches` (which hold a batch of 1 example) must hold 2 examples or more in each batch for `{score}` "
                "with batch_norm='train', which normalises by a batch's own statistics; pass larger batches, or "
                "batch_norm='eval'."
            )
        if index and not several:
            raise ValueError(
                f"`batches` (more than one) must be one batch of all examples for `{score}` with batch_norm='train', "
                "which normalises by a batch's own statistics; join the batches, or pass batch_norm='eval'."
            )
        yield batch


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch: a tensor, or a tuple, list, dict or object that holds tensors."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from (tensor for value in batch.values() for tensor in tensors(value))
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        yield from (tensor for value in batch for tensor in tensors(value))
    elif hasattr(batch, "__dict__"):
        yield from tensors(vars(batch))


def example_count(batch: Any) -> int:
    """Return the number of examples in a batch, the length of its first tensor."""
    first = next(tensors(batch), None)
    if first is None or not first.dim():
        raise ValueError(
            f"`batches` (of {type(batch).__name__}) must hold tensors whose first dimension counts the examples; "
            "otherwise pass `size`, a function (batch) -> weight."
        )
    return len(first)


def call_network(model: nn.Module, loss: Loss, batch: Any) -> None:
    """Call a network for what its layers compute: by `loss`, or with a batch's first tensor, or a dict's items."""
    if loss is not None:
        loss(model, batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    else:
        model(next(tensors(batch)))


def without_padding(batch: Any, values: Tensor) -> Tensor:
    """Return the values of tokens, (batch, tokens, width), without those where an `attention_mask` of the batch is 0.

    Args:
        batch: as the loss gets it; a mapping may hold a mask of shape (batch, tokens).
        values: returned unchanged if there is no padding, or the mask has another shape.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape != values.shape[:-1] or bool(mask.all()):
        return values
    return values[mask.to(values.device) != 0]


def loss_of(score: str, loss: Loss, model: nn.Module, batch: Any, sources: Sequence[Tensor] = ()) -> Tensor:
    """Return `loss(model, batch)`, the batch's mean loss; refuse a value without a gradient in any of `sources`.

    `sources` are leaves of the graph, and may be filled during the call of `loss`; if empty, the parameters of `model`.
    """
    refuse_inference_mode(score)
    if loss is None:
        raise ValueError(
            f"`loss` (=None) must be a function (model, batch) -> mean loss, because `{score}` takes its gradients."
        )
    value = loss(model, batch)
    one = isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad
    reached = leaf_uses(value) if one else {}
    if not any(id(leaf) in reached for leaf in (sources or model.parameters())):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"`loss` (which returned {what}) must return the batch's mean loss as one number that depends on the model "
            "passed to it; compute it from that model's outputs, without `detach` or `no_grad`."
        )
    return value.reshape(())


def refuse_inference_mode(score: str) -> None:
    """Raise ValueError in `torch.inference_mode`, where no gradients are computed."""
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"`{score}` takes gradients, which `torch.inference_mode` rules out; call it outside that mode."
        )


def leaf_uses(result: Tensor) -> Counter[int]:
    """Return id of a leaf -> the number of its uses in the autograd graph of `result`."""
    found: Counter[int] = Counter()
    seen, pending = {result.grad_fn}, [result.grad_fn]
    while pending:
        node = pending.pop()
        for following, _ in () if node is None else node.next_functions:
            if following is not None and hasattr(following, "variable"):
                found[id(following.variable)] += 1
            elif following not in seen:
                seen.add(following)
                pending.append(following)
    return found


gradients = partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)
"""(result, parameters, cotangent, **options) -> gradients in all parameters; 0 for those that `result` does not use."""


def refuse_nan(score: str, given: Mapping[str, Tensor], what: str) -> None:
    """Raise ValueError for the first tensor of `given` with NaN or infinity, which no decomposition accepts."""
    if bad := [name for name, values in given.items() if not values.detach().sum(dtype=torch.float64).isfinite()]:
        raise ValueError(f"`{bad[0]}` has {what} of NaN or infinity, which must be finite for `{score}`; repair them.")


def at_least_float32(values: Tensor) -> Tensor:
    """Convert narrower dtypes to float32: in 16 bits, products of small values would be 0."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def mean_over_batches(
    score: str, batches: Batches, size: Size, of_batch: Callable[[Any], Sequence[Tensor]]
) -> list[Tensor]:
    """Return the weighted means of `of_batch` over all batches, in tensors that the caller may change.

    The means over several batches are float64; the values of a single batch keep their dtype.
    """
    means: list[Tensor] = []
    weights = 0.0
    for batch, weight in weighted_batches(score, batches, size):
        weights += weight
        values = [value.detach() for value in of_batch(batch)]
        if means:
            means = [mean.to(torch.float64) for mean in means]
            for mean, value in zip(means, values, strict=True):
                mean.lerp_(value.to(torch.float64), weight / weights)
        else:
            places = Counter(value.data_ptr() for value in values)  # gradients may share memory, or be expanded
            means = [v if v.is_contiguous() and places[v.data_ptr()] == 1 else v.clone() for v in values]
    return means


def mean_loss(score: str, given: ScoringInput) -> Callable[[nn.Module], float]:
    """Return a function of a network: its mean loss over all batches.

    Raises:
        ValueError: there is no loss, or no batch of a weight above 0.
    """
    loss = given.loss
    if loss is None:
        raise ValueError(f"`loss` (=None) must be a function (model, batch) -> mean loss for `{score}`; pass one.")
    batches = list(weighted_batches(score, given.batches, given.size))
    total = sum(weight for _, weight in batches)
    return lambda model: sum(weight * float(loss(model, batch)) for batch, weight in batches) / total


def mean_gradient(score: str, net: Network, given: ScoringInput) -> dict[str, Tensor]:
    """Return name -> gradient of the mean loss over all batches, also at pruned entries; see `mean_over_batches`."""
    parameters = list(net.parameters.values())
    means = mean_over_batches(
        score,
        checked_batches(score, net, given.batches),
        given.size,
        lambda batch: gradients(loss_of(score, given.loss, net.model, batch), parameters),
    )
    return dict(zip(net.parameters, means, strict=True))


@contextmanager
def outputs_through(score: str, model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make `model` return `change(outputs)`, where the outputs are a tensor, or the tensor `logits` in what it returns.

    Raises:
        ValueError: `model` returns neither, or returns a loss of its own; or `model` was not called in the context.
    """
    called = False

    def through(_module: nn.Module, _given: object, answer: Any) -> Any:
        nonlocal called
        called = True
        if isinstance(answer, Tensor):
            return change(answer)
        held = answer if isinstance(answer, Mapping) else getattr(answer, "__dict__", {})
        if not isinstance(held.get("logits"), Tensor) or held.get("loss") is not None:
            raise ValueError(
                f"`model` (which returned {type(answer).__name__}) must return a tensor, or an object with a tensor "
                f"`logits` and no `loss`, for `{score}`; wrap it in a module that does."
            )
        if isinstance(answer, Mapping):
            cast(dict[str, Any], answer)["logits"] = change(held["logits"])
        else:
            answer.logits = change(held["logits"])
        return answer

    with hooked([model.register_forward_hook(through)]):
        yield
    if not called:
        raise ValueError(
            f"`loss` must call the model that is passed to it, because `{score}` reads the model's outputs; write "
            "`lambda model, batch: cross_entropy(model(batch[0]), batch[1])`, for example."
        )
