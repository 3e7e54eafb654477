"""Shared part of the adaptors: enforce masks while optimizers step, and compare them with a checkpoint's masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from pruning.holding.keeper import MaskKeeper
from pruning.masks.mask_set import MaskSet


class Kept:
    """Model and masks that are enforced while another library trains the model.

    Args:
        model: has every parameter that `masks` name; the masks are applied at once.
        masks: name of a parameter -> tensor of its shape, nonzero where the entry is kept; for example a `MaskSet`.

    Raises:
        ValueError: there are no masks, or one fits no parameter; the message names it, and nothing is changed.
    """

    def __init__(self, model: nn.Module, masks: Mapping[str, Tensor]) -> None:
        if not masks:
            raise ValueError(
                "`masks` (={}) must contain at least one mask; prune first and pass MaskSet.collect(model), or pass "
                "MaskSet.load(path)."
            )
        self.masks = MaskSet(masks)
        self._model = model
        self._keeper = MaskKeeper(model, self.masks)

    def begin(self, optimizers: Iterable[Optimizer]) -> MaskKeeper:
        """Enforce the masks after each step of `optimizers`, including optimizers wrapped by another library."""
        self.end()
        self._keeper = MaskKeeper(self._model, self.masks)
        for optimizer in optimizers:
            self._keeper.attach(getattr(optimizer, "optimizer", optimizer))
        return self._keeper

    def end(self) -> None:
        """Stop enforcing the masks; the model stays plain, with zeros for pruned entries."""
        self._keeper.release()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the masks as saved in a checkpoint."""
        return {"masks": dict(self.masks)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Check that training resumes with the masks of its checkpoint.

        Raises:
            ValueError: the masks of `state` differ.
        """
        self.require_same(MaskSet(state["masks"]))

    def require_same(self, saved: MaskSet) -> None:
        """Raise `ValueError` if `saved`, the masks of a checkpoint, differ from these masks."""
        if saved != self.masks:
            raise ValueError(
                f"`masks` (of sparsity {self.masks.sparsity():.4f}) must equal those of the checkpoint (of sparsity "
                f"{saved.sparsity():.4f}) to resume from it; pass the checkpoint's masks, or load only its weights."
            )
