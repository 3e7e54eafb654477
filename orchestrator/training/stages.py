"""Run one stage: train the dense network, or prune and fine-tune one round. No Ray, no MLflow.

A stage is a function of its spec and of the state that it goes on from: a network that is on its device already, or
one that is restored from the store. Both give the same bits.
"""

from __future__ import annotations

import math
import platform
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import nn

import orchestrator
from orchestrator.core.errors import StageMissing
from orchestrator.core.file_names import MASKS, WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact_tree
from orchestrator.core.seeding import derive
from orchestrator.core.specs import NETWORK, StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import FileWriter, Result, WorkOrder
from orchestrator.training import loop, rounds
from orchestrator.training.evaluation import criterion_of, evaluate
from orchestrator.workloads import data, models
from orchestrator.workloads.tasks.classification import ACCURACY
from orchestrator.workloads.weights import initialise, load_state, plain_state, state_digest, write_state
from pruning import MaskKeeper, MaskSet
from pruning.measure.macs import Macs, macs

ELEMENTWISE = frozenset(f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "RMSprop"))
"""Optimizers that move each entry by its own gradients alone."""


@dataclass
class Network:
    """A network on its device, its masks so far, its data, and the digest of its state as it was last committed."""

    model: nn.Module
    masks: MaskSet
    data: data.Data
    digest: str = ""


def train_dense(spec: StageSpec, _inputs: Mapping[str, object], order: WorkOrder) -> Result:
    """Build a network and train it.

    Raises:
        loop.Cancelled: at a batch boundary, once `order.cancelled()` says so.
        OrchestratorError: for what the user can mend: a diverging loss, a target that does not build.
    """
    return Stage(spec, initialised(spec, spec, order), order).result(Stage.train)


def prune_and_finetune(spec: StageSpec, inputs: Mapping[str, object], order: WorkOrder) -> Result:
    """Prune the network that `inputs` holds, or else the store, and fine-tune what is left.

    Raises:
        loop.Cancelled: at a batch boundary, once `order.cancelled()` says so.
        OrchestratorError: for what the user can mend: a diverging loss, a broken law, a target that does not build.
    """
    network = inputs.get(NETWORK) or _restored(spec, order)
    assert isinstance(network, Network)
    return Stage(spec, network, order).result(Stage.prune)


def initialised(dense: StageSpec, spec: StageSpec, order: WorkOrder) -> Network:
    """Return the network of the stage `dense` as its training begins: random, or a checkpoint's."""
    network = _built(dense, spec, order)
    node, place = dense.fields["model"], spec.location.get("model", {}).get("weights")
    if place is not None:
        initialise(network.model, place, node["weights"], node.get("reinitialise") or ())
    return network


def _built(dense: StageSpec, spec: StageSpec, order: WorkOrder) -> Network:
    """Return the network of the stage `dense` with random weights."""
    loaded = data.load({**dense.fields["data"], **spec.location.get("data", {})}, dense.fields.get("sources"))
    seed = derive(dense.fields["seed"], "0/init")
    model = models.build(dense.fields["model"], input_shape=loaded.input_shape, classes=loaded.classes, seed=seed)
    return Network(model.to(torch.device(order.device)), MaskSet({}), loaded)


def _restored(spec: StageSpec, order: WorkOrder) -> Network:
    """Return the network that a stage goes on from, as the store has it."""
    key = str(spec.parent)
    record = order.store.finished([key]).get(key)
    if record is None:
        raise StageMissing(f"stage {key[:12]} is not in the store any more; run the sweep again.")
    lineage = (*order.lineage, *order.specs)
    network = _built(lineage[0], spec, order)
    load_state(network.model, order.store.fetch(key, WEIGHTS))
    if KINDS[record.kind].prunes:
        network.masks = MaskSet.from_bytes(order.store.read(key, MASKS), network.model)
    network.digest = record.weights_digest
    return network


@dataclass(frozen=True)
class Trained:
    """What came of a stage's own work: of pruning also the metrics before fine-tuning, and a record's `details`."""

    fit: loop.FitResult
    before: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


