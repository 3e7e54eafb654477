"""Two gloo processes under DistributedDataParallel: masks and weights stay equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pruning

RANKS = 2


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    pairs = [(model[0], "weight"), (model[2], "weight")]
    inputs = torch.Generator().manual_seed(rank + 1)
    for round_ in range(3):
        pruning.global_unstructured(pairs, pruning.L1Unstructured, amount=0.3)
        draw = torch.Generator().manual_seed(round_)
        pruning.global_unstructured(pairs, pruning.RandomUnstructured, amount=4, generator=draw)
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad()
            with parallel.no_sync():
                parallel(torch.randn(5, 8, generator=inputs)).square().sum().backward()
            parallel(torch.randn(5, 8, generator=inputs)).square().sum().backward()
            optimizer.step()
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_masks_stay_equal_on_all_ranks(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(worker, args=(str(tmp_path),), nprocs=RANKS)  # type: ignore[no-untyped-call]
    states: list[dict[str, Tensor]] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    dead = sum(int((states[0][f"{i}.weight_mask"] == 0).sum()) for i in (0, 2))
    left = 192
    for _ in range(3):
        left -= round(0.3 * left) + 4
    assert dead == 192 - left
