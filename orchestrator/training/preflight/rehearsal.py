"""Try a stage on a few examples before any is trained: what cannot work shows in a second, not after the training.

The whole stage runs on a network of its own: one step of training, every evaluation, the pruning, its laws and the
count of multiply-accumulates. What comes out is thrown away; no figure of it is kept or shown.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.config.parts.training import Train
from orchestrator.core.errors import DataError, OrchestratorError
from orchestrator.core.seeding import seeded
from orchestrator.core.specs import TEACHER, StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import Passed, WorkOrder
from orchestrator.training import pruning_rounds, training_loop
from orchestrator.training.evaluation import monitored
from orchestrator.training.preflight.misfits import Misfit, Tried, misfit, named
from orchestrator.training.scoring.ranking import Round
from orchestrator.training.stage_networks import data_node, initialised
from orchestrator.training.training_stages import Stage, Ways
from orchestrator.workloads import data_loading, model_building
from orchestrator.workloads.inspection import FEW, spoilt_in, unreadable
from orchestrator.workloads.splits import Batch, Batches, Split, TensorSplit
from orchestrator.workloads.targets import given
from orchestrator.workloads.tasks.batch import moved
from orchestrator.workloads.tasks.classification import Classification
from orchestrator.workloads.tasks.segmentation import Segmentation
from orchestrator.workloads.tasks.task import Measured
from pruning import MaskSet
from pruning.measure.macs import in_mode

CHUNK = 256
"""Examples held in memory that are searched at a time."""
LARGE = 2**30
"""Bytes in memory above which a data set is not loaded twice."""
_repeated: set[str] = set()
"""Digests of the data sets that a second load has given again."""
_finite: set[str] = set()
"""Digests of the data sets that have been searched, and hold neither NaN nor an infinity."""


def run_preflight(order: WorkOrder) -> Iterator[Passed]:
    """Try the stage of `order`, on the network of the first of its lineage as that is initialised.

    Raises:
        OrchestratorError: it cannot run; the text says what does not fit and what to change.
    """
    spec = order.specs[0]
    dense = order.lineage[0] if order.lineage else spec
    rehearsal: _Rehearsal | None = None
    unmatched: tuple[tuple[str, str], ...] = ()
    try:
        _hold_device(order.device)
        rehearsal = _Rehearsal(dense, order)
        _require_repeatable(data_node(dense, spec), rehearsal.whole)
        rehearsal.require_finite()
        unmatched = rehearsal.fits()
        rehearsal.stage.result(Stage.prune if KINDS[spec.kind].prunes else Stage.train)
    except (
        training_loop.Diverged,
        pruning_rounds.Overflow,
    ):  # of an untrained network, or after one step: the training may still go on
        pass
    except OrchestratorError:
        raise
    except (Exception, SystemExit) as error:
        raise misfit(dense, spec, None if rehearsal is None else rehearsal.tried, error) from error
    yield Passed(unmatched, () if rehearsal is None else rehearsal.figures)


def _hold_device(device: str) -> None:
    """Raise `Misfit` for a GPU that is there and that torch cannot use."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise Misfit(
            f"`cluster.gpus_per_trial` must be 0 where torch can use no GPU, and torch {torch.__version__} finds none "
            "here; pass cluster.gpus_per_trial=0, or install the build of torch for this machine's GPU and driver."
        )


def _require_repeatable(node: Mapping[str, Any], loaded: data_loading.Data) -> None:
    """Raise `DataError` for a target that gives other data than it gave before; each set is asked once a process.

    What is built in is not asked, nor what holds more than `LARGE` bytes in memory.

    Args:
        node: what the data set is loaded by.
        loaded: the data set as it was loaded before.
    """
    held = [split for split in loaded.splits.values() if isinstance(split, TensorSplit)]
    size = sum(split.images.nbytes + split.labels.nbytes for split in held)
    if not loaded.digests or loaded.digest in _repeated or size > LARGE:
        return
    again = data_loading.load_anew(node).digests
    if differing := [name for name, found in loaded.digests.items() if again.get(name) != found]:
        raise DataError(
            f"{given('data', node)} must give the same data each time it is called, and gives another "
            f"{' and '.join(differing)} split; seed what it draws, as in numpy.random.default_rng(0), or save the data "
            "once and load them from a file."
        )
    _repeated.add(loaded.digest)


