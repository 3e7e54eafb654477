"""What every adaptor does: hold a model under masks while optimizers step, and know masks of a checkpoint again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from pruning.holding.keeper import MaskKeeper
from pruning.masks.mask_set import MaskSet


class Kept:
    """A model and the masks that a training by another library keeps it under.

    Args:
        model: has every parameter that `masks` name; pruned by them at once.
        masks: name of a parameter -> tensor of its shape, nonzero where the entry is kept; a `MaskSet`, say.

    Raises:
        ValueError: there are no masks, or one fits no parameter; it is named, and nothing is changed.
    """

    def __init__(self, model: nn.Module, masks: Mapping[str, Tensor]) -> None:
        if not masks:
            raise ValueError(
                "`masks` (={}) must name a parameter: there is nothing to keep; prune first and pass "
                "MaskSet.collect(model), or what MaskSet.load reads."
            )
        self.masks = MaskSet(masks)
        self._model = model
        self._keeper = MaskKeeper(model, self.masks)

    def begin(self, optimizers: Iterable[Optimizer]) -> MaskKeeper:
        """Keep the masks from now on, after each step of `optimizers`, those that another library has wrapped too."""
        self.end()
        self._keeper = MaskKeeper(self._model, self.masks)
        for optimizer in optimizers:
            self._keeper.attach(getattr(optimizer, "optimizer", optimizer))
        return self._keeper

    def end(self) -> None:
        """Leave the model plain, with zeros for what is pruned."""
        self._keeper.release()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the masks as a checkpoint holds them."""
        return {"masks": dict(self.masks)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Make sure that a training goes on under the masks that its checkpoint was written under.

        Raises:
            ValueError: the masks of `state` are others.
        """
        self.require_same(MaskSet(state["masks"]))

    def require_same(self, saved: MaskSet) -> None:
        """Raise `ValueError` if `saved`, the masks of a checkpoint, are not these."""
        if saved != self.masks:
            raise ValueError(
                f"`masks` (of sparsity {self.masks.sparsity():.4f}) must be those of the checkpoint (of sparsity "
                f"{saved.sparsity():.4f}) to go on from it; pass its masks, or start from its weights alone."
            )
