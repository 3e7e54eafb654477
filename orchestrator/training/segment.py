"""Run one stage: train the dense network, or prune and fine-tune one round. No Ray, no MLflow.

A stage is a function of its spec and of its parent's state. Between the stages of a segment the network stays on its
device; a segment that begins with a round restores it from the store. Both give the same bits.
"""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

import orchestrator
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import MASKS, WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.seeding import derive
from orchestrator.core.specs import StageSpec
from orchestrator.core.work_order import WorkOrder
from orchestrator.training import loop, rounds
from orchestrator.workloads import data, models
from pruning import MaskKeeper, is_pruned
from pruning.macs import Macs, macs
from pruning.masks import MaskSet

ELEMENTWISE = frozenset(f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "RMSprop"))
"""Optimizers that move each entry by its own gradients alone."""


def run_segment(order: WorkOrder) -> Iterator[StageRecord]:
    """Run the stages of `order` one after another; yield each stage's record once it is durable.

    Raises:
        loop.Cancelled: at a batch boundary, once `order.cancelled()` says so.
        OrchestratorError: for what the user can mend: a diverging loss, a broken law, a target that does not build.
    """
    torch.set_num_threads(order.threads)
    first = order.specs[0]
    session = Session(first, order) if first.kind == "dense" else Session.restore(first, order)
    for spec in order.specs:
        record, files = session.run(spec)
        yield order.store.commit(record, files)


