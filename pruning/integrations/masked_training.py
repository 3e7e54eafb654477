"""Shared part of the adaptors: enforce or change masks while optimizers step, and compare them with a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pruning.dynamics.changing_masks import Dynamics
from pruning.holding.parameter import place
from pruning.masks.keeper import MaskKeeper
from pruning.masks.mask_set import MaskSet


class Kept:
    """Model and masks that are enforced while another library trains the model; a dynamics changes them.

    Args:
        model: has every parameter that `masks` name; the masks are applied at once.
        masks: name of a parameter -> tensor of its shape, nonzero where the entry is kept; for example a `MaskSet`.
            A dynamics applies them when the training begins.
        dynamics: changes the masks during the training; None: they stay.
        generator: source of the dynamics' random draws.

    Raises:
        ValueError: there are no masks, or one fits no parameter; the message names it, and nothing is changed.
    """

    def __init__(
        self,
        model: nn.Module,
        masks: Mapping[str, Tensor],
        dynamics: Dynamics | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if not masks:
            raise ValueError(
                "`masks` (={}) must contain at least one mask; prune first and pass MaskSet.collect(model), or pass "
                "MaskSet.load(path)."
            )
        self._masks = MaskSet(masks)
        self._model, self._dynamics, self._generator = model, dynamics, generator
        self._final: MaskSet | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._last: Mapping[str, Any] | None = None
        for name, mask in self._masks.items():
            place(model, name, mask.shape)
        self._keeper = MaskKeeper(model, self._masks if dynamics is None else {})

    @property
    def masks(self) -> MaskSet:
        """The masks as they are now."""
        if self._dynamics is not None and self._dynamics.is_attached:
            return self._dynamics.masks
        return self._final or self._masks

    @property
    def moves(self) -> bool:
        """Whether a dynamics changes the masks."""
        return self._dynamics is not None

    def begin(self, optimizers: Iterable[Optimizer], length: int = 0) -> MaskKeeper:
        """Enforce or change the masks with each step of `optimizers`, including optimizers wrapped by another library.

        Args:
            optimizers: a dynamics takes one.
            length: number of steps of the training, for a dynamics.

        Raises:
            ValueError: a dynamics was given several optimizers, or an unknown number of steps.
        """
        self.end()
        bare = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        if self._dynamics is not None:
            if len(bare) != 1:
                raise ValueError(f"{self._dynamics} takes one optimizer, but the training has {len(bare)}.")
            own = {"length": length, "generator": self._generator, "state": self._loaded}
            self._loaded = None
            self._dynamics.attach(self._model, self._masks, bare[0], **own)  # type: ignore[arg-type]
            return self._keeper
        self._keeper = MaskKeeper(self._model, self._masks)
        for optimizer in bare:
            self._keeper.attach(optimizer)
        return self._keeper

    def end(self, masks: MaskSet | None = None) -> None:
        """Stop enforcing the masks; the model stays plain, with zeros for pruned entries.

        Args:
            masks: masks of the weights that the model has now, if the training has put others back.
        """
        if self._dynamics is not None and self._dynamics.is_attached:
            self._last, self._final = self._dynamics.state(), masks or self._dynamics.masks
            self._dynamics.release()
        self._keeper.release()

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, or the state of the dynamics, as saved in a checkpoint."""
        if self._dynamics is None:
            return {"masks": dict(self._masks)}
        return {"dynamics": self._dynamics.state() if self._dynamics.is_attached else self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that training resumes with the masks of its checkpoint, or continue its dynamics.

        Raises:
            ValueError: the masks of `state` differ.
        """
        if self._dynamics is None:
            self.require_same(MaskSet(state["masks"]))
        elif self._dynamics.is_attached:
            self._dynamics.load_state(state["dynamics"])
        else:
            self._loaded = state["dynamics"]

    def require_same(self, saved: MaskSet) -> None:
        """Raise `ValueError` if `saved`, the masks of a checkpoint, differ from these masks."""
        if saved != self.masks:
            raise ValueError(
                f"`masks` (of sparsity {self.masks.sparsity():.4f}) must equal those of the checkpoint (of sparsity "
                f"{saved.sparsity():.4f}) to resume from it; pass the checkpoint's masks, or load only its weights."
            )


class Keeping:
    """Start of a callback that enforces or changes masks; its library calls `begin` and `end` of `_kept`."""

    def __init__(
        self,
        model: nn.Module,
        masks: Mapping[str, Tensor],
        dynamics: Dynamics | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._kept = Kept(model, masks, dynamics, generator)

    @property
    def masks(self) -> MaskSet:
        """The masks as they are now."""
        return self._kept.masks
