"""User-written training functions: the context that they receive, and the checks of the network that they leave."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

import torch
from hydra.utils import get_object
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.config.training import Train
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.plain_data import LARGEST
from orchestrator.core.records import CurvePoint
from orchestrator.core.seeding import derive, seeded
from orchestrator.training.loop.sparse_training import SparseTraining
from orchestrator.training.loop.training_job import FitResult, TrainingError, TrainingJob
from orchestrator.training.loop.training_loop import Cancelled, Diverged
from orchestrator.training.pruning_rounds import LawBroken
from orchestrator.training.state.resuming import Unfit
from orchestrator.training.state.train_state import (
    TrainState,
    generators,
    module_state,
    restore_generators,
    restore_module,
)
from orchestrator.training.team.ranks import Processes
from orchestrator.workloads.inspection import require_finite
from orchestrator.workloads.splits import Split
from orchestrator.workloads.targets import TargetError, failure, given
from orchestrator.workloads.tasks.task import Measured
from pruning import MaskSet
from pruning.measure.macs import in_mode


def shapes_and_dtypes(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each parameter and buffer."""
    state: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


@contextmanager
def lent(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Lend a network on a device; afterwards it has its own forward passes again, and trains the same parameters."""
    model.to(device)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    yield
    model.to(device)
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name in trainable)  # the function may have frozen some
    for name, module in model.named_modules():  # a library may have wrapped some, for mixed precision
        if vars(module).pop("forward", None) is not None and forwards.get(name) is not None:
            module.forward = forwards[name]


def check_network(job: TrainingJob, before: Mapping[str, Any], masks: MaskSet) -> None:
    """Raise an error for a network that a training function must not leave.

    Args:
        job: the training.
        before: `shapes_and_dtypes` of its network before the training.
        masks: masks whose pruned entries must be 0.

    Raises:
        TrainingError: a parameter or buffer was added, removed or changed.
        Diverged: a value is infinite or NaN.
        LawBroken: a pruned weight is not 0.
    """
    where, config, model = job.where, job.config, job.model
    after = shapes_and_dtypes(model)
    if changed := [name for name in {**before, **after} if before.get(name) != after.get(name)]:
        raise TrainingError(
            f"{given(where, config)} must leave the names, shapes and dtypes of parameters and buffers unchanged, "
            f"but changed {changed[0]}; undo any wrapping or conversion before it returns."
        )
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if not bool(parameter.isfinite().all()):
            raise Diverged(f"{name} is infinite or NaN after {given(where, config)}: training diverged.")
    for name, mask in masks.items():
        if name in parameters and bool((parameters[name].detach()[~mask.to(parameters[name].device)] != 0).any()):
            remedy = "call `context.attach(optimizer)` before the first step."
            if job.sparse is not None:
                remedy = "for weights of an earlier step, call `context.restore_masks` with the masks of that step."
            raise LawBroken(
                f"{given(where, config)} must keep pruned weights at 0, but those of {name} are not; {remedy}"
            )


def check_ranks(where: str, config: Mapping[str, Any], model: nn.Module, ranks: Processes) -> None:
    """Raise `TrainingError` if a training function left the processes of a trial without their group or one network."""
    if not ranks.have_group:
        raise TrainingError(
            f"{given(where, config)} must leave torch's process group, but destroyed it; remove its call of "
            "`destroy_process_group`, or of a library that makes this call, as `accelerator.end_training()`."
        )
    if ranks.differ([*model.parameters()]):
        raise TrainingError(
            f"{given(where, config)} must leave the same weights on all processes of the trial, but did not; pass the "
            "batches through `context.wrap(model)`, and let all processes take equal steps."
        )


@dataclass(frozen=True)
class TrainingData:
    """Data that a training function may use: every split except the test splits."""

    train: Split
    val: Split
    input_shape: tuple[int, ...]
    """Shape of one example."""
    classes: int
    """Number of classes, or of outputs if the labels are real numbers."""


@dataclass(frozen=True)
class Length:
    """Length of a training that follows its settings: steps, steps of an epoch, and examples of a step."""

    steps: int
    epoch: int
    examples: int

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        """Return the length of a training with the job's settings on its data."""
        config, data = job.config, job.data
        steps, size = config.get("steps"), int(config["batch_size"])
        batches = data.train.batches(size, device=job.device, drop_last=bool(config.get("drop_last")))
        return cls(len(batches) * (config.get("epochs") or 0) if steps is None else steps, len(batches), size)


class Context:
    """Services for a training function: seeds, masks, evaluation, the curve, checkpoints.

    Args:
        job: the training.
        measured: returns the current metrics of the network on the validation split.
    """

    def __init__(self, job: TrainingJob, measured: Callable[[], Measured]) -> None:
        self._job, self._measured = job, measured
        self.ranks, self.device = job.ranks, job.device
        self.seed = derive(job.seed, "order")
        """Seed for the order of batches; with it, batches come in the order of the built-in loop."""
        self._draws = derive(job.seed, "training")
        self.curve: list[CurvePoint] = []
        self.steps = 0
        """Number of steps that attached optimizers have taken."""
        self._state = job.state
        """State to resume from, until the function has resumed."""
        self._changed: Mapping[str, Any] | None = None
        """State of changing masks that the next `attach` continues from."""
        self._stepped: set[int] = set()
        """Parameters that an optimizer has moved for this batch."""
        self._restored: MaskSet | None = None
        self._has_checkpoints = False

    @cached_property
    def _length(self) -> Length:
        return Length.of(self._job)

    @property
    def masks(self) -> MaskSet:
        """The network's masks as they are now; empty while it is dense."""
        if self._restored is not None:
            return self._restored
        return self._job.masks if self._job.sparse is None else self._job.sparse.masks

    def restore_masks(self, masks: MaskSet) -> None:
        """Say that the network has weights of an earlier step again, with the masks of that step.

        Call it once, after the last step: masks no longer change.

        Args:
            masks: `context.masks` as it was when the weights were copied.
        """
        if self._job.sparse is not None:
            self._job.sparse.release()
            self._restored = masks

    def attach(self, optimizer: Optimizer, steps: int | None = None) -> None:
        """Keep pruned weights at exactly 0 after each step of `optimizer`, count its steps, and stop when asked to.

        Call `attach` for every optimizer before its first step, also when the network is dense. Where masks change
        within the training, `attach` begins to change them, and one optimizer must train all pruned parameters.

        Args:
            optimizer: an optimizer of the network.
            steps: number of steps of the training, where masks change; None: the steps of `config`.
        """
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        optimizer.register_step_pre_hook(lambda *_: self._count_batch(trained))
        if self._job.on_optimizer is not None:
            self._job.on_optimizer(optimizer)
        pruned = {id(self._job.model.get_parameter(name)) for name in self._job.masks}
        if self._job.sparse is not None and trained & pruned:
            self._change_masks(self._job.sparse, optimizer, steps)
        optimizer.register_step_pre_hook(lambda *_: self._end_if_asked())
        optimizer.register_step_post_hook(lambda *_: self._count())

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return the context in which the function is called: its draws, its environment, its changing masks."""
        with ExitStack() as entered:
            entered.enter_context(self.ranks.announced())
            entered.enter_context(seeded(self.ranks.draws(self._draws, self.steps), self.device))
            if self._job.sparse is not None:
                entered.enter_context(self._job.sparse.told())
            yield

    @property
    def rank(self) -> int:
        """Number of this process among those of the trial, from 0."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of processes of the trial."""
        return self.ranks.size

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a network whose backward pass averages gradients over all processes; with one process the network."""
        return self.ranks.wrapped(model)

    def gather(self, value: float) -> list[float]:
        """Return the numbers that all processes pass, by rank; every process must call it."""
        own = float(value)
        return self.ranks.sums([own if rank == self.rank else 0.0 for rank in range(self.world_size)])

    def evaluate(self) -> dict[str, float]:
        """Return `loss` and the task's metrics of the current network on the validation split.

        Rank 0 measures them for all processes; it may call this alone.
        """
        return self.ranks.told(dict(self._measured().figures) if self.ranks.leads else None)

    def report(self, step: int, metrics: Mapping[str, float], epoch: float | None = None) -> None:
        """Add a point to the curve of the stage.

        Args:
            step: number of optimizer steps so far.
            metrics: name -> value, as in {"train/loss": 0.4, "val/loss": 0.5}.
            epoch: number of passes over the training split so far; None counts the points instead.

        Raises:
            Diverged: a value is infinite, NaN, or larger than a record can hold.
            TrainingError: `step` or `epoch` breaks its rule.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise TrainingError(
                f"`step` (={step!r}) of `context.report` must be an int of at least 0, the optimizer steps so far; "
                "pass `context.steps`."
            )
        if epoch is not None and not (isinstance(epoch, int | float) and 0 <= epoch < math.inf):
            raise TrainingError(
                f"`epoch` (={epoch!r}) of `context.report` must be a number of at least 0, the passes over the "
                "training split so far; leave it out to count the points."
            )
        values = {str(name): float(value) for name, value in metrics.items()}
        for name, value in values.items():
            if not abs(value) <= LARGEST:
                raise Diverged(f"{name} is {value} at step {step}: training diverged; lower its learning rate.")
        point = CurvePoint(step, float(len(self.curve) + 1 if epoch is None else epoch), time.time(), values)
        self.curve.append(point)
        self._job.on_point(point)

    def checkpoint(self, parts: Callable[[], Mapping[str, Any]]) -> None:
        """Save the state here, between two steps, if a checkpoint is due; end the training if the stage must end.

        Call `checkpoint` once a step. `parts` is called only when a checkpoint is due.

        Args:
            parts: returns the rest of the training's state: name -> tensors, numbers, text, and dicts, lists and tuples
                of these. The network and the global generators are always saved, too.

        Raises:
            Cancelled: the stage was asked to end; do not catch it.
        """
        if not callable(parts):
            raise TrainingError(
                f"`parts` (={type(parts).__name__}) of `context.checkpoint` must be a function that returns a dict, as "
                "in context.checkpoint(lambda: {'optimizer': optimizer.state_dict()})."
            )
        self._has_checkpoints = True
        self.ranks.reseed(self._draws, self.steps)
        ending = self._is_ending()
        self._job.keep(lambda: self._saved(parts()), ending)
        if ending:
            raise Cancelled

    def resumed(self) -> dict[str, Any] | None:
        """Restore the network and the generators from the last checkpoint and return its parts; None if there is none.

        A function that calls `checkpoint` must also call `resumed`: before its first step, and after it has created
        every object whose state it restores.

        Raises:
            Unfit: the checkpoint belongs to another training; do not catch it.
        """
        state, self._state = self._state, None
        if state is None:
            return None
        try:
            restore_module(self._job.model, state.part("model"))
            self.steps = state.part("step")
            self.curve[:] = [CurvePoint(**point) for point in state.part("curve")]
            restore_generators(state.part("generators"), self.device)
            if self._job.cost is not None:
                self._job.cost.go_on(state.get("cost"))
            if self._job.sparse is not None:
                self._changed = self._job.sparse.go_on(state.part("dynamics"))
            parts: dict[str, Any] = state.part("own")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unfit(str(error)) from error
        return parts

    def require_resumed(self) -> None:
        """Raise `TrainingError` if there was a checkpoint and the function did not call `resumed`."""
        if self._state is not None:
            raise TrainingError(
                "a training function that calls `context.checkpoint` must call `context.resumed` before its first "
                "step, so that it continues from its checkpoint; add that call."
            )

    def require_changed(self) -> None:
        """Raise `TrainingError` if masks must change, but were not attached, or had not changed for the last time."""
        where, config = self._job.where, self._job.config
        if self._job.sparse is None:
            return
        if self._job.sparse.dynamics is None:
            raise TrainingError(
                f"{given(where, config)} must call `context.attach(optimizer)` before the first step, so that masks "
                "change; call it with the optimizer of the pruned parameters."
            )
        if not self._job.sparse.is_at_target:
            raise TrainingError(
                f"{given(where, config)} ended after {self.steps} steps, before the last change of the masks "
                "(`dynamics.until`); train on, or pass the number of steps to `context.attach(optimizer, steps=...)`."
            )

    def _saved(self, parts: Mapping[str, Any]) -> TrainState:
        state = {
            "step": self.steps,
            "model": module_state(self._job.model),
            "curve": [asdict(point) for point in self.curve],
            "generators": generators(self.device),
            "own": dict(parts),
            "cost": None if self._job.cost is None else self._job.cost.state(),
            "dynamics": None if self._job.sparse is None else self._job.sparse.state(),
        }
        return TrainState.of(state)

    def _change_masks(self, sparse: SparseTraining, optimizer: Optimizer, steps: int | None) -> None:
        """Begin to change masks, or continue from a checkpoint."""
        if sparse.dynamics is not None:
            raise TrainingError(
                "`context.attach` was called twice for pruned parameters, whose masks change within the training; "
                "train them by one optimizer, and attach it once."
            )
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise TrainingError(
                f"`steps` (={steps!r}) of `context.attach` must be an int of at least 1, the steps of the training."
            )
        saved, self._changed = self._changed, None
        sparse.attach(
            self._job.model, optimizer, self._length.steps if steps is None else steps, self._length.epoch, saved
        )

    def _count_batch(self, trained: set[int]) -> None:
        """Count the multiply-accumulates of a batch; optimizers of other parameters may take a step for it, too."""
        if self._stepped & trained or not self._stepped:
            self._stepped.clear()
            if self._job.cost is not None:
                self._job.cost.step(self._length.examples)
        self._stepped |= trained

    def _end_if_asked(self) -> None:
        if not self._has_checkpoints and self._is_ending():
            raise Cancelled

    def _is_ending(self) -> bool:
        """Whether the training ends here: on all processes, if one is asked to."""
        return self.ranks.sums([float(self._job.cancelled())])[0] > 0

    def _count(self) -> None:
        self.steps += 1


def run_own_loop(job: TrainingJob, measured: Callable[[], Measured]) -> FitResult:
    """Train the job's network in place with the function that its settings name, then check what the function leaves.

    Args:
        job: the training; its settings have a `_target_`.
        measured: returns the current metrics of the network on the validation split.

    Raises:
        Cancelled: the stage was asked to end.
        Unfit: the checkpoint to resume from belongs to another training.
        OrchestratorError: the function cannot be imported, or it raised, or the network that it left cannot be used.
    """
    try:
        return _run(job, Context(job, measured))
    except Diverged as error:
        size, said = Train(**job.config).eval_batch_size, str(error).partition(":")[0]
        require_finite({"train": job.data.train, "val": job.data.val}, size, job.device, said)
        raise


def _run(job: TrainingJob, context: Context) -> FitResult:
    where, config, model, data = job.where, job.config, job.model, job.data
    function, before = _function(where, config), shapes_and_dtypes(model)
    seen = TrainingData(data.train, data.val, data.input_shape, data.classes)
    try:
        with lent(model, job.device), context.around(), in_mode(model, training=True):
            function(model, job.task, seen, Train(**config), context)
    except (Cancelled, Unfit, OrchestratorError):
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or "(no message)"
        raise TrainingError(
            f"{given(where, config)} failed after {context.steps} steps with {type(error).__name__}: "
            f"{said.rstrip('.')}; fix the function, or remove `{where}._target_` to use the built-in loop."
        ) from error
    finally:
        if job.sparse is not None:
            job.sparse.release()
    context.require_resumed()
    context.require_changed()
    check_ranks(where, config, model, job.ranks)
    check_network(job, before, context.masks)
    steps = max([context.steps, *(point.step for point in context.curve[-1:])])
    if not steps and (config.get("epochs") or config.get("steps")):
        raise TrainingError(
            f"{given(where, config)} must call `context.attach(optimizer)` before its first step, but no step was "
            f"counted; call it, or `context.report` if no optimizer takes steps, or pass {where}.epochs=0."
        )
    masks = None if job.sparse is None else context.masks
    cost = None if job.cost is None else job.cost.state()
    return FitResult(tuple(context.curve), steps, steps, cost=cost, masks=masks)


def _function(where: str, config: Mapping[str, Any]) -> Callable[..., object]:
    try:
        function = get_object(config["_target_"])
    except (Exception, SystemExit) as error:  # any error in the user's module
        raise TargetError(failure(where, config, error)) from error
    if not callable(function) or isinstance(function, type):
        raise TrainingError(
            f"{given(where, config)} must be a function (model, task, data, config, context) that trains the model, "
            f"not {'a class' if isinstance(function, type) else type(function).__name__}."
        )
    found: Callable[..., object] = function
    return found
