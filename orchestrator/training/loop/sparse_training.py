"""Training of a round in which masks change: it begins, continues from a checkpoint, and holds the laws at each update.

The engine changes the masks (`pruning.dynamics`); the first masks come from the round, its draws from the trial's seed.
Each step's multiply-accumulates are counted under the masks of that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.config.training import place_violations
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.seeding import derive
from orchestrator.training.pruning_rounds import LawBroken
from orchestrator.training.scoring.examples import ScoringData
from orchestrator.training.scoring.ranking import SPLIT, Read, Round, example_of
from orchestrator.training.stage_networks import masks_of
from orchestrator.trial.choices import sentence
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.inspection import first
from orchestrator.workloads.tasks.batch import arguments, moved
from pruning import MaskSet
from pruning.choices import axes
from pruning.dynamics.changing_masks import Dynamics
from pruning.measure.macs import WeightMacs, weight_macs
from pruning.refused import Refused, unfit_call

if TYPE_CHECKING:
    from orchestrator.training.loop.training_job import FitResult, TrainingJob
    from orchestrator.training.stage_record import StageInputs
    from orchestrator.training.training_stages import Run

T = TypeVar("T")
CALLED = ("begin", "wants_dense", "before_step", "after_step", "own_state", "load_own_state", "try_update")
"""Methods of a dynamics that a class of the user's own may override."""
FEW_UPDATES, MANY_UPDATES, LEAST_SPARSITY = 5, 0.1, 0.01
"""Limits of warnings: number of updates, fraction of the steps that are updates, and sparsity."""


class SparseTrainingError(OrchestratorError):
    """Training whose masks cannot change as the configuration requests."""

    repeats = True


