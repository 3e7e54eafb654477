"""Masks chosen anew as trained weights or scores say: movement pruning, soft movement pruning, STE and SR-STE for N:M.

    W' = M w,  S <- S - dL/dW' w                (for all entries; a score rises while its weight moves away from 0)

Sources: Sanh, Wolf & Rush 2020, arXiv 2005.07683 (movement); the classes name theirs for N:M.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from pruning.choices.axes import Dynamics as Returning
from pruning.choices.axes import Schedule, Scope, Score, blocks_of
from pruning.choices.combining import Choices
from pruning.dynamics.changing_masks import Dynamics, forget
from pruning.engine.one_call import plan
from pruning.holding.parameter import check_prunable
from pruning.holding.reparam import mask_
from pruning.schedule import cubic
from pruning.selection.smallest import best_of_pools


class _TrainedScores(Dynamics):
    """Dynamics with a score for each entry; weights that are not kept stay as they were, and may return."""

    enforces_itself = True
    rate = 1.0
    scores: dict[str, Tensor]
    aside: dict[str, Tensor]
    """Weights that are not kept, and 0 elsewhere."""

    def begin(self) -> None:
        """Begin with scores of 0."""
        self.scores, self.aside = {}, {}
        for name, kept in self.kept.items():
            weight = self.parameter(name).detach()
            check_prunable(name, weight, reader=f"{self}, which trains scores")
            self.scores[name] = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            self.aside[name] = weight.masked_fill(kept, 0)
            mask_(weight, kept)

    def wants_dense(self) -> bool:
        """Return True: scores of all entries move in each step."""
        return True

    def before_step(self) -> bool:
        """Move the scores, and mask the gradients for the optimizer."""
        for name, kept in self.kept.items():
            parameter = self.parameter(name)
            if parameter.grad is not None:
                scores = self.scores[name]
                moved = parameter.grad.to(scores.dtype) * (parameter.detach() + self.aside[name]).to(scores.dtype)
                moved *= self.direction(parameter)
                scores.sub_(self.regularised(moved, scores), alpha=self.rate)
                mask_(parameter.grad, kept)
        return False

    def regularised(self, moved: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002 - one signature for both
        """Return the gradient of the scores, with a penalty of the method."""
        return moved

    def swap(self, masks: Mapping[str, Tensor]) -> None:
        """Put the weights of dropped entries aside, and those of returning entries back."""
        for name, after in masks.items():
            parameter, aside, before = self.parameter(name), self.aside[name], self.kept[name]
            weight = parameter.detach()
            aside.copy_(torch.where(before & ~after, weight, aside))
            weight.copy_(torch.where(after, torch.where(before, weight, aside), torch.zeros_like(weight)))
            aside.masked_fill_(after, 0)
            forget(self.optimizer, parameter, after & before)
            self.kept[name] = after
        self.record()

    def hold(self) -> None:
        """Set entries that are not kept to 0: momentum and weight decay may have moved them."""
        for name, kept in self.kept.items():
            mask_(self.parameter(name), kept)

    def own_state(self) -> dict[str, Any]:
        """Return the scores, and the weights that are not in the network."""
        parts = (("scores", self.scores), ("aside", self.aside))
        return {part: {name: each.clone() for name, each in held.items()} for part, held in parts}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore the scores and the weights."""
        devices = {name: kept.device for name, kept in self.kept.items()}
        self.scores = {name: state["scores"][name].to(device, copy=True) for name, device in devices.items()}
        self.aside = {name: state["aside"][name].to(device, copy=True) for name, device in devices.items()}


