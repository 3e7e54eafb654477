"""Training loop in plain PyTorch; one seed decides all random draws, and calls share no state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from orchestrator.config.key_rules import violations
from orchestrator.config.training import Train
from orchestrator.core.errors import Cancelled as Cancelled
from orchestrator.core.records import CurvePoint
from orchestrator.core.seeding import derive, seeded
from orchestrator.training.loop.evaluation import evaluate_together, monitored
from orchestrator.training.loop.training_job import (
    Averages,
    FitResult,
    Gradients,
    Steps,
    TrainingError,
    TrainingJob,
    optimizer_of,
    scaler_of,
    scheduler_of,
)
from orchestrator.training.loop.training_job import Diverged as Diverged
from orchestrator.training.stage_networks import MISFITS
from orchestrator.training.state.resuming import Resumable, Unfit
from orchestrator.training.state.train_state import TrainState, extra_state, restore_extra_state
from orchestrator.training.team.together import Alone, Together, synchronised
from orchestrator.workloads.inspection import require_finite
from orchestrator.workloads.splits import Batch
from orchestrator.workloads.tasks.supervised import Supervised
from pruning.measure.macs import in_mode

CHECK_EVERY = 100
"""Largest number of steps between two checks of the losses; a check waits for the device."""


def fit(job: TrainingJob) -> FitResult:
    """Train the job's network in place on its device and leave the selected weights and buffers in it.

    Data order and dropout depend on the seed alone; the caller's generators are restored. The curve gets a point after
    every `eval_every` steps and after the last step, with `train/loss` (mean since the previous point), `val/loss`, the
    task's metrics, as in `val/rmse`, and `lr` (of the last step, in the first parameter group). `select: best` never
    selects the state before the first step: a network that was just pruned must not be returned as fine-tuned.

    Raises:
        Cancelled: `cancelled` returned True.
        Unfit: `state` belongs to another training.
        Diverged: a training or validation loss is infinite or NaN.
        OrchestratorError: the configuration breaks a rule, or its optimizer, scheduler or loss cannot be created.
    """
    for sentence in violations(job.where, Train, {**vars(Train()), **job.config}):
        raise TrainingError(sentence)
    job.model.to(job.device)
    with seeded(derive(job.seed, "training"), job.device), synchronised(job.model, job.ranks) as norms:
        run = _LoopRun(job, norms)
        run.since = run.at(job.since)
        if job.on_optimizer is not None:
            job.on_optimizer(run.optimizer)
        if job.state is not None:
            run.go_on(job.state)
            run.require_since()
        with in_mode(job.model, training=True), run.changing_masks():
            run.train(run.length if job.until is None else run.at(job.until))
            kept = None if job.until is None else run.state().copied() if job.selects else run.state()
        run.passes.require_equal()
        return run.result(kept)


class _LoopRun(Resumable):
    """Training in progress: the state of the optimizer, the current step, and the best weights so far."""

    def __init__(self, job: TrainingJob, norms: Sequence[Any]) -> None:
        self.job, self.config = job, Train(**job.config)
        config, where, ranks = self.config, job.where, job.ranks
        self.scaler = scaler_of(config.precision, job.device, where)
        self.monitor = monitored(job.task, config.monitor, where)
        read = partial(
            job.data.train.batches,
            config.batch_size,
            device=job.device,
            seed=derive(job.seed, "order"),
            drop_last=config.drop_last,
        )
        batches, searched = (read(), None) if ranks.share is None else (read(share=ranks.share), read())
        self.steps = Steps(batches, config.accumulate, searched)
        self.epoch_length = len(self.steps)
        self.length = config.steps if config.steps is not None else (config.epochs or 0) * self.epoch_length
        if not self.epoch_length and (config.steps or config.epochs):
            raise TrainingError(
                f"`{where}.batch_size` (={config.batch_size}) must be at most {len(job.data.train)}, the size of the "
                "training split, if drop_last is true; pass a smaller batch_size."
            )
        self.parameters = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
        self.optimizer = optimizer_of(config, self.parameters, where)
        self.gradients = Gradients(config, job.model, self.parameters, where)
        self.scheduler = scheduler_of(config, self.optimizer, self.length, self.epoch_length, where)
        # Not a bound method: a reference cycle would keep the loader's processes alive until the collector runs.
        loss_of: Callable[[Any], Tensor] = partial(job.task.loss, job.model)
        loss_of = torch.compile(loss_of) if config.compile else loss_of
        self.passes = Alone(job, loss_of) if ranks.share is None else Together(job, loss_of, norms)
        self.averages = None if config.ema is None else Averages(self.parameters, config.ema)
        self.curve, self.losses = [], []

    @contextmanager
    def changing_masks(self) -> Iterator[None]:
        """Change masks inside the context; continue from a checkpoint of this training."""
        sparse, state = self.job.sparse, self.job.state
        if sparse is None:
            yield
            return
        earlier = None if state is None else state.get("dynamics")
        try:
            sparse.attach(self.job.model, self.optimizer, self.length - self.since, self.epoch_length, earlier)
        except (*MISFITS, RuntimeError) as error:
            if earlier is None:
                raise
            raise Unfit(str(error)) from error
        try:
            with sparse.told():
                yield
        finally:
            sparse.release()

    def result(self, kept: TrainState | None) -> FitResult:
        """Leave the selected weights in the model, unless the job keeps those of the last step; return the result."""
        job, cost = self.job, None if self.job.cost is None else self.job.cost.state()
        if not job.selects:
            return FitResult(tuple(self.curve), self.step, self.step, kept, cost)
        self._select()
        selected = self.step if job.until is not None and self.best_state is None else self.selected_step
        steps, best = self.step - self.since, max(0, selected - self.since)
        masks = None
        if job.sparse is not None and (job.until is None or self.at_target):
            masks = job.sparse.masks if self._is_last_selected else self.best_masks
        return FitResult(tuple(self.curve), steps, best, kept, cost, masks)

    @property
    def at_target(self) -> bool:
        """Whether the masks prune as much as in the end."""
        return self.job.sparse is None or self.job.sparse.is_at_target

    @property
    def _is_last_selected(self) -> bool:
        return self.best_state is None or self.selected_step == self.step

    def train(self, last: int) -> None:
        """Take the steps up to the `last` one, unless the training ends early."""
        every = self.config.eval_every or self.epoch_length
        left = range(self.step + 1, (self.step if self.stale == self.config.patience else last) + 1)
        # The range comes first: zip reads it first, so no batch after the last step is loaded.
        for step, batches in zip(left, self.steps.after(self.step), strict=False):
            ending = self.passes.agree(batches, self.losses, ending=self.job.cancelled())
            self.job.keep(self.state, ending)
            if ending:
                raise Cancelled
            self._update(batches)
            self.step = step
            if not self.skipped:
                self._schedule("step")
            if step % self.epoch_length == 0:
                self._schedule("epoch")
            if step % every == 0 or step == self.length or len(self.losses) % CHECK_EVERY == 0:
                self.passes.settle(self.losses)
            if step % every == 0 or step == self.length:
                with nullcontext() if self.averages is None else self.averages.in_force():
                    point = self._point()
                    self.job.on_point(point)
                    self.stale = 0 if self._keep(point) else self.stale + 1
                if self.stale == self.config.patience:
                    break
            elif len(self.losses) % CHECK_EVERY == 0:
                self._mean_loss()

    def _update(self, batches: Sequence[Batch]) -> None:
        """Take one step along the mean gradient of all examples of the `batches`."""
        if self.job.cost is not None:
            self.job.cost.step(self.passes.examples(batches))
        for parameter in self.parameters:  # `zero_grad` does the same in ten times the time
            parameter.grad = None
        loss = self.passes.backward(batches, self.scaler, self.step)
        self.gradients.finish(self.scaler, self.optimizer)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped = self.scaler.get_scale() < scale
        if self.averages is not None and not self.skipped:
            self.averages.update()
            if self.job.sparse is not None:
                self.job.sparse.mask(self.job.model, self.averages.values)
        self.losses.append(loss)
        self.rate = float(self.optimizer.param_groups[0]["lr"])

    def _schedule(self, interval: str) -> None:
        if self.scheduler is None or isinstance(self.scheduler, ReduceLROnPlateau):
            return
        if self.config.scheduler_interval == interval:
            self.scheduler.step()

    def _point(self) -> CurvePoint:
        train_loss = self._mean_loss()
        found = self._evaluated()
        if not math.isfinite(found["loss"]):
            raise self._diverged("validation", self.step, found["loss"])
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(found["loss"])
        self.losses.clear()
        metrics = {
            "train/loss": train_loss,
            **{f"val/{name}": value for name, value in found.items() if math.isfinite(value)},
            "lr": self.rate,
        }
        point = CurvePoint(self.step - self.since, self.step / self.epoch_length, time.time(), metrics)
        self.curve.append(point)
        return point

    def _evaluated(self) -> Mapping[str, float]:
        """Return the metrics on validation, which all ranks measure together."""
        job = self.job
        return evaluate_together(job.model, job.data.val, job.task, job.device, self.config, job.ranks)

    def _mean_loss(self) -> float:
        """Return the mean loss since the last point; raise `Diverged` at the first loss that is not finite."""
        values = torch.stack(self.losses).double().tolist()
        for index, value in enumerate(values):
            if not math.isfinite(value):
                raise self._diverged("training", self.step - len(values) + 1 + index, value)
        return math.fsum(values) / len(values)

    def _diverged(self, which: str, step: int, loss: float) -> Diverged:
        """Return the error to raise for a loss that is not finite; raise `DataError` if the data are at fault."""
        said = f"the {which} loss is {loss} at step {step}"
        if which == "validation":
            require_finite({"val": self.job.data.val}, self.config.eval_batch_size, self.job.device, said)
        self.steps.require_finite(step, said)
        if which == "training" and step == self.since + 1:
            precision = "" if self.config.precision == "fp32" else f", or pass {self.job.where}.precision=fp32"
            return Diverged(
                f"{said}, before any weight was changed; fix the outputs of `model` or the loss of `task`{precision}."
            )
        return Diverged(
            f"{said}: training diverged; lower `{self.job.where}.optimizer.lr`, or clip gradients with "
            f"`{self.job.where}.clip_norm=1.0`."
        )

    def _keep(self, point: CurvePoint) -> bool:
        """Store the weights if they are a new best; return whether they are, or are not to be compared yet."""
        if not self.at_target:
            return True
        value = self.monitor.gain(point.metrics.get(f"val/{self.monitor.name}", math.nan), 0.0)
        if not math.isfinite(value) and (self.config.select == "best" or self.config.patience is not None):
            remedy = "pass train.monitor=loss finetune.monitor=loss"
            if not isinstance(self.job.task, Supervised):
                remedy = f"fix `measure` of `task` (={type(self.job.task).__name__}), or {remedy}"
            raise TrainingError(
                f"`{self.job.where}.monitor` (={self.monitor.name}) must be finite on the validation split, but is not "
                f"at step {point.step}, while the loss is; {remedy}."
            )
        improved = value > self.best
        if improved:
            self.best = value
        if self.config.select == "last" or improved:
            self.selected_step = self.step
        if self.config.select == "best" and improved:
            with torch.no_grad():
                self.best_state = [tensor.detach().clone() for tensor in self._state()]
            self.best_extra = deepcopy(extra_state(self.job.model))
            self.best_masks = None if self.job.sparse is None else self.job.sparse.masks
        return improved

    def _select(self) -> None:
        """Copy the selected weights into the model."""
        if self.averages is not None:
            self.averages.apply()
        if self._is_last_selected or self.best_state is None:
            return
        with torch.no_grad():
            for tensor, best in zip(self._state(), self.best_state, strict=True):
                tensor.copy_(best)
        restore_extra_state(self.job.model, self.best_extra)
