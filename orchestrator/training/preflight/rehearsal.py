"""Try a stage on a few examples before any stage is trained, so that errors show in a second, not after the training.

The whole stage runs on a network of its own: one training step, every evaluation, the pruning, its checks and the count
of multiply-accumulates. The results are discarded; no figure of them is kept or shown.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn

from orchestrator.config.training import Train
from orchestrator.core.errors import DataError, OrchestratorError
from orchestrator.core.seeding import seeded
from orchestrator.core.specs import DENSE, TEACHER, StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import Passed, StageOrder, WorkOrder
from orchestrator.planning.expert_counts import Experts
from orchestrator.planning.number_formats import counted, whole_number
from orchestrator.planning.pinned_content import beyond_positions, trained_positions
from orchestrator.training import pruning_rounds
from orchestrator.training.loop import training_loop
from orchestrator.training.loop.evaluation import monitored
from orchestrator.training.loop.training_job import FitResult, TrainingJob
from orchestrator.training.preflight.first_step import (
    Misfit,
    Tried,
    labels_misfit,
    misfit,
    named,
    require_all_reached,
    require_loss,
    require_shares,
    require_trainable,
)
from orchestrator.training.pruning_rounds import Blocks, Enough
from orchestrator.training.scoring.ranking import Scoring
from orchestrator.training.stage_networks import data_node, initialised
from orchestrator.training.stage_record import StageClock, StageInputs, Trained, measure, measure_all, record
from orchestrator.training.training_stages import before_training, begin_unpruned, checked, run_job, train_network
from orchestrator.workloads import data_loading, model_building
from orchestrator.workloads.inspection import FEW, spoilt_in, unreadable
from orchestrator.workloads.splits import Batch, Batches, Split, TensorSplit
from orchestrator.workloads.targets import given
from orchestrator.workloads.tasks.batch import BatchError, moved
from orchestrator.workloads.tasks.classification import Classification
from orchestrator.workloads.tasks.segmentation import Segmentation
from orchestrator.workloads.tasks.task import Measured, TestInputs
from pruning.measure.macs import in_mode
from pruning.measure.matrix_weights import considered
from pruning.measure.report import active_parameters, parameters
from pruning.mixtures.finding import mixtures

CHUNK = 256
"""Number of examples held in memory that are searched at a time."""
TOKENS = 512
"""Maximum number of tokens that are read from a split of a text, if a block has no more: a large network is slow."""
LARGE = 2**30
"""Size in bytes above which a data set held in memory is not loaded a second time."""
_repeated: set[str] = set()
"""Digests of the data sets that a second load has reproduced."""
_finite: set[str] = set()
"""Digests of the data sets that were searched and have neither NaN nor infinity."""


def run_preflight(order: WorkOrder) -> Iterator[Passed]:
    """Try the first stage of `order`, on the dense network of its lineage as it is initialised.

    Raises:
        OrchestratorError: the stage cannot run; the text says what does not fit and what to change.
    """
    stage = order.stages[0]
    rehearsal: _Rehearsal | None = None
    unmatched: tuple[tuple[str, str], ...] = ()
    try:
        _require_device(order.worker.device)
        rehearsal = _Rehearsal(stage)
        rehearsal.require_positions()
        _require_repeatable(data_node(stage), rehearsal.whole)
        rehearsal.require_finite()
        unmatched = rehearsal.fits()
        rehearsal.run()
    except (training_loop.Diverged, pruning_rounds.Overflow):
        pass  # a network that is hardly trained may diverge where the real training does not
    except BatchError as error:
        if rehearsal is not None and (found := labels_misfit(stage.dense, rehearsal.first_batches())) is not None:
            raise found from error
        raise
    except OrchestratorError:
        raise
    except (Exception, SystemExit) as error:
        raise misfit(stage, None if rehearsal is None else rehearsal.tried, error) from error
    if rehearsal is None:
        yield Passed(unmatched)
    else:
        yield Passed(unmatched, rehearsal.figures, rehearsal.stage.task.metrics[0], rehearsal.told())


def _require_device(device: str) -> None:
    """Raise `Misfit` if the stage asks for a GPU and torch cannot use one."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise Misfit(
            f"`cluster.gpus_per_trial` must be 0 on a machine whose GPU torch cannot use: torch {torch.__version__} "
            "finds none here; pass cluster.gpus_per_trial=0, or install the torch build for this GPU and its driver."
        )