class Movement(_TrainedScores):
    """Keep the entries whose scores are largest; more and more are pruned along a cubic.

    After t finished steps, t = begin, begin + every, ..., until, the sparsity is s - (s - s0) (1 - x)^3 with x the
    fraction of the way from begin to until; see `Gradual`. Between updates the masks stay, and the scores move. After
    `until` the masks stay.

    Args:
        sparsity: fraction of all entries that is pruned in the end.
        every: steps between two updates.
        begin: place of the first update: a fraction of the training up to 1, else a step.
        until: place of the last update, like `begin`.
        scope: "layer" ranks each tensor separately, "global" all together.
        size: blocks of `size` consecutive inputs go together, ranked by the sums of their scores; 1: single entries.
        outputs: number of consecutive outputs of a block.
    """

    def __init__(
        self,
        sparsity: float,
        every: int = 100,
        begin: float = 0.0,
        until: float = 0.75,
        scope: Literal["layer", "global"] = "layer",
        size: int = 1,
        outputs: int = 1,
    ) -> None:
        self.sparsity, self.every, self.first, self.until, self.scope = sparsity, every, begin, until, scope
        self.unit = blocks_of(size, outputs)

    def begin(self) -> None:
        """Begin with scores of 0, and the sparsity of the first masks."""
        super().begin()
        self._start = self.masks.sparsity()

    def after_step(self) -> None:
        """Hold the masks, and prune further if it is time."""
        self.hold()
        if (progress := self.progress(self.every)) is not None:
            schedule = Schedule(cubic(self.sparsity, progress, self._start))
            score, free = Score(lambda *_, **__: self.scores), Returning("free")
            choices = Choices(score, self.unit, Scope(self.scope), schedule, free)
            found = plan(self.model, choices, parameters=list(self.kept), masks=self.masks)
            self.swap({name: found.masks[name].to(kept.device) for name, kept in self.kept.items()})
            self.tell_dead(found.details["dead"])

    def own_state(self) -> dict[str, Any]:
        """Return the scores, the weights that are not in the network, and the sparsity of the first masks."""
        return {**super().own_state(), "start": self._start}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore the scores, the weights and the sparsity of the first masks."""
        super().load_own_state(state)
        self._start = state["start"]


class SoftMovement(_TrainedScores):
    """Keep the entries whose scores lie above a threshold, anew in each step; the sparsity follows from the penalty.

        M = sigmoid(S) > threshold,  S <- S - rate (dL/dW' w + penalty sigmoid'(S))

    Args:
        threshold: in (0, 1); at the beginning sigmoid(S) is 0.5.
        penalty: factor of the sum of sigmoid(S) in the loss.
        rate: learning rate of the scores.
        until: place from which masks and scores stay: a fraction of the training up to 1, else a step.
    """

    changes_each_step = True

    def __init__(self, threshold: float = 0.1, penalty: float = 1.0, rate: float = 1e-2, until: float = 0.75) -> None:
        self.threshold, self.penalty, self.rate, self.until = threshold, penalty, rate, until

    def begin(self) -> None:
        """Begin with scores of 0, and scores just below the threshold where the first masks prune."""
        super().begin()
        below = math.log(self.threshold / (1 - self.threshold)) - 1
        for name, kept in self.kept.items():
            self.scores[name].masked_fill_(~kept, below)

    def regularised(self, moved: Tensor, scores: Tensor) -> Tensor:
        """Return the gradient of the scores with that of the penalty."""
        if self.step >= self.place_of(self.until):
            return torch.zeros_like(moved)
        soft = scores.sigmoid()
        return moved + self.penalty * soft * (1 - soft)

    def after_step(self) -> None:
        """Choose the masks anew."""
        self.hold()
        if self.step <= self.place_of(self.until):
            self.swap({name: scores.sigmoid() > self.threshold for name, scores in self.scores.items()})


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
        for part in self.parts(scope=Scope("window", n=self.n, m=self.m)):
            weight = self.parameter(part.name).detach()
            pools = part.by_unit(weight.abs()).view(-1, part.pool)
            best = best_of_pools(pools, pools.new_ones(()).bool().expand(pools.shape), self.n)
            masks[part.name] = kept = part.by_entry(best.view(-1))
            self.aside[part.name] = weight.masked_fill(kept, 0)
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
