"""The training functions of the how-to page on other libraries: two processes end with the weights of one."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from own_rank_cases import own, shown
from rank_cases import CPU, images, network
from torch._C._distributed_c10d import PrefixStore, TCPStore

from orchestrator.core.work_order import Seat
from orchestrator.training.team.ranks import ALONE, Processes, joined

LIBRARIES = ("accelerate", "lightning", "transformers")
pytestmark = pytest.mark.slow  # imports three large libraries in three processes


def trained(library: str, ranks: Processes) -> tuple[dict[str, torch.Tensor], set[int], int]:
    """Train with a function of the page; return weights, sizes of batches, and the number of groups that it began."""
    model, sizes = network("cnn"), set[int]()
    watched = model.register_forward_pre_hook(lambda _, inputs: sizes.add(len(inputs[0])))
    with mock.patch.object(dist, "init_process_group", wraps=dist.init_process_group) as begun:
        weights, _ = own(f"by_{library}.train", model, images(), ranks)
    watched.remove()
    return weights, sizes, begun.call_count


def _work(rank: int, size: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    for library in LIBRARIES:
        with joined(Seat(rank, size, port=port, local_rank=rank), PrefixStore(library, store), CPU) as ranks:
            both = [trained(library, ranks) for _ in range(2)]
        torch.save(both, f"{folder}/{library}.{rank}.pt")


def _alone(_: int, folder: str) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    torch.save({library: trained(library, ALONE) for library in LIBRARIES}, f"{folder}/alone.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcomes in one process by library, and of both processes, which train twice."""
    folder = tmp_path_factory.mktemp("trainers")
    for library in LIBRARIES:
        code = shown("trainers-in-several-processes.md", library)
        (folder / f"by_{library}.py").write_text(code.replace('"trainer"', f'"{folder}/trainer"'))
    leader = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # outlives every rank that waits on it
    spawn: Any = torch.multiprocessing.spawn
    spawn(_work, (2, leader.port, str(folder)), nprocs=2)
    spawn(_alone, (str(folder),), nprocs=1)
    load = partial(torch.load, weights_only=True)
    ranks = {library: [load(folder / f"{library}.{rank}.pt") for rank in range(2)] for library in LIBRARIES}
    return {"alone": load(folder / "alone.pt"), **ranks}


@pytest.mark.parametrize("library", LIBRARIES)
def test_two_processes_end_with_the_weights_of_one(library: str, found: dict[str, Any]) -> None:
    expected, sizes, _ = found["alone"][library]
    (first, again), (other, other_again) = found[library]

    assert sizes == {8}
    for weights, halves, groups in (first, again, other, other_again):
        assert halves == {4}, "each process has its share of each batch"
        assert groups == 0, "it found the group of the trial"
        assert all(torch.equal(weights[name], first[0][name]) for name in weights)
    assert max(float((first[0][name] - expected[name]).abs().max()) for name in expected) < 1e-12