def _require_repeatable(node: Mapping[str, Any], loaded: data_loading.Data) -> None:
    """Raise `DataError` for a target that returns other data when it is called again.

    Each data set is checked once a process. Built-in data sets are not checked, nor data sets of more than `LARGE`
    bytes in memory.

    Args:
        node: configuration from which the data set is loaded.
        loaded: the data set as it was loaded before.
    """
    held = [split for split in loaded.splits.values() if isinstance(split, TensorSplit)]
    size = sum(split.images.nbytes + split.labels.nbytes for split in held)
    if not loaded.digests or loaded.digest in _repeated or size > LARGE:
        return
    again = data_loading.load_anew(node).digests
    if differing := [name for name, found in loaded.digests.items() if again.get(name) != found]:
        raise DataError(
            f"{given('data', node)} must return the same data each time it is called, but returned another "
            f"{' and '.join(differing)} split; seed its random draws, as in numpy.random.default_rng(0), or save the "
            "data once and load them from a file."
        )
    _repeated.add(loaded.digest)


class _Rehearsal:
    """Stage that reads a few examples and takes one step; networks of earlier stages are as initialised."""

    def __init__(self, order: StageOrder) -> None:
        order = replace(order, spec=replace(order.spec, fields={**order.spec.fields, **_fewer(order.spec)}))
        network = initialised(order)
        self.whole = whole = network.data
        """The whole data set, of which the rehearsal reads a few examples."""
        splits = whole.splits
        self._held = {name: split for name, split in splits.items() if isinstance(split, TensorSplit)}
        self._few = {name: _FewExamples(split, name, self._note_split) for name, split in splits.items()}
        train, val, test, *further = self._few.values()
        few = replace(whole, train=train, val=val, test=test, tests=dict(zip(whole.tests, further, strict=True)))
        self.stage = StageInputs.of(order, replace(network, data=few))
        self.figures: tuple[str, ...] = (*(metric.name for metric in self.stage.task.metrics), "loss")
        self._dense, self._read = order.dense, "train"

    def fits(self) -> tuple[tuple[str, str], ...]:
        """Check that all rounds together can take their count; return the patterns of `prune` without a match.

        Raises:
            Misfit: a tensor, or the whole network with a global scope, has fewer units than the rounds take.
        """
        spec = self.stage.spec
        if not KINDS[spec.kind].prunes:
            return ()
        prune, amount = spec.typed.prune, spec.typed.amount
        unmatched = tuple(model_building.unmatched(self.stage.model, prune))
        if not isinstance(amount, int):
            return unmatched
        chosen = pruning_rounds.chosen_weights(self.stage.model, self.stage.asked, self.stage.data).weights
        sizes = pruning_rounds.sizes(chosen, self.stage.asked)
        short = {name: size for name, size in sizes.items() if size < amount * spec.round}
        if short:
            raise Misfit(
                f"`schedule.amount` (={amount}) over {spec.round} rounds takes {amount * spec.round} entries or "
                f"channels, but {', '.join(f'{name} has {size}' for name, size in short.items())}; "
                "pass a smaller count, a float for a fraction, or leave tensors out with `prune.exclude`."
            )
        return unmatched

    def told(self) -> tuple[str, ...]:
        """Return what the round leaves dense, as its record will warn of it, and how many experts it leaves."""
        stage = self.stage
        if not KINDS[stage.spec.kind].prunes:
            return ()
        chosen = pruning_rounds.chosen_weights(stage.model, stage.asked, stage.data)
        dense = considered(stage.model, [each.name for each in chosen.weights])
        return (
            *self._experts_left(),
            *chosen.doubt,
            *model_building.untold(stage.model, dense, stage.spec.typed.prune, stage.asked.choices),
        )

    def _experts_left(self) -> Iterator[str]:
        """Yield how many experts the round leaves in each layer."""
        found, target = mixtures(self.stage.model), self.stage.spec.typed.target
        if found and target is not None and self.stage.asked.counts_experts:
            used, total = active_parameters(self.stage.model), parameters(self.stage.model)
            own = Experts(found[0].count, found[0].top_k or 0, found[0].groups)
            told = own.told(target, f"each of {counted(len(found), 'layer')}")
            yield f"{told}; before, a token uses {whole_number(used)} of {whole_number(total)} parameters"

    def require_positions(self) -> None:
        """Raise `Misfit` for blocks of text with more tokens than the network has positions."""
        config = getattr(self.stage.model, "config", None)
        text = getattr(config, "get_text_config", lambda: config)()
        most = trained_positions({"max_position_embeddings": getattr(text, "max_position_embeddings", None)})
        for said in beyond_positions(self._dense.typed.data, self._dense.typed.model, most):
            raise Misfit(said)

    def require_finite(self) -> None:
        """Raise `DataError` if an example of the user's own data has NaN or infinity and spoils the loss or a gradient.

        Splits held in memory are searched whole, other splits in their first few examples. Data without NaN and
        infinity are searched once a process.
        """
        digest, found = self.whole.digest, []
        for name, few in self._few.items() if digest and digest not in _finite else ():
            split, size = self._held.get(name, few), CHUNK if name in self._held else FEW
            found += [spoilt_in(split.batches(size, device=torch.device("cpu")), size)]
            if found[-1] is not None and self._spoils_loss(split, found[-1].index or 0):
                raise DataError(found[-1].refusal(name, given("data", self._dense.typed.data)))
        if not any(found):
            _finite.add(digest)

    def _spoils_loss(self, split: Split, index: int) -> bool:
        """Return whether a batch with this example has a loss or a gradient that is not finite."""
        if isinstance(split, TensorSplit):
            batch = split.take(torch.arange(index, min(index + FEW, len(split)), device=split.device))
        else:
            batch = next(iter(split.batches(FEW, device=self.stage.device)))
        try:
            with seeded(0, self.stage.device), in_mode(self.stage.model, training=False):
                loss = self.stage.task.loss(self.stage.model, moved(batch, self.stage.device))
                weights = [each for each in self.stage.model.parameters() if each.requires_grad]
                found = [loss, *torch.autograd.grad(loss, weights, allow_unused=True)]
        except Exception:  # the stage itself reports any other error
            return False
        return not all(bool(each.isfinite().all()) for each in found if each is not None)

    @property
    def tried(self) -> Tried:
        """Data that the stage is using now."""
        read, stage = self._read, self.stage
        batches = self.first_batches(read, "train")
        nodes = {
            "model": (self._dense.typed.model, stage.model),
            "task": (stage.spec.typed.task, stage.task),
            f"{stage.spec.training}.loss": (stage.config["loss"] or {}, getattr(stage.task, "criterion", None)),
        }
        own = {given(where, node): part for where, (node, part) in nodes.items() if node.get("_target_")}
        return Tried(read, batches[read], batches["train"], stage.data.classes, own)

    def first_batches(self, *names: str) -> dict[str, Batch]:
        """Return the first few examples of the named splits, or of all."""
        chosen = names or self._few
        return {name: next(iter(self._few[name].batches(FEW, device=self.stage.device))) for name in chosen}

    def _note_split(self, name: str) -> None:
        self._read = name

    def run(self) -> None:
        """Take the steps of the stage; initial networks stand for those of other stages, and of any step."""
        stage, clock = self.stage, StageClock()
        done = self._pruned_and_trained() if KINDS[stage.spec.kind].prunes else Trained(self._trained())
        record(stage, done, measure_all(stage, self._other_network(DENSE), self._measured, most_tokens=1), clock)

    def _pruned_and_trained(self) -> Trained:
        """Prune the network, or its first block, which shows as much as all; train and check it."""
        stage, earlier, scoring, before = self.stage, self.stage.network.masks, Scoring(), dict[str, float]()
        blocks = Blocks(after=_end_pruning, replay=False)
        if stage.asked.prunes_first:
            asked = stage.asked.before_training
            masks, scoring = pruning_rounds.prune_round(stage.model, asked, earlier, stage.read, blocks)
            if not stage.is_small:
                before = before_training(stage, self._measured(stage, stage.data.val))
        else:
            masks = begin_unpruned(stage)
        stage.network.masks = masks
        return checked(stage, earlier, self._trained(), before, scoring, at_target=blocks.done is None)

    def _trained(self) -> FitResult:
        """Take one step; take none for a small network if masks empty a whole tensor.

        A network as initialised may lose whole layers where the trained one does not.
        """
        stage, nothing = self.stage, FitResult((), 1, 0)
        if stage.is_small and not all(mask.any() for mask in stage.network.masks.values()):
            return nothing
        return train_network(stage, stage.job(self._other_network(TEACHER)), lambda job, _: self._one_step(job))

    def _one_step(self, job: TrainingJob) -> FitResult:
        stage = self.stage.training(job)
        self._require_first_step(stage)
        steps = count()
        try:
            return run_job(stage, replace(job, cancelled=lambda: next(steps) > 0, on_point=lambda _: None))
        except training_loop.Cancelled:
            if not all(bool(tensor.isfinite().all()) for tensor in job.model.parameters()):
                raise training_loop.Diverged("one step") from None
            self._require_monitor(stage)
            if job.sparse is not None:
                job.sparse.try_update()
            return FitResult((), 1, 0)

    def _require_first_step(self, stage: StageInputs) -> None:
        """Raise `Misfit` if the built-in loop cannot take a step; a training function decides itself what to train."""
        if stage.config.get("_target_") is None:
            model = given("model", self._dense.typed.model)
            require_trainable(stage, model)
            if stage.config["epochs"] or stage.config["steps"]:
                batch = self.first_batches("train")["train"]
                require_loss(stage, batch, model)
                if stage.spec.typed.parallel.processes > 1:
                    require_all_reached(stage, batch, model)
                    require_shares(stage, batch, model)

    def _measured(self, stage: StageInputs, split: Split, inputs: TestInputs | None = None) -> Measured:
        """Return the metrics of the network, and check the labels against its outputs."""
        found = measure(stage, split, None if inputs is None else replace(inputs, most_passages=1))
        if split is stage.data.val:
            self.figures = tuple(found.figures)
            self._require_outputs(len(found.details.get("hits", ())))
        return found

    def _require_outputs(self, outputs: int) -> None:
        """Raise `Misfit` for a label without an output, in any split: some test splits are read only at the end."""
        if not isinstance(self.stage.task, Classification | Segmentation):
            return
        for name, split in self._held.items():
            labels = split.labels if split.rows is None else split.labels[split.rows]
            known = self.stage.task.known(labels)
            if known is not None and (largest := int(labels.where(known, 0).max())) >= outputs:
                raise Misfit(
                    f"`data` (={named(self._dense, 'data')}) has the label {largest} in its {name} split, but "
                    f"`model` (={named(self._dense, 'model')}) has {outputs} outputs, for the classes 0 to "
                    f"{outputs - 1}; give the model more `classes`, or leave these examples out."
                )

    def _other_network(self, role: str) -> nn.Module | None:
        """Return a copy of the initial network in place of a trained one; None if the stage has no such input."""
        return copy.deepcopy(self.stage.model).eval() if role in self.stage.spec.inputs else None

    def _require_monitor(self, stage: StageInputs) -> None:
        """Raise `Misfit` if the task has the metric to select by, but these data do not give it."""
        config, where = Train(**stage.config), stage.spec.training
        name = monitored(stage.task, config.monitor, where).name
        figures = self._measured(stage, stage.data.val).figures
        if (config.select == "best" or config.patience) and name not in figures:
            raise Misfit(
                f"`{where}.monitor` (={config.monitor}) must be a metric that `data` allow, and {name} is not; pass "
                f"null for {stage.task.metrics[0].name}."
            )