class Session:
    """A network on its device, and what its stages share: the data and the dense stage they stem from."""

    def __init__(self, dense: StageSpec, order: WorkOrder) -> None:
        self._order = order
        self._device = torch.device(order.device)
        fields = dense.fields
        self._data = data.load({**fields["data"], **order.specs[0].location})
        self._dense = fields
        self._model = models.build(
            fields["model"],
            input_shape=self._data.input_shape,
            classes=self._data.classes,
            seed=derive(fields["seed"], "0/init"),
        ).to(self._device)
        self._masks = MaskSet({})

    @classmethod
    def restore(cls, first: StageSpec, order: WorkOrder) -> Session:
        """Return the session as the parent of `first` left it, from the store."""
        key = str(first.parent)
        dense, parent = _ancestry(key, order)
        session = cls(dense, order)
        session._model.load_state_dict(load_tensors(order.store.read(key, WEIGHTS)))
        if parent.kind == "round":
            session._masks = MaskSet.from_bytes(order.store.read(key, MASKS), session._model)
        return session

    def run(self, spec: StageSpec) -> tuple[StageRecord, dict[str, bytes]]:
        """Run one stage on the network as it stands; return its record and its files."""
        started = time.time()
        clock = time.perf_counter()
        record = self._train(spec) if spec.kind == "dense" else self._round(spec)
        weights = plain_state(self._model)
        files = {WEIGHTS: save_tensors(weights)}
        if spec.kind == "round":
            files[MASKS] = self._masks.to_bytes()
        record = replace(
            record,
            weights_digest=state_digest(weights),
            mask_digest=self._masks.digest(),
            seconds=time.perf_counter() - clock,
            started=started,
            device=str(self._device),
            host=socket.gethostname(),
            attempt=self._order.attempt,
            environment=environment(),
            spec=spec.to_json(),
        )
        return record, files

    def _train(self, spec: StageSpec) -> StageRecord:
        config = spec.fields["train"]
        fit = self._fit(spec, config)
        count = self._macs()
        return _record(spec, fit, {}, self._final(config), self._model, count.total, count.total)

    def _round(self, spec: StageSpec) -> StageRecord:
        config, parent = spec.fields["finetune"], self._masks
        generator = torch.Generator(self._device).manual_seed(derive(spec.fields["seed"], f"{spec.round}/mask"))
        chosen, self._masks = rounds.prune_round(self._model, spec.fields, parent, generator)
        before = loop.evaluate(self._model, self._data.val, **self._evaluation(config))
        rounds.hold_finite(before)
        if spec.fields["prune"]["holding"] == "hooks":
            self._masks.apply(self._model)
            fit = self._fit(spec, config)
            rounds.make_plain(self._model)
        else:
            keeper = MaskKeeper(self._model, self._masks, _gradients(config))
            fit = self._fit(spec, config, keeper)
            keeper.release()
        after = self._final(config)
        dead = rounds.hold_laws(chosen, spec.fields, parent, self._masks, plain_state(self._model))
        count = self._macs()
        record = _record(spec, fit, _prefixed("val", before), after, self._model, count.total, count.remaining)
        return replace(
            record,
            requested_sparsity=spec.fields.get("target"),
            sparsity=self._masks.sparsity(),
            tensor_sparsity=self._masks.sparsities(),
            tensor_sizes=self._masks.sizes(),
            warnings=tuple(f"every weight of {name} is pruned: nothing passes through it" for name in dead),
        )

    def _fit(self, spec: StageSpec, config: Mapping[str, Any], keeper: MaskKeeper | None = None) -> loop.FitResult:
        return loop.fit(
            self._model,
            self._data,
            config,
            seed=derive(spec.fields["seed"], f"{spec.round}/fit"),
            device=self._device,
            on_optimizer=None if keeper is None else keeper.attach,
            cancelled=self._order.cancelled,
        )

    def _final(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Metrics of the selected model; the test split is read here and nowhere else."""
        return {
            **_prefixed("val", loop.evaluate(self._model, self._data.val, **self._evaluation(config))),
            **_prefixed("test", loop.evaluate(self._model, self._data.test, **self._evaluation(config))),
        }

    def _evaluation(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "device": self._device,
            "batch_size": config["eval_batch_size"],
            "precision": config["precision"],
            "loss": config["loss"],
        }

    def _macs(self) -> Macs:
        example = torch.zeros(1, *self._data.input_shape, device=self._device)
        return macs(self._model, example, self._masks)


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict of `model` as if it had never been pruned: masked weights under their own names, on CPU."""
    state = model.state_dict()
    plain: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name in [key.removesuffix("_orig") for key in dict(module.named_parameters(recurse=False))]:
            path = f"{prefix}.{name}" if prefix else name
            if f"{path}_mask" in state and f"{path}_orig" in state and is_pruned(module):
                plain[path] = state.pop(f"{path}_orig") * state.pop(f"{path}_mask")
    plain.update(state)
    return {name: plain[name].detach().cpu().clone().contiguous() for name in sorted(plain)}


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def environment() -> dict[str, str]:
    """Return the versions that results may depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # not a class of torch's, which a driver would import to read it
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "orchestrator": orchestrator.__version__,
    }


def _ancestry(key: str, order: WorkOrder) -> tuple[StageSpec, StageSpec]:
    """Return the specs of the dense stage that `key` stems from, and of `key` itself."""
    specs: list[StageSpec] = []
    parent: str | None = key
    while parent is not None:
        record = order.store.finished([parent]).get(parent)
        if record is None:
            raise OrchestratorError(f"stage {parent[:12]} is not in the store any more; run the sweep again.")
        specs.append(StageSpec.from_json(record.spec))
        parent = specs[-1].parent
    return specs[-1], specs[0]


def _gradients(config: Mapping[str, Any]) -> Literal["masked", "dense"]:
    """Return how gradients are kept: dense ones cost less, and the bits are equal where no entry moves another."""
    alone = config.get("clip_norm") is None and config["optimizer"]["_target_"] in ELEMENTWISE
    return "dense" if alone else "masked"


def _prefixed(split: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{split}/{name}": value for name, value in metrics.items()}


def _record(
    spec: StageSpec,
    fit: loop.FitResult,
    before: Mapping[str, float],
    after: Mapping[str, float],
    model: nn.Module,
    macs: int,
    macs_remaining: float,
) -> StageRecord:
    return StageRecord(
        key=spec.key,
        kind=spec.kind,
        round=spec.round,
        before=before,
        after=after,
        curve=fit.curve,
        requested_sparsity=None,
        sparsity=0.0,
        tensor_sparsity={},
        tensor_sizes={},
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        macs=macs,
        macs_remaining=macs_remaining,
        weights_digest="",
        mask_digest="",
        steps=fit.steps,
        best_step=fit.best_step,
        seconds=0.0,
        started=0.0,
    )
