"""Stages that deploy a network and measure it against the dense network. No Ray, no MLflow.

A deployment shrinks the masked network, writes the smaller one in a format, and checks its outputs against those of
the masked network. A measurement times two deployments in turns. Its figures depend on the machine, so they are no part
of the result that a record stands for.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import torch
from torch import nn

from orchestrator.catalogue.formats import FORMATS, SHRINK
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import DENSE, NETWORK
from orchestrator.core.work_order import FileWriter, Result, StageOrder
from orchestrator.deploy.checked_writing import CODECS, Masked, shrunk, smaller_for, write_checked
from orchestrator.deploy.dense_runtimes import DenseRuntimes
from orchestrator.deploy.formats.format import ExportError, Stepper, call, called_with, resized
from orchestrator.deploy.latency_measuring import Measuring
from orchestrator.training.stage_networks import Network, finished, fitting, restored
from orchestrator.training.stage_record import begin, reading_record, timed
from orchestrator.training.state.checkpointing import environment
from orchestrator.workloads.weight_files import plain_state, state_digest, write_state
from pruning.graph.tracing import Example
from pruning.measure.latency import Call, Make, calling

AFTER_WRITING = (1, 2)
"""Batch sizes for which a deployment is written; its measurement writes it for its own."""


def deploy(order: StageOrder, _network: object) -> Result:
    """Shrink a finished network and write it in a format; the stage's files are its weights and the format's files.

    Where the smaller network says that it cannot compute what the masked one does, its own metrics are measured.

    Raises:
        ExportError: the network cannot be traced or written in the format, a package is missing, or the outputs differ
            from those of the masked network.
    """
    spec, begun, chosen = order.spec, begin(order), CODECS.get(order.spec.typed.format)
    network, row = _restored(spec.inputs[NETWORK], order), FORMATS[spec.typed.format]
    model = network.model.cpu().eval()  # a GPU may round float32 to TF32 in convolutions
    masked = Masked(model, network.data, order.lineage[-1], AFTER_WRITING)
    smaller = smaller_for(chosen, model, masked.example(0), partial(_smaller, network))
    weights, report = plain_state(smaller), getattr(smaller, "shrunk", None)
    files: dict[str, FileWriter] = {WEIGHTS: partial(write_state, weights)}
    size, remedy = sum(tensor.nbytes for tensor in weights.values()), f"leave {row.name} out of `deploy.formats`"
    if chosen is None:
        difference, achieved = masked.checked(partial(call, smaller), smaller, row, remedy)
    else:
        with TemporaryDirectory() as place:
            made = write_checked(masked, smaller, chosen, Path(place), threads=order.worker.threads, remedy=remedy)
            difference, achieved, size = made.difference, made.achieved, made.bytes
            files |= {file: partial(_write, (Path(place) / file).read_bytes()) for file in chosen.files}
    record = replace(
        reading_record(finished(spec.inputs[NETWORK], order), order, begun),
        after=achieved,
        weights_digest=state_digest(weights),
        details={} if report is None else {"form": report.form, "kept": report.kept},
    )
    parameters = sum(parameter.numel() for parameter in smaller.parameters())
    return Result(timed(record, {"bytes": size, "parameters": parameters, "difference": difference}), files, None)


def measure(order: StageOrder, _network: object) -> Result:
    """Measure the latency of a deployed network against the deployed dense network, at each batch size.

    Raises:
        Cancelled: between two blocks, once the stage is cancelled.
    """
    begun, inputs, name, what = begin(order), order.spec.inputs, order.spec.typed.format, order.spec.typed.measure
    pruned, dense = finished(inputs[NETWORK], order), finished(inputs[DENSE], order)
    figures = {each: pruned.measurements[each] for each in ("bytes", "parameters")}
    figures["dense_bytes"] = dense.measurements["bytes"]
    network = _restored(pruned.inputs[NETWORK], order)
    measuring = Measuring(what, order, _device(network))
    with TemporaryDirectory() as place:
        compared = _comparison(dense, pruned, network, Path(place), order, measuring)
        for size in what.batch_sizes:
            figures |= compared(_example(network, size), size)
    package = FORMATS[name].packages[-1:] or ("torch",)
    record = replace(
        reading_record(pruned, order, begun),
        after=pruned.after,
        weights_digest=pruned.weights_digest,
        details={"dense": dict(dense.after)} if dense.after else {},
        warnings=measuring.warnings,
        environment=environment(order.worker.device)
        | _processor(network, name)
        | measuring.environment
        | {"threads": str(what.threads), "runtime": f"{package[0]} {version(package[0])}"},
    )
    return Result(timed(record, figures | {"others": measuring.others}), {}, None)


def _comparison(
    dense: StageRecord,
    pruned: StageRecord,
    network: Network,
    place: Path,
    order: StageOrder,
    measuring: Measuring,
) -> Callable[[Example, int], dict[str, float]]:
    """Return a function that measures the pruned network against the dense one: (example, batch size) -> figures."""
    name, threads = str(order.spec.typed.format), order.spec.typed.measure.threads
    if name == SHRINK:
        whole, smaller = _smaller(_restored(dense.inputs[NETWORK], order)), _smaller(network)
        return lambda example, size: measuring.figures(calling(whole, example), calling(smaller, example), size)
    make, folder = partial(_loading, name, threads), _folder(pruned, place, order)
    if CODECS[name].against_fastest:
        whole = _smaller(_restored(dense.inputs[NETWORK], order))
        int8 = FORMATS[name].changes_outputs
        runtimes = DenseRuntimes(whole, _example(network, 2), place, threads, int8=int8)
        return lambda example, size: measuring.figures_against_fastest(runtimes, make(folder, example), example, size)
    other = _folder(dense, place, order)

    def compared(example: Example, size: int) -> dict[str, float]:
        found, step = measuring.figures(make(other, example), make(folder, example), size), CODECS[name].stepper
        if step is None or step(folder, threads, example) is None:
            return found
        dense_step, own_step = (partial(_stepping, step, each, threads, example) for each in (other, folder))
        return found | measuring.token(dense_step, own_step, size)

    return compared


def _processor(network: Network, name: str) -> dict[str, str]:
    """Return the GPU's name when the PyTorch network is timed on one."""
    device = _device(network)
    return {"processor": torch.cuda.get_device_name(device)} if name == SHRINK and device.type == "cuda" else {}