def _fewer(spec: StageSpec) -> dict[str, Any]:
    """Return fields of a round with one re-scoring and at most two batches, which show as much as a hundred."""
    fields: dict[str, Any] = {"inner": 1} if spec.typed.inner > 1 else {}
    examples, size = spec.typed.score.examples, spec.typed.score.batch_size
    if examples is not None and size is not None and examples > 2 * size:
        fields["score"] = {**spec.fields["score"], "examples": 2 * size}
    return fields


def _end_pruning(_blocks: Blocks) -> None:
    raise Enough


@dataclass(frozen=True)
class _FewExamples:
    """Split that reads only its first few examples; its length is that of the whole split."""

    split: Split
    name: str
    on_read: Callable[[str], object]
    """Called with the name when examples are read."""

    def __len__(self) -> int:
        return len(self.split)

    def batches(self, batch_size: int, *, device: torch.device, **order: Any) -> Batches:
        whole = self.split.batches(batch_size, device=device, **order)
        return _OneBatch(self.split.batches(min(batch_size, self.few), device=device), whole, self)

    @property
    def few(self) -> int:
        """Number of examples that are read."""
        if isinstance(self.split, TensorSplit) and self.split.in_order:
            return min(FEW, max(1, TOKENS // self.split.images[0].numel()))
        return FEW


@dataclass(frozen=True)
class _OneBatch:
    batches: Batches
    whole: Batches
    of: _FewExamples

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[Batch]:
        self.of.on_read(self.of.name)
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