class SparseTraining:
    """Masks that change within the training of a round.

    Args:
        asked: the round; its dynamics changes masks within a training.
        masks: the masks at the beginning.
        read: data and task, for scores that are read at updates.
        where: the place of the training in the configuration, for errors.
    """

    def __init__(self, asked: Round, masks: MaskSet, read: Read, where: str) -> None:
        self.asked, self.row, self._read, self._where = asked, asked.choices.dynamics.row, read, where
        self._first, self._now = masks, dict[str, Tensor]()
        self.dynamics: Dynamics | None = None
        """The masks that change; None before the training."""

    def attach(
        self, model: nn.Module, optimizer: Optimizer, length: int, epoch_length: int, state: Mapping[str, Any] | None
    ) -> None:
        """Begin, or continue from a state, with the network and the optimizer restored to the same step.

        Args:
            model: the network.
            optimizer: the optimizer of all masked parameters.
            length: number of steps of the training.
            epoch_length: number of steps of an epoch.
            state: `state` of the same training between two steps; None: the training begins.

        Raises:
            SparseTrainingError: the masks cannot change as the configuration requests.
        """
        own = self.asked.fields.dynamics._target_
        node = {"_target_": own, "kind": self.row.name, **self.asked.choices.dynamics.options}
        whole = self._where
        if self.asked.fields.restart.rates:
            whole += f" from `restart.rates` (={self.asked.fields.restart.rates}) on"
        for broken in place_violations(node, length, whole):
            raise SparseTrainingError(broken)
        fields = self.asked.fields
        drawn = torch.Generator().manual_seed(derive(fields.seed, f"{fields.round}/dynamics"))
        with self.told():
            made = self._made(self._options(model, epoch_length))
            made.attach(model, self._first, optimizer, length=length, generator=drawn, state=state)
        self.dynamics, self._now = made, dict(made.kept)
        if self.row.keeps_counts or self.row.nested:
            optimizer.register_step_post_hook(lambda *_: self._hold_update())

    @property
    def masks(self) -> MaskSet:
        """The masks as they are now."""
        return self._first if self.dynamics is None else self.dynamics.masks

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """The masks as they are now, without copies; an unchanged mask is the same tensor."""
        return self._first if self.dynamics is None else self.dynamics.kept

    @property
    def reads_all(self) -> bool:
        """Whether the next step reads the gradients of all entries."""
        return self.dynamics is not None and self.dynamics.wants_dense()

    @property
    def is_at_target(self) -> bool:
        """Whether the masks prune as much as in the end."""
        made = self.dynamics
        return made is None or self._guarded(lambda: made.is_at_target)()

    def state(self) -> Mapping[str, Any] | None:
        """Return what `attach` continues from."""
        return None if self.dynamics is None else self.dynamics.state()

    def go_on(self, state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Continue from a state if the masks are attached already; else return it for `attach`."""
        if state is None or self.dynamics is None:
            return state
        self.dynamics.load_state(state)
        self._now = dict(self.dynamics.kept)
        return None

    def mask(self, model: nn.Module, averages: list[Tensor]) -> None:
        """Set the pruned entries of averages of the trained parameters to 0."""
        assert self.dynamics is not None
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        averaged = {id(parameter): average for parameter, average in zip(trained, averages, strict=True)}
        own = {name: averaged.get(id(self.dynamics.parameter(name))) for name in self.dynamics.kept}
        self.dynamics.mask({name: average for name, average in own.items() if average is not None})

    def try_update(self) -> None:
        """Try the updates of the whole training on the network as it is, and change nothing."""
        if self.dynamics is not None:
            with self.told():
                self.dynamics.try_update()

    def release(self) -> None:
        """Stop changing masks; pruned entries are 0."""
        if self.dynamics is not None and self.dynamics.is_attached:
            self.dynamics.stop()

    @property
    def scoring(self) -> dict[str, Any]:
        """Details of the scoring of the last update, for a round that does not prune before its training."""
        ranked = str(self.asked.named) if self.row.ranks else self.row.ranking
        return {"score": ranked, "unit": self.asked.choices.unit.kind, **getattr(self.dynamics, "details", {})}

    @property
    def warnings(self) -> Iterator[str]:
        """Warnings of a training in which masks hardly changed, or whose steps mostly changed masks."""
        made = self.dynamics
        if made is None:
            return
        every, steps = getattr(made, "every", None), [update.step for update in made.updates]
        begin, until = made.place_of(made.first), made.place_of(made.until)
        if every and not made.changes_each_step and (until - begin) / every < FEW_UPDATES:
            yield (
                f"masks changed in {len(steps)} of {made.length} steps (dynamics.every={every}): too few for "
                f"{self.row.name}; pass a smaller dynamics.every, such as {max(1, (until - begin) // 20)}"
            )
        if made.replaces_steps and len(steps) > MANY_UPDATES * made.length:
            yield (
                f"{len(steps)} of {made.length} steps changed masks in place of weights (dynamics.every={every}); pass "
                "a larger dynamics.every"
            )
        if not self.row.has_target and self.masks.sparsity() < LEAST_SPARSITY:
            yield (
                f"{self.row.name} pruned {self.masks.sparsity():.2%}: pass a larger dynamics.penalty, dynamics.rate or "
                "dynamics.threshold"
            )

    @property
    def updates(self) -> list[dict[str, Any]]:
        """The changes of the masks so far, as plain data."""
        return [] if self.dynamics is None else [asdict(update) for update in self.dynamics.updates]

    @contextmanager
    def told(self) -> Iterator[None]:
        """Convert the engine's errors to `SparseTrainingError`, with keys as they are typed."""
        try:
            yield
        except ValueError as error:
            said = sentence(error) if isinstance(error, Refused) else error
            raise SparseTrainingError(f"dynamics={self.row.name} cannot change masks: {said}") from error

    def _made(self, options: Mapping[str, Any]) -> Dynamics:
        """Make the dynamics; a class of the user's own names itself in its errors."""
        make, target = self.asked.choices.dynamics.load(), self.asked.fields.dynamics._target_
        if target is None:
            made: Dynamics = make(**options)
            return made
        if unfit := unfit_call(make, **options):
            keys = ", ".join(options)
            raise SparseTrainingError(
                f"`dynamics._target_` (={target}) is called with ({keys}), but {unfit}; change its parameters, or its "
                "keys under `dynamics`."
            )
        made = self._guarded(make)(**options)
        for name in CALLED:
            setattr(made, name, self._guarded(getattr(made, name)))
        return made

    def _guarded(self, function: Callable[..., T]) -> Callable[..., T]:
        """Convert errors of a class of the user's own to `SparseTrainingError`."""
        if self.asked.fields.dynamics._target_ is None:
            return function

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> T:
            try:
                return function(*args, **kwargs)
            except (OrchestratorError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                said = (" ".join(str(error).split()) or "(no message)").rstrip(".")
                raise SparseTrainingError(
                    f"`dynamics._target_` (={self.asked.fields.dynamics._target_}) failed with {type(error).__name__}: "
                    f"{said}; fix the class, or change its arguments under `dynamics`."
                ) from error

        return guarded

    def _options(self, model: nn.Module, epoch_length: int) -> dict[str, Any]:
        """Return the arguments of the dynamics."""
        choices, fields = self.asked.choices, self.asked.fields
        found = dict(choices.dynamics.options)
        if found.get("every", 0) is None:
            found["every"] = epoch_length
        scope = choices.scope
        elsewhere = {"sparsity": fields.target, "n": scope.n, "m": scope.m, "scope": scope.kind}
        elsewhere |= {"size": choices.unit.inputs, "outputs": choices.unit.outputs}
        found |= {name: elsewhere[name] for name in self.row.elsewhere}
        if self.asked.fields.dynamics._target_ and "sparsity" in signature(choices.dynamics.load()).parameters:
            found.setdefault("sparsity", fields.target)
        if "method" not in self.row.unlisted:
            return found
        device = next(model.parameters()).device
        data = ScoringData(
            getattr(self._read.data, SPLIT), fields.score, derive(fields.seed, f"{fields.round}/score"), device
        )
        found |= {
            "method": replace(choices, dynamics=axes.Dynamics(), schedule=axes.Schedule()),
            "batches": data.batches(1),
        }
        found |= {"loss": self._read.task.loss, "size": self._read.task.size}
        if scope.kind == "window":
            found["sparsity"] = None
        return found | ({"example": example_of(model, self._read.data)} if self.asked.spans else {})

    def _hold_update(self) -> None:
        """Check an update: counts that stay, entries that stay pruned, and the values of regrown entries.

        Raises:
            LawBroken: a count changed, an entry returned, or a regrown entry begins with another value than it must.
        """
        made = self.dynamics
        assert made is not None
        changed = [name for name, now in made.kept.items() if now is not self._now[name]]
        unit = axes.blocks_of(self.asked.choices.unit.inputs, self.asked.choices.unit.outputs)
        parts = {part.name: part for part in made.parts(unit)} if changed else {}
        for name in changed:
            before, now = self._now[name], made.kept[name]
            if self.row.nested and bool((now & ~before).any()):
                raise LawBroken(f"an update of dynamics={self.row.name} brought pruned entries of {name} back.")
            counts = {int(parts[name].by_unit(mask).any(1).sum()) for mask in (before, now)}
            if self.row.keeps_counts and len(counts) > 1:
                raise LawBroken(f"an update of dynamics={self.row.name} changed the number of kept units of {name}.")
            values = made.parameter(name).detach()[now & ~before]
            low, high = made.new_values
            if not bool(((values >= low) & (values <= high)).all()):
                raise LawBroken(
                    f"an update of dynamics={self.row.name} regrew entries of {name} with values outside of "
                    f"[{low:g}, {high:g}]."
                )
        self._now = dict(made.kept)


def train_changing(stage: StageInputs, job: TrainingJob, run: Run) -> FitResult:
    """Train under masks that change within the training."""
    sparse, in_order = SparseTraining(stage.asked, job.masks, stage.read, job.where), masks_of(job.model, job.masks)
    return replace(run(replace(job, sparse=sparse), in_order), sparse=sparse)


def first_masks(chosen: Mapping[str, Tensor], earlier: MaskSet) -> MaskSet:
    """Return the masks with which a training begins that prunes by itself: those so far, and ones elsewhere.

    Args:
        chosen: name -> parameter that is pruned.
        earlier: the masks so far.
    """
    ones = {name: torch.ones(each.shape, dtype=torch.bool) for name, each in chosen.items()}
    return MaskSet({**{name: earlier.get(name, mask) for name, mask in ones.items()}, **earlier})


DENSE, SPARSE, SPARSE_FORWARD = "dense", "sparse", "sparse_forward"
"""Phases: no weight is masked; forward and backward under masks; forward under masks, gradients of all weights."""
COUNTS = ("steps", "examples", "forward", "backward")
"""Counts of a phase; `forward` and `backward` are multiply-accumulates."""


class TrainingCost:
    """Sums of a training's multiply-accumulates, by phase.

    An example of a step under masks that leave R of D multiply-accumulates costs R in the forward pass. The backward
    pass costs R for the gradients of inputs; and R for those of weights, or D where the step reads the gradients of all
    weights. A step that replaces an update of the weights, as in RigL, is counted like any other.

    Args:
        weights: multiply-accumulates of one example, by weight.
        masks: returns the masks of now; a mask that did not change is the same tensor.
        reads_all: returns whether the next step reads the gradients of all weights.
    """

    def __init__(
        self,
        weights: WeightMacs,
        masks: Callable[[], Mapping[str, Tensor]],
        reads_all: Callable[[], bool] = lambda: False,
    ) -> None:
        self._weights, self._masks, self._reads_all = weights, masks, reads_all
        self._counted: dict[str, Tensor] = {}
        self._remaining: float | Tensor = float(weights.total)
        """A number where that needs no waiting for a device."""
        self._is_dense = True
        self._sums: dict[str, list[Any]] | None = {}

    def step(self, examples: int) -> None:
        """Count a step with this number of examples; call it before the masks may change."""
        if self._sums is None:
            return
        all_read = self._reads_all()
        self._count_masks(sync=not all_read)
        phase = SPARSE_FORWARD if all_read else DENSE if self._is_dense else SPARSE
        sums = self._sums.setdefault(phase, [0, 0, 0.0, 0.0])
        forward = examples * self._remaining
        weights = examples * self._weights.total if all_read else forward
        for index, more in enumerate((1, examples, forward, forward + weights)):
            sums[index] = sums[index] + more

    def state(self) -> dict[str, dict[str, int]] | None:
        """Return the sums: phase -> count -> int; None if an earlier part of the training was not counted."""
        if self._sums is None:
            return None
        return {
            phase: dict(zip(COUNTS, map(round, map(float, sums)), strict=True)) for phase, sums in self._sums.items()
        }

    def go_on(self, state: Mapping[str, Mapping[str, int]] | None) -> None:
        """Continue from a state; None: an earlier part was not counted, so that the sums stay unknown."""
        self._sums = (
            None if state is None else {phase: [sums[name] for name in COUNTS] for phase, sums in state.items()}
        )

    def _count_masks(self, *, sync: bool) -> None:
        """Count the multiply-accumulates that remain if the masks changed; `sync`: find out whether none is masked."""
        masks = self._masks()
        if masks.keys() != self._counted.keys() or any(masks[name] is not held for name, held in self._counted.items()):
            self._counted = dict(masks)
            remaining = self._weights.remaining(masks)
            self._remaining = float(remaining) if sync or remaining.device.type == "cpu" else remaining
            self._is_dense = sync and float(remaining) == self._weights.total


def cost_of(
    model: nn.Module, data: Data, device: torch.device, masks: MaskSet, sparse: SparseTraining | None
) -> TrainingCost:
    """Return the empty cost of a training of `model`, under masks that stay or masks that change."""
    example = moved(first(data.train), device)  # a real example, because tokens are integers
    given, named = arguments(model, example, labels=False)
    weights = weight_macs(model, named or given)
    if sparse is None:
        return TrainingCost(weights, lambda: masks)
    return TrainingCost(weights, lambda: sparse.kept, lambda: sparse.reads_all)