class Stage:
    """One stage on a network: what it does to it, and what it says of itself."""

    def __init__(self, spec: StageSpec, network: Network, order: WorkOrder) -> None:
        torch.set_num_threads(order.threads)
        self._spec, self._network, self._order = spec, network, order
        self._model, self._data = network.model, network.data
        self._device = torch.device(order.device)
        self._config: Mapping[str, Any] = spec.fields[KINDS[spec.kind].training]

    def result(self, act: Callable[[Stage], Trained]) -> Result:
        """Do what the stage is for; return its record and files, and the network as it is now."""
        started, clock = time.time(), time.perf_counter()
        done = act(self)
        spec, network, after, count = self._spec, self._network, self._final(), self._macs()
        weights = plain_state(self._model)
        files: dict[str, FileWriter] = {WEIGHTS: partial(write_state, weights)}
        if KINDS[spec.kind].prunes:
            masks = network.masks.to_bytes()
            files[MASKS] = lambda file: file.write(masks)
        record = StageRecord(
            key=spec.key,
            kind=spec.kind,
            round=spec.round,
            before=done.before,
            after={name: value for name, value in after.items() if math.isfinite(value)},
            metrics=(ACCURACY,),
            curve=done.fit.curve,
            requested_sparsity=spec.fields.get("target"),
            sparsity=network.masks.sparsity(),
            tensor_sparsity=network.masks.sparsities(),
            tensor_sizes=network.masks.sizes(),
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            macs=count.total,
            macs_remaining=count.remaining,
            weights_digest=state_digest(weights),
            mask_digest=network.masks.digest(),
            steps=done.fit.steps,
            best_step=done.fit.best_step,
            started=started,
            started_from=network.digest,
            details=done.details,
            measurements={"seconds": time.perf_counter() - clock},
            warnings=(
                *(
                    f"every weight of {name} is pruned: nothing passes through it"
                    for name in done.details.get("dead_tensors", ())
                ),
                *(f"{name} is {value}" for name, value in after.items() if not math.isfinite(value)),
            ),
            device=str(self._device),
            host=socket.gethostname(),
            attempt=self._order.attempt,
            environment=environment(),
            spec=redact_tree(spec.to_json()),
        )
        return Result(record, files, replace(network, digest=record.weights_digest))

    def train(self) -> Trained:
        """Train the network as it is."""
        return Trained(self._fit())

    def prune(self) -> Trained:
        """Prune, fine-tune under the new masks, and hold what came of it to the laws."""
        spec, earlier = self._spec, self._network.masks
        generator = torch.Generator(self._device).manual_seed(derive(spec.fields["seed"], f"{spec.round}/mask"))
        chosen, masks = rounds.prune_round(self._model, spec.fields, earlier, generator)
        self._network.masks = masks
        before = evaluate(self._model, self._data.val, **self._evaluation())
        rounds.hold_finite(before)
        if spec.fields["prune"]["holding"] == "hooks":
            masks.apply(self._model)
            fit = self._fit()
            rounds.make_plain(self._model)
        else:
            keeper = MaskKeeper(self._model, masks, _gradients(self._config))
            fit = self._fit(keeper)
            keeper.release()
        dead = rounds.hold_laws(chosen, spec.fields, earlier, masks, plain_state(self._model))
        details = {"dead_tensors": list(dead), "rounding": rounds.rounding(chosen, spec.fields)}
        return Trained(fit, _prefixed("val", before), details)

    def _fit(self, keeper: MaskKeeper | None = None) -> loop.FitResult:
        return loop.fit(
            self._model,
            self._data,
            self._config,
            seed=derive(self._spec.fields["seed"], f"{self._spec.round}/fit"),
            device=self._device,
            on_optimizer=None if keeper is None else keeper.attach,
            cancelled=self._order.cancelled,
        )

    def _final(self) -> dict[str, float]:
        """Metrics of the selected model; the test split is read here and nowhere else."""
        found = _prefixed("val", evaluate(self._model, self._data.val, **self._evaluation()))
        if not KINDS[self._spec.kind].reads_test:
            return found
        return found | _prefixed("test", evaluate(self._model, self._data.test, **self._evaluation()))

    def _evaluation(self) -> dict[str, Any]:
        return {
            "device": self._device,
            "batch_size": self._config["eval_batch_size"],
            "precision": self._config["precision"],
            "loss": criterion_of(self._config["loss"], self._device),
        }

    def _macs(self) -> Macs:
        example = data.example(self._data.train).unsqueeze(0).to(self._device)  # a real one: tokens are integers
        return macs(self._model, example, self._network.masks)


def environment() -> dict[str, str]:
    """Return the versions that results may depend on."""
    return {
        "python": platform.python_version(),
        "processor": processor(),
        "torch": str(torch.__version__),  # not a class of torch's, which a driver would import to read it
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "orchestrator": orchestrator.__version__,
    }


@cache
def processor() -> str:
    """Return the model of the processor and what torch uses of it: results are bit-equal on processors of one kind."""
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"


def _gradients(config: Mapping[str, Any]) -> Literal["masked", "dense"]:
    """Return how gradients are kept: dense ones cost less, and the bits are equal where no entry moves another."""
    alone = config.get("clip_norm") is None and config["optimizer"]["_target_"] in ELEMENTWISE
    return "dense" if alone else "masked"


def _prefixed(split: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{split}/{name}": value for name, value in metrics.items()}
