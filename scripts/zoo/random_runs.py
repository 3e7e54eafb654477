"""Random networks through `shrink` and `to_sparse`: `python -m scripts.zoo.random_runs`.

    python -m scripts.zoo.random_runs                      # seeds 0 to 299, those that have no result
    python -m scripts.zoo.random_runs --again              # all of them once more, for another engine
    python -m scripts.zoo.random_runs --seeds 17 18 --show  # two seeds, with errors in full; nothing is written

Each seed draws a network (`random_networks`) and goes through three parts, which draw their own options:

- shrink: `prune` removes 20 to 60% of channels, parameters or multiply-accumulates in dependency groups, and `shrink`
  gets an example of one item.
- graph: the same, where the smaller network must be the traced graph; not run again if it was one before.
- sparse: `prune` removes 80 to 95% of the entries, or 2 of 4, or blocks of 4, `to_sparse` gets an example of one item,
  with a kernel drawn for each layer in place of the fastest; the network is saved by `torch.save`, and another process
  loads it and compares. Blocks and 2 of 4 are those of linear layers whose inputs they divide.

All compare with the masked network, on batches of 1, 2, 3 and 5 and on other sizes and dtypes that the masked network
takes, within the tolerances of `parts`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import pruning
from pruning.catalogue.kernels import DENSE
from pruning.compact import fused_layers, smaller_network, sparse_graph, sparse_network
from pruning.kernels.sparse_layer import KernelChoice, _candidates
from pruning.kernels.sparse_weight import LayerShape, SparseWeight
from scripts.zoo import parts
from scripts.zoo.__main__ import PAGE, RANDOM, RESULTS, ROOT, current_commit
from scripts.zoo.libraries import versions
from scripts.zoo.page import RANDOM_PARTS, RANDOM_SEEDS, page, read, read_random
from scripts.zoo.parts import Outcome, different, judged, outcome, prune_groups, shrunk, told
from scripts.zoo.random_networks import RandomNetwork, drawn

SECONDS = 120
"""Limit of each part."""


@functools.lru_cache(maxsize=1)
def pruned_groups(network: RandomNetwork, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return the network with dependency groups pruned, and how."""
    draw, model = Random(f"groups {seed}"), copy.deepcopy(network.model)
    budget = draw.choice(("channels", "parameters", "macs"))
    scope = "global" if budget != "channels" else draw.choice(("layer", "global"))
    asked = round(draw.uniform(0.2, 0.6), 2)
    prune_groups(model, network.inputs(draw.choice((1, 2)), 0), asked, scope=scope, budget=budget)
    return model, {"budget": budget, "asked": asked}


def by_groups(network: RandomNetwork, seed: int) -> Outcome:
    """Prune dependency groups, shrink, and compare."""
    model, figures = pruned_groups(network, seed)
    return shrunk(model, network.inputs(1, 0), network, network.calls(), **figures)


def as_graph(network: RandomNetwork, seed: int) -> Outcome:
    """Do the same, where the network's own class is not tried."""

    def refuse(*_: Any) -> nn.Module:
        raise NotImplementedError("not tried")

    with patch.object(smaller_network, "smaller_module", refuse):
        return by_groups(network, seed)


