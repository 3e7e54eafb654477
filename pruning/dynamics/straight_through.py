"""N:M masks of the largest weights, chosen anew in every step, with dense updates: STE and SR-STE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pruning.choices.axes import Scope
from pruning.dynamics.changing_masks import Dynamics
from pruning.holding.masking import mask_
from pruning.selection.selection_groups import groups_of
from pruning.selection.smallest import best_of_pools


class StraightThrough(Dynamics):
    """Train all weights, but compute with the largest `n` of each `m` consecutive inputs.

    With the mask M of the n largest |w| in each window, in each step

        gradient = dL/dw at M w, for all entries
        w <- optimizer's step along gradient + decay (1 - M) w

    Between two steps the network holds M w, so that it is evaluated, averaged and saved as it computes. The other
    weights are in the state of the dynamics; after `release` the network goes on without them. The masks given to
    `attach` say which parameters are pruned; the first masks are those of the weights.

    Args:
        n: number of entries that a window keeps.
        m: number of entries of a window; must divide the input dimension.
        decay: pulls weights that are not kept to 0, so that masks settle. 0 is STE.

    Source: Zhou et al. 2021, arXiv 2102.04010; STE: Bengio et al. 2013, arXiv 1308.3432.
    """

    enforces_itself = True
    changes_each_step = True

    def __init__(self, n: int = 2, m: int = 4, decay: float = 2e-4) -> None:
        self.n, self.m, self.decay = n, m, decay

    @property
    def is_at_target(self) -> bool:
        """Return True: each step keeps `n` of `m`."""
        return True

    def begin(self) -> None:
        """Keep the largest weights of each window, and put the others aside."""
        self.aside: dict[str, Tensor] = {}
        self._choose()

    def wants_dense(self) -> bool:
        """Return True: each step moves all weights."""
        return True

    def before_step(self) -> bool:
        """Put all weights back, and add the decay of those that are not kept to their gradients."""
        for name, aside in self.aside.items():
            parameter = self.parameter(name)
            mask_(parameter, self.kept[name])  # a step that failed may have put them back already
            parameter.detach().add_(aside)
            if parameter.grad is not None and self.decay:
                parameter.grad.add_(aside, alpha=self.decay * self.direction(parameter))
        return False

    def after_step(self) -> None:
        """Choose the masks anew."""
        self._choose()

    def _choose(self) -> None:
        """Keep the largest weights of each window in the network, and put the others aside."""
        masks = {}
        for layout in groups_of(self._shapes, scope=Scope("window", n=self.n, m=self.m)):
            weight = self.parameter(layout.name).detach()
            pools = layout.by_unit(weight.abs()).view(-1, layout.pool)
            best = best_of_pools(pools, pools.new_ones(()).bool().expand(pools.shape), self.n)
            masks[layout.name] = kept = layout.by_entry(best.view(-1))
            self.aside[layout.name] = weight.masked_fill(kept, 0)
        self.kept |= masks
        for name, kept in masks.items():
            mask_(self.parameter(name), kept)
        self.record()

    def own_state(self) -> dict[str, Any]:
        """Return the weights that are not in the network."""
        return {name: aside.clone() for name, aside in self.aside.items()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore the weights that are not in the network."""
        self.aside = {name: state[name].to(self.parameter(name)) for name in self.kept}


def ste(n: int = 2, m: int = 4) -> StraightThrough:
    """Return SR-STE without decay."""
    return StraightThrough(n, m, decay=0.0)
