"""Trainings by one process and by several, in processes of their own that meet on loopback."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing
from own_rank_cases import MISTAKES, divided, drawing, gone_on, own
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from training_cases import job, settings, task_of

from orchestrator.core.work_order import Seat
from orchestrator.training.loop.training_job import FitResult
from orchestrator.training.loop.training_loop import fit
from orchestrator.training.team.ranks import ALONE, Processes, joined
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.networks.classifiers import cnn, resnet20
from orchestrator.workloads.networks.gpt import gpt
from orchestrator.workloads.splits import TensorSplit
from orchestrator.workloads.tasks.classification import Classification
from orchestrator.workloads.tasks.language_modelling import LanguageModelling
from orchestrator.workloads.tasks.task import Measured
from orchestrator.workloads.tasks.torch_metrics import TorchMetrics
from pruning import MaskKeeper, MaskSet

CPU = torch.device("cpu")


def _images(count: int, seed: int) -> TensorSplit:
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=draws)
    return TensorSplit(
        torch.randn(count, 1, 8, 8, generator=draws, dtype=torch.float64) + labels.view(-1, 1, 1, 1), labels
    )


def _tokens(count: int, seed: int) -> TensorSplit:
    """Return blocks of tokens, in which the first targets are left out: blocks count for differently many."""
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (count, 9), generator=draws)
    labels = tokens[:, 1:].clone()
    for row, ignored in enumerate(torch.randint(0, 9, (count,), generator=draws).tolist()):
        labels[row, :ignored] = -100
    return TensorSplit(tokens[:, :-1], labels)


def images() -> Data:
    """Return small images of three classes."""
    return Data(_images(46, 0), _images(20, 1), _images(20, 2), (1, 8, 8), 3)


def tokens() -> Data:
    """Return blocks of a text."""
    return Data(_tokens(21, 0), _tokens(8, 1), _tokens(8, 2), (8,), 11)


def network(name: str) -> nn.Module:
    """Return a network in float64."""
    torch.manual_seed(3)
    makers = {
        "cnn": lambda: cnn((1, 8, 8), 3, channels=(4, 8), batch_norm=False),
        "normed": lambda: cnn((1, 8, 8), 3, channels=(4, 8)),
        "resnet20": lambda: resnet20((1, 8, 8), 3, width=4),
        "gpt": lambda: gpt((8,), 11, layers=2, heads=2, width=16),
    }
    found: nn.Module = makers[name]().double()
    return found


class MedianLoss(Classification):
    """Task whose loss on a split is no mean, so that shares of the split would not add up to it."""

    def measure(self, model: nn.Module, batches: Iterable[Any]) -> Measured:
        """Return the median loss."""
        each = [nn.functional.cross_entropy(model(x), y, reduction="none") for x, y in batches]
        return Measured({"loss": float(torch.cat(each).median()), "accuracy": 0.0})


F1 = {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 3}
CASES: Mapping[str, dict[str, Any]] = {
    "cnn": {"network": "cnn", "steps": 30},
    "cnn, one example": {"network": "cnn", "steps": 30, "batch_size": 5, "lr": 0.02, "eval_batch_size": 19},
    "own measure": {"network": "cnn", "steps": 10, "eval_every": 5, "task": MedianLoss()},
    **(
        {"torchmetrics": {"network": "cnn", "steps": 10, "eval_every": 5, "task": TorchMetrics({"f1": F1})}}
        if find_spec("torchmetrics")
        else {}
    ),
    "accumulated": {"network": "cnn", "steps": 24, "accumulate": 3, "clip_norm": 0.1, "ema": 0.9},
    "best of plateaus": {
        "network": "cnn",
        "steps": 60,
        "scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 1},
        "patience": 4,
        "eval_every": 5,
        "select": "best",
    },
    "masked": {"network": "cnn", "steps": 24, "masks": True},
    "gpt": {
        "network": "gpt",
        "steps": 30,
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01, "eps": 1e-4},
    },
    "synchronised": {"network": "resnet20", "steps": 20, "sync": True, "lr": 0.02},
    "own statistics": {"network": "normed", "steps": 20},
    "own function": {"network": "cnn", "function": divided},
}
"""Trainings by name: a network, options of a training, and whether there are masks or synchronised statistics."""


def trained(case: Mapping[str, Any], ranks: Processes) -> tuple[nn.Module, FitResult]:
    """Train a case; return the network and the result."""
    options = {key: value for key, value in case.items() if key not in ("network", "masks", "sync")}
    model, language = network(case["network"]), case["network"] == "gpt"
    keeper = None
    if case.get("masks"):
        names = [name for name, each in model.named_parameters() if each.ndim > 1]
        masks = {name: torch.rand(model.get_parameter(name).shape) < 0.5 for name in names}
        keeper = MaskKeeper(model, MaskSet(masks))
    if language:
        options["task"] = LanguageModelling()
    config = {**settings(**{"batch_size": 8, "eval_batch_size": 7, **options}), "epochs": None}
    task = task_of(config)
    attach = None if keeper is None else keeper.attach
    data = tokens() if language else images()
    found = fit(job(model, task, config, data=data, seed=5, on_optimizer=attach, ranks=ranks))
    return model, found


def outcome(case: Mapping[str, Any], ranks: Processes = ALONE) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Return the weights, buffers and curve of a case."""
    if "function" in case:
        weights, curve = own(case["function"], network(case["network"]), images(), ranks)
        return weights, [dict(point.metrics) for point in curve]
    model, found = trained(case, ranks)
    return model.state_dict(), [dict(point.metrics) for point in found.curve]


def _work(rank: int, size: int, port: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    for name in names:
        seat = Seat(rank, size, port=port, sync_batch_norm=bool(CASES[name].get("sync")))
        with joined(seat, torch.distributed.PrefixStore(name, store), CPU) as ranks:
            torch.save(outcome(CASES[name], ranks), f"{folder}/{names.index(name)}.{rank}.pt")
    with joined(Seat(rank, size, port=port), torch.distributed.PrefixStore("drawing", store), CPU) as ranks:
        makes = partial(network, "cnn")
        both = own(drawing, makes(), images(), ranks)[0], gone_on(makes, images(), ranks)
        torch.save(both, f"{folder}/drawing.{rank}.pt")
    said = {}
    for function in MISTAKES:
        place = torch.distributed.PrefixStore(function.__name__, store)
        try:
            with joined(Seat(rank, size, port=port), place, CPU) as ranks:
                own(function, network("cnn"), images(), ranks)
        except Exception as error:
            said[function.__name__] = f"{type(error).__name__}: {error}"
        store.set(f"{function.__name__} ended/{rank}", "")
        store.wait([f"{function.__name__} ended/{each}" for each in range(size)])
    torch.save(said, f"{folder}/said.{rank}.pt")


def together(size: int, folder: Path) -> dict[str, list[Any]]:
    """Train every case by `size` processes; return name -> outcome of each rank.

    `drawing` is a training with and without an interruption, `said` the errors of functions that make a mistake.
    """
    leader = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # outlives every rank that waits on it
    names = [*CASES]
    multiprocessing.set_forkserver_preload(["rank_cases", "torch._dynamo"])  # once: takes longer than all trainings
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}):
        torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
            _work, (size, leader.port, str(folder), names), size, start_method="forkserver"
        )
    files = {name: str(place) for place, name in enumerate(names)} | {"drawing": "drawing", "said": "said"}
    return {name: [torch.load(folder / f"{file}.{rank}.pt") for rank in range(size)] for name, file in files.items()}
