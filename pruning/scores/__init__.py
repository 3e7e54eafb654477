"""How important each entry of a weight, or each unit of a layer, is: published scores as pure functions of a model.

    scores = pruning.scores.snip(model, batches, loss)          # {"conv1.weight": tensor, ...}

The lowest score is pruned first; signed scores rank as they are. A score changes nothing: parameters, buffers,
gradients, modes and global generators stay the same bytes. Dropout is off. `SCORES` says what each score needs.

All take `score(model, batches, loss, *, size, generator, masks, parameters)`, and keywords of their own:

- `model`: computes with v = m w, where it is pruned: held so by this package or by torch, or plain and under `masks`.
- `batches`: an iterable of whatever `loss` takes; None where a score reads no data.
- `loss`: (model, batch) -> the batch's mean loss, of the model that it is given; None where it is unused.
- `size`: (batch) -> its weight in means over all batches; None takes the length of the batch's first tensor.
- `generator`: what random scores are drawn from.
- `masks`: name -> tensor, nonzero where an entry is kept, on top of what the model holds pruned; a `MaskSet`, say.
- `parameters`: the names of what is scored; None takes weights of linear and convolutional layers and of attention's
  projections, a tied one once.
- `batch_norm`, where a score has it: "train" normalises by each batch's own statistics, for a network at initialisation
  (where several batches are refused but by `taylor`, and one of 1 example); "eval" by the running ones, for a
  trained network.

They return qualified name -> tensor of the parameter's shape, float64 where data or sums are in it, and raise
`ValueError` for missing data, for names that are not in the model, for masks of another shape, and for an option that
breaks its rule in `SCORES`.
"""

from __future__ import annotations

from collections.abc import Callable

from pruning.catalogue.scores import SCORES
from pruning.scores.calls import Call, public_call
from pruning.scores.readings.fisher_matrix import FisherMatrix
from pruning.scores.readings.fisher_matrix import fisher_matrix as _fisher_matrix

fisher_matrix: Callable[..., FisherMatrix] = public_call(_fisher_matrix)

__all__ = ["SCORES", "FisherMatrix", "fisher_matrix"]
__all__ += list(SCORES)


def __getattr__(name: str) -> Call:
    if name not in SCORES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    score: Call = public_call(SCORES[name].load(), SCORES[name])
    globals()[name] = score
    return score


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
