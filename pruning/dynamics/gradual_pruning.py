"""Masks that a pruning decides: random ones that stay, and gradual pruning by any score while a network trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pruning.choices.axes import Schedule, Scope, Score
from pruning.choices.combining import Choices
from pruning.dynamics.changing_masks import Dynamics
from pruning.engine.one_call import chosen, plan
from pruning.masks.mask_set import MaskSet
from pruning.refused import RefusedValue
from pruning.schedule import cubic
from pruning.scores.readings.scoring_data import Batches, Loss, Size

DETAILS = ("unit", "units", "removed", "step")
"""Details of the plan of an update that are remembered."""


class Gradual(Dynamics):
    """Prune further after every `every` steps between two places of the training, along a cubic.

    With s0 the sparsity of the first masks, after t finished steps, t = begin, begin + every, ..., until,

        sparsity = s - (s - s0) (1 - (t - begin) / (until - begin))^3

    Entries that are pruned stay pruned. At `until` the sparsity is exactly s; then the masks stay. Windows (N:M) keep
    fewer and fewer entries, by the same cubic: `n` of `m` at the end.

    Args:
        sparsity: fraction of all units that is pruned in the end; None for windows, which set it.
        every: steps between two updates.
        begin: place of the first update: a fraction of the training up to 1, else a step.
        until: place of the last update, like `begin`.
        method: score, unit and scope, as for `pruning.prune`: a name, `Choices`, a class or a function.
        batches, loss, size, example: see `pruning.plan`; read at each update.
        options: changes of the method, as for `pruning.prune`.

    Source: Zhu & Gupta 2017, arXiv 1710.01878.
    """

    nested = True
    prunes_less = "a lower `sparsity`, or `min_kept`"

    def __init__(  # nine parameters: its own places, and the data of `plan`, which it calls at each update
        self,
        sparsity: float | None = None,
        every: int = 100,
        begin: float = 0.0,
        until: float = 0.75,
        method: str | Choices | type | Callable[..., Any] = "magnitude",
        *,
        batches: Batches = None,
        loss: Loss = None,
        size: Size = None,
        example: Any = None,
        **options: Any,
    ) -> None:
        self.sparsity, self.every, self.first, self.until = sparsity, every, begin, until
        self.choices = chosen(method, options)
        self.details: dict[str, Any] = {}
        if (sparsity is None) != (self.choices.scope.kind == "window"):
            raise RefusedValue("sparsity", sparsity).because(
                f"must be given, except for scope.kind='window' (it is {self.choices.scope.kind!r}), where n of m "
                "decide it."
            )
        if isinstance(batches, Iterator):
            raise TypeError("`batches` (an iterator) must be readable at each update; pass a list of batches.")
        self._data: dict[str, Any] = {"batches": batches, "loss": loss, "size": size, "example": example}

    def begin(self) -> None:
        """Read the sparsity of the first masks; dependency groups mask biases and normalisations, too."""
        self._start = self.masks.sparsity()
        if self.choices.unit.kind == "block":
            alive = torch.cat([*self.parts(self.choices.unit).alive(self.masks).values()])
            self._start = 1 - float(alive.double().mean())
        if self.choices.unit.spans:
            for name in self._planned(replace(self.choices, schedule=Schedule(self._start))):
                self.add(name)
        if self._start:
            self.try_update()

    def try_update(self) -> None:
        """Raise ValueError if the first masks prune more than an update may, or if no update can succeed."""
        length = max(1, self.place_of(self.until) - self.place_of(self.first))
        for progress in (min(1.0, self.every / length), 1.0):
            try:
                self._planned(self._choices_at(progress))
            except ValueError as error:
                if not self._start:
                    raise
                raise ValueError(
                    f"the first masks (of sparsity {self._start:.4f}) do not fit the method: {str(error).rstrip('.')}; "
                    "pass scope='global', other masks, or another sparsity."
                ) from error

    def after_step(self) -> None:
        """Prune further if it is time; the first masks are those of the first update's place."""
        if (progress := self.progress(self.every)) is not None:
            if self._start and not progress:
                self.change({})
                return
            found = self._planned(self._choices_at(progress))
            self.change({name: found[name].to(kept.device) & kept for name, kept in self.kept.items() if name in found})
            self.tell_dead(self._dead)

    def _planned(self, choices: Choices) -> MaskSet:
        """Return the masks of a pruning on top of the masks so far."""
        names = None if choices.unit.spans else list(self.kept)
        data = {**self._data, "generator": self.generator}
        found = plan(self.model, choices, parameters=names, masks=self.masks, **data)
        self.details = {name: found.details[name] for name in DETAILS if name in found.details}
        self._dead = found.details["dead"]
        return found.masks

    def _choices_at(self, progress: float) -> Choices:
        """Return the choices of the update at a fraction of the way."""
        if self.sparsity is not None:
            return replace(self.choices, schedule=Schedule(cubic(self.sparsity, progress, self._start)))
        scope = self.choices.scope
        kept = scope.m - round(cubic(float(scope.m - scope.n), progress, 0.0))
        return replace(self.choices, scope=Scope("window", n=kept, m=scope.m))

    def own_state(self) -> dict[str, Any]:
        """Return the sparsity of the first masks, and the details of the last update."""
        return {"start": self._start, "details": self.details}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore the sparsity of the first masks, and the details of the last update."""
        self._start, self.details = state["start"], dict(state["details"])


class Static(Dynamics):
    """Keep the masks of the beginning, for example random ones with ERK densities.

    Source: Evci et al. 2020, arXiv 1911.11134 (the baseline "static").
    """

    keeps_counts = True
    nested = True


def random_masks(
    model: nn.Module,
    sparsity: float,
    *,
    allocation: str = "erk",
    parameters: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
) -> MaskSet:
    """Draw random masks for a network, with a total sparsity and the densities of an allocation.

    Args:
        model: the network; it is not changed.
        sparsity: fraction of all entries that is pruned, in [0, 1).
        allocation: densities of the tensors: "erk", "er", "uniform" or another name of `Scope.allocation`.
        parameters: names of the parameters to prune; None: those that `prune` takes by default.
        generator: source of random draws; None: torch's default generator.

    Raises:
        ValueError: the allocation is unknown, or cannot reach the sparsity.
    """
    choices = Choices(Score("random"), scope=Scope("layer", allocation), schedule=Schedule(sparsity))
    return plan(model, choices, parameters=parameters, generator=generator).masks
