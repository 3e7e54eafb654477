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
`ValueError` for missing data, for names that are not in the model and for masks of another shape.
"""

from pruning.scores.channels import bn_scale, fpgm
from pruning.scores.curvature import fisher, obd, obs
from pruning.scores.fisher_matrix import FisherMatrix, fisher_matrix
from pruning.scores.flow import synflow
from pruning.scores.gradients import gradient, grasp, snip
from pruning.scores.inputs import wanda
from pruning.scores.table import SCORES, Score
from pruning.scores.taylor import taylor
from pruning.scores.weights import lamp, magnitude, random

__all__ = [
    "SCORES",
    "FisherMatrix",
    "Score",
    "bn_scale",
    "fisher",
    "fisher_matrix",
    "fpgm",
    "gradient",
    "grasp",
    "lamp",
    "magnitude",
    "obd",
    "obs",
    "random",
    "snip",
    "synflow",
    "taylor",
    "wanda",
]