def pruned_entries(network: RandomNetwork, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return the network with most entries pruned, and how."""
    draw, model = Random(f"entries {seed}"), copy.deepcopy(network.model)
    layers = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each.in_features % 4 == 0]
    names = [f"{name}.weight" for name in layers]
    how = draw.choice(("entries",) * 4 + ("2:4", "blocks") * bool(names))
    asked = round(draw.uniform(0.8, 0.95), 2)
    with told():
        if how == "2:4":
            pruning.prune(model, "n_m", n=2, m=4, parameters=names)
        elif how == "blocks":
            pruning.prune(model, "magnitude", sparsity=asked, unit="block", parameters=names)
        else:
            pruning.prune(model, "magnitude", sparsity=asked, scope=draw.choice(("layer", "global")))
    return model, {"how": how} if how == "2:4" else {"how": how, "asked": asked}


def saved_sparse(network: RandomNetwork, seed: int, loader: Loader) -> Outcome:
    """Prune entries, run on the rest, save, and compare in another process."""
    model, figures = pruned_entries(network, seed)
    with drawn_kernels(seed), told():
        faster: Any = pruning.to_sparse(model, network.inputs(1, 0))
    found = faster.sparse
    figures |= {"layers": len(found.layers)}
    figures["sparse"] = sum(any(each.kernel != DENSE for each in layer.choices) for layer in found.layers)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(faster, file := Path(folder) / "network.pt")
        compared = loader.compared(seed, file)
    if compared["verdict"] == parts.RIGHT and found.reason.startswith("unchanged"):
        return outcome(parts.WHOLE, found.reason, **figures)
    return outcome(compared["verdict"], compared["said"] or found.reason, **figures)


@contextlib.contextmanager
def drawn_kernels(seed: int) -> Iterator[None]:
    """Draw a sparse kernel for each layer in place of the fastest, so that small layers run on all of them."""
    draw = Random(f"kernels {seed}")

    def chosen(weight: SparseWeight, layer: LayerShape, bias: Tensor, x: Tensor, *_: Any) -> KernelChoice:
        found = [(name, setting) for name, setting, _ in _candidates(weight, layer, bias, x) if name != DENSE]
        name, setting = draw.choice(found) if found else (DENSE, {})
        return KernelChoice(layer.examples(x.shape), name, dict(setting), 1.0, 1.0)

    with contextlib.ExitStack() as patches:
        for module, name, value in (
            (sparse_graph, "chosen", chosen),
            (fused_layers, "chosen", chosen),
            (sparse_graph, "is_worthwhile", lambda _: True),
            (sparse_graph, "LEAST_SPARSITY", 0.0),
            (sparse_network, "NOISE", 0.0),
            (sparse_network, "TURNS", 1),
            (sparse_network, "TURN", 0.0),
        ):
            patches.enter_context(patch.object(module, name, value))
        yield


class Loader:
    """Process that loads sparse networks, and compares them with masked ones that it makes from their seeds."""

    def __init__(self) -> None:
        self._process = self._begun()

    def _begun(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "scripts.zoo.random_runs", "--load"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def compared(self, seed: int, file: Path) -> Outcome:
        """Return the outcome for the file of a seed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"seed": seed, "file": str(file)}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            with self._process as process:
                status = process.wait()
            self._process = self._begun()
            return outcome(parts.TRACEBACK, f"the process that loads ended with status {status}")
        found: Outcome = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        with self._process as process:  # which closes its pipes
            process.kill()


def load() -> None:
    """Answer lines of standard input, each with a seed and a file, until there is none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        given = json.loads(line)
        try:
            network = drawn(given["seed"])
            model, _ = pruned_entries(network, given["seed"])
            faster = torch.load(given["file"], weights_only=False)
            found = outcome(*(different(model, faster, network, network.calls()) or (parts.RIGHT, "")))
        except Exception as error:
            found = outcome(*judged(error))
        print(json.dumps(found), file=answers, flush=True)


def checked(seed: int, names: Sequence[str], loader: Loader, *, show: bool = False) -> dict[str, Any]:
    """Return the record of a seed: its network and the outcome of each part."""
    network = drawn(seed)
    runs: dict[str, Callable[[RandomNetwork, int], Outcome]] = {
        "shrink": by_groups,
        "graph": as_graph,
        "sparse": functools.partial(saved_sparse, loader=loader),
    }
    found: dict[str, Outcome] = {}
    for name in names:
        if name == "graph" and found.get("shrink", {}).get("form") == "graph":
            found[name] = dict(found["shrink"])
            continue
        begin = time.perf_counter()
        try:
            with _limited():
                found[name] = runs[name](network, seed)
        except _TooSlow:
            found[name] = outcome(parts.SLOW, f"took more than {SECONDS} s")
        except Exception as error:
            if show:
                traceback.print_exception(error)
            found[name] = outcome(*judged(error))
        found[name]["seconds"] = round(time.perf_counter() - begin, 1)
    return {"seed": seed, "layers": network.kinds, "parts": found}


class _TooSlow(BaseException):
    """The limit of a part is over; no forward catches it."""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(seeds: Sequence[int], given: argparse.Namespace) -> None:
    """Check the seeds, and append each record when it is there; the last record of a seed counts."""
    known: Mapping[int, Any] = {} if given.again or given.show else read_random(given.results)
    loader = Loader()
    try:
        for seed in seeds:
            if seed in known:
                continue
            record = checked(seed, given.parts, loader, show=given.show)
            said = {part: each["verdict"] for part, each in record["parts"].items()}
            print(seed, *(f"{part}: {verdict}" for part, verdict in said.items()), flush=True)
            if given.show:
                print(json.dumps(record, indent=1))
                continue
            record |= {"commit": current_commit(), "torch": versions()["torch"]}
            with given.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
    finally:
        loader.close()


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=range(RANDOM_SEEDS), help="seeds to run; 0 to 299 by default"
    )
    parser.add_argument("--parts", nargs="+", choices=RANDOM_PARTS, default=RANDOM_PARTS, help="parts to run")
    parser.add_argument("--again", action="store_true", help="run seeds that have a result")
    parser.add_argument("--show", action="store_true", help="print records and errors in full, and write nothing")
    parser.add_argument("--results", type=Path, default=RANDOM, help="file of results")
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.load:
        load()
        return
    run(given.seeds, given)
    if given.results == RANDOM and not given.show:
        PAGE.write_text(page(read(RESULTS), read_random(RANDOM)))


if __name__ == "__main__":
    main()