def _restored(key: str, order: StageOrder) -> Network:
    """Return the network of the stage `key`; on the CPU for any format other than PyTorch."""
    network = restored(key, order)
    if order.spec.typed.format != SHRINK:
        network.model.cpu()
    return network


def _smaller(network: Network) -> nn.Module:
    """Return the network in evaluation mode, without the channels and units that masks have emptied."""
    if not network.masks.sparsity():
        return network.model.eval()
    try:
        return shrunk(network.model, _example(network, 2))
    except ExportError as error:
        raise ExportError(f"the network cannot be shrunk: {str(error).rstrip('.')}; pass deploy=none.") from error


def _example(network: Network, size: int) -> Example:
    """Return the network's inputs for `size` examples of the validation split; examples repeat if it has fewer."""
    batch = next(iter(network.data.val.batches(size, device=_device(network))))
    return resized(called_with(network.model, batch), size)


def _device(network: Network) -> torch.device:
    return next((each.device for each in network.model.parameters()), torch.device("cpu"))


def _write(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def _folder(record: StageRecord, place: Path, order: StageOrder) -> Path:
    """Return a folder with the files of a deployment: copied from the store, or written anew if loading them runs code.

    Somebody else may have written the store, so its code is never run: new files are written from tensors only.
    """
    folder, chosen = place / record.key, CODECS[str(order.spec.typed.format)]
    measure = order.spec.typed.measure
    folder.mkdir()
    if chosen.runs_code:
        network = _restored(record.inputs[NETWORK], order)
        torch.set_num_threads(measure.threads)
        chosen.write(_smaller(network), _example(network, 2), folder, batch_sizes=measure.batch_sizes)
        return folder
    for name in chosen.files:
        shutil.copyfile(order.store.stages.fetch(record.key, name), folder / name)
    with fitting(record.key, chosen.files[0], (Exception,)):  # each runtime raises its own types
        chosen.load(folder, measure.threads)
    return folder


def _stepping(step: Stepper, folder: Path, threads: int, example: Example) -> Call:
    """Load the deployment again, and return its call for one more token."""
    found = step(folder, threads, copy.deepcopy(example))
    assert found is not None
    return found


def _loading(name: str, threads: int, folder: Path, example: Example) -> Make:
    """Return a function that loads the deployment again and binds it to its own copy of the inputs."""

    def make() -> Call:
        return partial(CODECS[name].load(folder, threads), copy.deepcopy(example))

    return make