class _Rehearsal(Ways):
    """A stage that sees a few examples and takes one step: what came before it are networks as they are initialised."""

    def __init__(self, dense: StageSpec, order: WorkOrder) -> None:
        steps, spec = count(), order.specs[0]
        if spec.typed.inner > 1:  # scoring anew a hundred times shows no more than once
            spec = replace(spec, fields={**spec.fields, "inner": 1})
        order = replace(order, cancelled=lambda: next(steps) > 0)
        network = initialised(dense, spec, order)
        self.whole = whole = network.data
        """The data, of which a rehearsal reads a few examples."""
        splits = whole.splits
        self._held = {name: split for name, split in splits.items() if isinstance(split, TensorSplit)}
        self._few = {name: _Few(split, name, self._reads) for name, split in splits.items()}
        train, val, test, *further = self._few.values()
        few = replace(whole, train=train, val=val, test=test, tests=dict(zip(whole.tests, further, strict=True)))
        self.stage = Stage(spec, replace(network, data=few), order, ways=self)
        self.figures: tuple[str, ...] = (*(metric.name for metric in self.stage.task.metrics), "loss")
        self._dense, self._read = dense, "train"

    def fits(self) -> tuple[tuple[str, str], ...]:
        """Raise for a count that all rounds together cannot take; return the patterns of `prune` that match nothing."""
        spec = self.stage.spec
        if not KINDS[spec.kind].prunes:
            return ()
        prune, amount = spec.typed.prune, spec.typed.amount
        unmatched = tuple(model_building.unmatched(self.stage.model, prune))
        if not isinstance(amount, int):
            return unmatched
        sizes = pruning_rounds.sizes(model_building.prunable(self.stage.model, prune), Round.of(spec.fields))
        short = {name: size for name, size in sizes.items() if size < amount * spec.round}
        if short:
            raise Misfit(
                f"`schedule.amount` (={amount}) over {spec.round} rounds takes {amount * spec.round} entries, or "
                f"channels, of each tensor, but {', '.join(f'{name} has {size}' for name, size in short.items())}; "
                "pass a smaller count, a float for a fraction, or leave them out with `prune.exclude`."
            )
        return unmatched

    def require_finite(self) -> None:
        """Raise `DataError` where the user's own data hold NaN or an infinity in an example that spoils the loss.

        All examples that are held in memory are searched, and of a split that is read one by one the first few; where
        there is none, once a process.
        """
        digest, found = self.whole.digest, []
        for name, few in self._few.items() if digest and digest not in _finite else ():
            split, size = self._held.get(name, few), CHUNK if name in self._held else FEW
            found += [spoilt_in(split.batches(size, device=torch.device("cpu")), size)]
            if found[-1] is not None and self._spoils(split, found[-1].index or 0):
                raise DataError(found[-1].refusal(name, given("data", self._dense.typed.data)))
        if not any(found):
            _finite.add(digest)

    def _spoils(self, split: Split, index: int) -> bool:
        """Whether a batch with this example has a loss, or a gradient, that is not finite."""
        if isinstance(split, TensorSplit):
            batch = split.take(torch.arange(index, min(index + FEW, len(split)), device=split.device))
        else:
            batch = next(iter(split.batches(FEW, device=self.stage.device)))
        try:
            with seeded(0, self.stage.device), in_mode(self.stage.model, training=False):
                loss = self.stage.task.loss(self.stage.model, moved(batch, self.stage.device))
                weights = [each for each in self.stage.model.parameters() if each.requires_grad]
                found = [loss, *torch.autograd.grad(loss, weights, allow_unused=True)]
        except Exception:  # whatever does not fit is told as the stage runs
            return False
        return not all(bool(each.isfinite().all()) for each in found if each is not None)

    @property
    def tried(self) -> Tried:
        """What the stage has before it now."""
        config = getattr(self.stage.model, "config", None)
        positions = getattr(config, "max_position_embeddings", None) or math.inf
        read = self._read
        batch, train = (next(iter(self._few[name].batches(FEW, device=self.stage.device))) for name in (read, "train"))
        return Tried(read, batch, train, self.stage.data.classes, positions)

    def _reads(self, name: str) -> None:
        self._read = name

    def train(self, stage: Stage, fit: Callable[[], training_loop.FitResult]) -> training_loop.FitResult:
        """Take one step, and none where layers are lost: of the network as it is initialised they may be."""
        if stage.is_small and not all(mask.any() for mask in stage.network.masks.values()):
            return training_loop.FitResult((), 1, 0)
        try:
            return fit()
        except training_loop.Cancelled:
            if not all(bool(tensor.isfinite().all()) for tensor in stage.model.parameters()):
                raise training_loop.Diverged("one step") from None
            self._hold_monitor()
            return training_loop.FitResult((), 1, 0)

    def restart(self, stage: Stage, masks: MaskSet) -> None:
        """Leave the weights: those at the start stand for those of any step."""

    def onward(self, stage: Stage, masks: Sequence[Tensor | None]) -> None:
        """Return none: a training from its start stands for one that is continued."""

    def measure(self, stage: Stage, split: Split) -> Measured:
        """Return what the network achieves, and hold the data to its outputs."""
        found = super().measure(stage, split)
        if split is stage.data.val:
            self.figures = tuple(found.figures)
            self._hold_labels(len(found.details.get("hits", ())))
        return found

    def _hold_labels(self, outputs: int) -> None:
        """Raise for a class that the network has no output for, in whichever split: a further test set is read last."""
        if not isinstance(self.stage.task, Classification | Segmentation):
            return
        for name, split in self._held.items():
            labels = split.labels if split.rows is None else split.labels[split.rows]
            known = self.stage.task.known(labels)
            if known is not None and (largest := int(labels.where(known, 0).max())) >= outputs:
                raise Misfit(
                    f"`data` (={named(self._dense, 'data')}) has the label {largest} in its {name} split, and "
                    f"`model` (={named(self._dense, 'model')}) has {outputs} outputs, for the classes from 0 to "
                    f"{outputs - 1}; give it more `classes`, or leave these examples out."
                )

    def teacher(self, stage: Stage) -> nn.Module | None:
        """Return the network as it is: it stands for one that is not trained yet."""
        return copy.deepcopy(stage.model).eval() if TEACHER in stage.spec.inputs else None

    def _hold_monitor(self) -> None:
        """Raise for a metric to choose by that the task has and these data do not give."""
        config = Train(**self.stage.config)
        where = self.stage.spec.training
        name = monitored(self.stage.task, config.monitor, where).name
        if (config.select == "best" or config.patience) and name not in self.stage.measured(
            self.stage.data.val
        ).figures:
            raise Misfit(
                f"`{where}.monitor` (={config.monitor}) must be measured on `data`, which gives no {name}; pass null "
                f"for {self.stage.task.metrics[0].name}."
            )


@dataclass(frozen=True)
class _Few:
    """A split of which only the first few examples are read; its lengths are the true ones."""

    split: Split
    name: str
    told: Callable[[str], object]
    """Called with the name when examples are read."""

    def __len__(self) -> int:
        return len(self.split)

    def batches(self, batch_size: int, *, device: torch.device, **order: Any) -> Batches:
        whole = self.split.batches(batch_size, device=device, **order)
        return _OneBatch(self.split.batches(min(batch_size, FEW), device=device), whole, self)


@dataclass(frozen=True)
class _OneBatch:
    batches: Batches
    whole: Batches
    of: _Few

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[Batch]:
        self.of.told(self.of.name)
        try:
            batch = next(iter(self.batches))
        except OrchestratorError:
            raise
        except Exception as error:
            raise unreadable(self.of.name, error) from error
        yield batch

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        del number, start
        return iter(self)
