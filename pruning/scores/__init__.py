"""Published importance scores of weight entries or layer units, as pure functions of a model.

    scores = pruning.scores.snip(model, batches, loss)          # {"conv1.weight": tensor, ...}

The lowest score is pruned first; signed scores keep their sign. A score changes nothing: parameters, buffers,
gradients, modes and global generators keep their exact values. Dropout is off. `SCORES` lists what each score needs.

Every score is called as `score(model, batches, loss, *, size, generator, masks, parameters)`, plus its own keywords:

- `model`: a dense or pruned network. Scores use its values v = m w, with m the masks that this package or torch holds
  in the model, and `masks`.
- `batches`: an iterable of the batches that `loss` takes; None for a score that reads no data.
- `loss`: (model, batch) -> mean loss of the batch, computed by the model passed to it; None if the score needs no loss.
- `size`: (batch) -> its weight in means over all batches; None takes the length of the batch's first tensor.
- `generator`: the generator of random scores.
- `masks`: name -> tensor (a `MaskSet`, for example), nonzero where an entry is kept; applied on top of the masks that
  the model already holds.
- `parameters`: names of the parameters to score; None takes the weights of linear and convolutional layers and of
  attention projections, each tied weight once.
- `batch_norm`, for some scores: "train" normalises by the statistics of each batch, for a network at initialisation;
  a batch of 1 example is then refused, and so are several batches, except by `taylor`. "eval" normalises by the running
  statistics, for a trained network.

Scores return qualified name -> tensor of the parameter's shape, float64 if data or sums enter the score. They raise
`ValueError` for missing data, for names that are not in the model, for masks of another shape, and for an option that
breaks its rule in `SCORES`.
"""

from __future__ import annotations

from collections.abc import Callable

from pruning.catalogue.scores import SCORES
from pruning.scores.calls import Call, public_call
from pruning.scores.curvature import FisherMatrix
from pruning.scores.curvature import fisher_matrix as _fisher_matrix

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
