"""The stages that deploy a network, and measure it beside the dense one. No Ray, no MLflow.

A deployment takes out what masks have emptied, and holds the result to the outputs of the masked network. A measurement
times two deployments in turns; its figures are circumstances of the record, and no part of its result.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import pruning
from orchestrator.compare.statistics import ratio
from orchestrator.core.errors import Cancelled, OrchestratorError, StageMissing
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact_tree
from orchestrator.core.specs import DENSE, NETWORK, StageSpec
from orchestrator.core.work_order import Result, WorkOrder
from orchestrator.training.environment import environment
from orchestrator.training.networks import Network, restored
from orchestrator.workloads.tasks.batch import answer_of, arguments, outputs_of
from orchestrator.workloads.weights import plain_state, state_digest, write_state
from pruning.measure.latency import Call, LatencyRatio, Make, calling, compare_latency

EXAMPLES, BATCHES = 64, 4
"""Of the test split, by which the outputs of a deployment are held to those of the masked network."""
TOLERANCE = 1e-4
"""By how much these may differ, relative to the largest."""
IDLE = 0.5
"""Other processes that ran on average during a measurement, below which nothing is said of them."""

Inputs = tuple[Any, ...] | Mapping[str, Any]


class DeployError(OrchestratorError):
    """A network that cannot be deployed: it cannot be traced, or gives other outputs."""

    repeats = True


def deploy(spec: StageSpec, _inputs: Mapping[str, object], order: WorkOrder) -> Result:
    """Take out of a finished network what is empty; its weights are the stage's file.

    Raises:
        DeployError: it cannot be traced, or its outputs are not those of the masked network.
    """
    begun = _begin(order)
    network = restored(spec, order)
    smaller = _deployed(network)
    difference = _difference(network, smaller)
    if not difference <= TOLERANCE:
        raise DeployError(
            f"the outputs of the network as {spec.fields['format']} differ from those of the masked one by "
            f"{difference:.2g} of the largest, and must not by more than {TOLERANCE:g}; leave the format out of "
            "`deploy.formats`."
        )
    weights, report = plain_state(smaller), getattr(smaller, "shrunk", None)
    details = {} if report is None else {"form": report.form, "kept": report.kept}
    parameters = sum(parameter.numel() for parameter in smaller.parameters())
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    record = replace(
        _record(spec, _finished(spec, NETWORK, order), order, begun),
        weights_digest=state_digest(weights),
        details=details,
    )
    figures = {"bytes": size, "parameters": parameters, "difference": difference}
    return Result(_timed(record, figures), {WEIGHTS: partial(write_state, weights)}, None)


def measure(spec: StageSpec, _inputs: Mapping[str, object], order: WorkOrder) -> Result:
    """Time a deployed network beside the deployed dense one, at each batch size.

    Raises:
        Cancelled: between two blocks, once `order.cancelled()` says so.
    """
    begun, what = _begin(order), spec.fields["measure"]
    above, dense = _finished(spec, NETWORK, order), _finished(spec, DENSE, order)
    deployed = order.lineage[-1]
    ours = restored(deployed, order)
    theirs = restored(replace(deployed, inputs={NETWORK: dense.inputs[NETWORK]}), order)
    pairs = [(_deployed(network), network) for network in (theirs, ours)]
    figures = {name: above.measurements[name] for name in ("bytes", "parameters")}
    figures["dense_bytes"] = dense.measurements["bytes"]
    others: list[float] = []
    for size in what["batch_sizes"]:
        makes = [_watched(calling(smaller, _inputs_of(network, size)), order, others) for smaller, network in pairs]
        found = compare_latency(*makes, **{name: what[name] for name in ("blocks", "seconds", "threads")})
        figures |= _figures(found, size)
    figures["others"] = statistics.fmean(others)
    busy = (
        f"{figures['others']:.1f} other processes ran on average while latency was measured, on {os.cpu_count()} CPUs: "
        "its figures may be off"
    )
    record = replace(
        _record(spec, above, order, begun),
        weights_digest=above.weights_digest,
        warnings=(busy,) if figures["others"] >= IDLE else (),
        environment=environment() | {"threads": str(what["threads"]), "runtime": f"PyTorch {torch.__version__}"},
    )
    return Result(_timed(record, figures), {}, None)


def _begin(order: WorkOrder) -> float:
    """Return Unix seconds."""
    torch.set_num_threads(order.threads)
    return time.time()


def _record(spec: StageSpec, above: StageRecord, order: WorkOrder, begun: float) -> StageRecord:
    """Return the record of a stage that trains nothing: the network is that of `above`, and has no figures anew."""
    return replace(
        above,
        key=spec.key,
        kind=spec.kind,
        before={},
        after={},
        curve=(),
        steps=0,
        best_step=0,
        started=begun,
        started_from=above.weights_digest,
        details={},
        warnings=(),
        device=order.device,
        host=socket.gethostname(),
        attempt=order.attempt,
        environment=environment(),
        files={},
        spec=redact_tree(spec.to_json()),
    )


def _timed(record: StageRecord, figures: Mapping[str, float]) -> StageRecord:
    return replace(record, measurements={"seconds": max(0.0, time.time() - record.started), **figures})


def _finished(spec: StageSpec, role: str, order: WorkOrder) -> StageRecord:
    """Return the record of an input."""
    key = spec.inputs[role]
    record = order.store.finished([key]).get(key)
    if record is None:
        raise StageMissing(f"stage {key[:12]} is not in the store any more; run the sweep again.", key)
    return record


def _deployed(network: Network) -> nn.Module:
    """Return the network in evaluation, without what masks have emptied."""
    if not network.masks.sparsity():
        return network.model.eval()
    try:
        return pruning.shrink(network.model, _inputs_of(network, 2))
    except (ValueError, TypeError) as error:
        raise DeployError(f"the network cannot be shrunk: {str(error).rstrip('.')}; pass deploy=none.") from error


def _inputs_of(network: Network, size: int) -> Inputs:
    """Return what the network is called with for so many examples of the validation split, some again where it has
    fewer.
    """
    device = next((each.device for each in network.model.parameters()), torch.device("cpu"))
    batch = next(iter(network.data.val.batches(size, device=device)))
    given, named = arguments(network.model, batch, labels=False)
    inputs: Inputs = named or given
    found = max((len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim), default=size)

    def filled(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != found or found >= size:
            return leaf
        return leaf[torch.arange(size, device=leaf.device) % found]

    filled_up: Inputs = tree_map(filled, inputs)
    return filled_up


def _difference(network: Network, deployed: nn.Module) -> float:
    """Return by how much outputs differ on batches of the test split, relative to the largest."""
    model, worst = network.model.eval(), 0.0
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    with torch.no_grad():
        for batch in islice(network.data.test.batches(EXAMPLES, device=device), BATCHES):
            expected, found = (outputs_of(answer_of(each, batch, labels=False)).double() for each in (model, deployed))
            if found.shape != expected.shape or not torch.equal(found.isfinite(), expected.isfinite()):
                return math.inf
            finite = expected.isfinite()
            scale = expected[finite].abs().max() if finite.any() else torch.ones(())
            gap = (found[finite] - expected[finite]).abs().max() if finite.any() else torch.zeros(())
            worst = max(worst, float(gap / scale.clamp_min(1e-30)))
    return worst


def _figures(found: LatencyRatio, size: int) -> dict[str, float]:
    speedup = ratio(found.log_ratios)
    assert speedup is not None
    assert speedup.low is not None
    assert speedup.high is not None
    return {
        f"latency_ms/{size}": 1e3 * found.b,
        f"dense_ms/{size}": 1e3 * found.a,
        f"speedup/{size}": speedup.mean,
        f"speedup_low/{size}": speedup.low,
        f"speedup_high/{size}": speedup.high,
    }


def _watched(make: Make, order: WorkOrder, others: list[float]) -> Make:
    """Return what makes the same, ends where it is cancelled, and notes how many other processes run."""

    def made() -> Call:
        if order.cancelled():
            raise Cancelled
        others.append(_others())
        return make()

    return made


def _others() -> float:
    """Return how many processes run on this machine beside this one; the load average where it does not say so."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]
    return max(0.0, running - 1.0)
