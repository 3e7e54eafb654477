"""Ranks of one trial: what they say to each other, outside of a training and within one.

Rank 0 leads: it prunes, measures, saves and commits as one process does. The others follow: they wait for what it says,
and take part in its trainings alone.
"""

from __future__ import annotations

import gc
import io
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from traceback import clear_frames
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # its defaults hold the group of the time of this import, so that the group would never end
from safetensors.torch import load
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.seeding import derive, reseed
from orchestrator.core.work_order import Seat
from orchestrator.training.state.train_state import TrainState
from orchestrator.workloads.splits import Share
from orchestrator.workloads.weight_files import write_state

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
FOREVER = timedelta(days=365)
SILENCE = 5.0
"""Seconds in which a rank says that it has lost another one."""
FAILED = "failed"
"""Key of the store under which the first rank that fails writes its number."""


class RankLost(OrchestratorError):
    """Another rank of the trial failed or ended; its own message says why."""


class Processes:
    """The only process of a trial: the calls of `Ranks`, without anybody to exchange something with."""

    rank, size = 0, 1
    sync_batch_norm = False
    share: Share | None = None
    """Share of each batch that this process trains on; None: all of it."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def have_group(self) -> bool:
        """Whether the process group stands, if there is one."""
        return True

    def say(self, what: Mapping[str, Any] | None) -> None:
        """Say something to the ranks that follow, as JSON; None ends their work."""

    def told(self, figures: Mapping[str, float] | None) -> dict[str, float]:
        """Return the figures of rank 0, which alone has them, and which does not wait for the others."""
        return dict(figures or {})

    def announced(self) -> AbstractContextManager[None]:
        """Return a context with the usual variables, which a library may have changed since; see `announced`."""
        return nullcontext()

    def draws(self, seed: int, step: int) -> int:
        """Return the seed of this process's draws from a step on."""
        del step
        return seed

    def reseed(self, seed: int, step: int) -> None:
        """Seed the generators of each of several processes for a step, as a checkpoint holds those of rank 0 only."""

    def bytes_of_leader(self, content: bytes | None) -> bytes:
        """Return the bytes of rank 0 on every rank."""
        return content or b""

    def state_of_leader(self, state: TrainState | None) -> TrainState | None:
        """Return the training state of rank 0 on every rank; None if it begins anew."""
        return state

    def weights_of_leader(self, model: nn.Module) -> None:
        """Give a network the parameters and buffers of rank 0."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return a network whose backward pass averages gradients over all ranks."""
        return model

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return sums over all ranks, in float64; equal bits on every rank."""
        return [*values]

    def differ(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the bits of some tensors differ between ranks."""
        del tensors
        return False


ALONE = Processes()


class Ranks(Processes):
    """The ranks of a trial, as one of them sees them.

    Args:
        seat: place of this process
        store: the key-value store of rank 0
        device: device of this process
    """

    def __init__(self, seat: Seat, store: Store, device: torch.device) -> None:
        self.rank, self.size, self.device = seat.rank, seat.size, device
        self.sync_batch_norm, self.share = seat.sync_batch_norm, Share(seat.rank, seat.size)
        self._seat, self._store = seat, store
        self._turn = 0
        """Number of things that rank 0 has said."""
        self._told = 0
        """Number of figures that it has told since."""
        self._patience = FOREVER if seat.timeout is None else timedelta(seconds=seat.timeout)

    @property
    def have_group(self) -> bool:
        return dist.is_initialized()

    def say(self, what: Mapping[str, Any] | None) -> None:
        self._store.set(f"said/{self._turn}", json.dumps(what))
        self._turn, self._told = self._turn + 1, 0

    def hear(self) -> Any:
        """Wait for what rank 0 says next, as long as a stage may take, and return it."""
        found = self._wait_for(f"said/{self._turn}")
        self._turn, self._told = self._turn + 1, 0
        return found

    def told(self, figures: Mapping[str, float] | None) -> dict[str, float]:
        key = f"told/{self._turn}/{self._told}"
        self._told += 1
        if figures is not None:
            self._store.set(key, json.dumps(figures))
            return dict(figures)
        found: dict[str, float] = self._wait_for(key)
        return found

    def _wait_for(self, key: str) -> Any:
        self._store.wait([key], self._patience)
        return json.loads(self._store.get(key))

    def announced(self) -> AbstractContextManager[None]:
        return announced(self._seat)

    def draws(self, seed: int, step: int) -> int:
        return derive(seed, f"{step}/{self.rank}")

    def reseed(self, seed: int, step: int) -> None:
        reseed(self.draws(seed, step), self.device)

    def bytes_of_leader(self, content: bytes | None) -> bytes:
        length = torch.tensor([len(content or b"")], dtype=torch.int64, device=self.device)
        dist.broadcast(length, 0)
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if content:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        if int(length):
            dist.broadcast(data, 0)
        return data.cpu().numpy().tobytes()

    def state_of_leader(self, state: TrainState | None) -> TrainState | None:
        file = io.BytesIO()
        if state is not None:
            write_state(state.tensors, file)
        values = b"" if state is None else json.dumps(state.values, allow_nan=False).encode()
        tensors, values = (self.bytes_of_leader(each if self.leads else None) for each in (file.getvalue(), values))
        if self.leads or not values:
            return state
        return TrainState(load(tensors), json.loads(values))

    def weights_of_leader(self, model: nn.Module) -> None:
        with torch.no_grad():
            for each in model.parameters():
                dist.broadcast(each, 0)
        self.buffers_of_leader(model)

    def buffers_of_leader(self, model: nn.Module) -> None:
        """Give a network the buffers of rank 0, such as the running statistics of BatchNorm."""
        for each in model.buffers():
            dist.broadcast(each, 0)

    def whole_of(self, totals: Any) -> Any:
        """Return the totals of all ranks, added exactly; the same on every rank. See `workloads.tasks.task.Summed`."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, type(totals)() + totals)  # the sum is on the CPU, and small if it can be
        return sum(found, type(totals)())

    def wrapped(self, model: nn.Module) -> nn.Module:
        found = DistributedDataParallel(model, device_ids=[self.device] if self.device.type == "cuda" else None)
        _settle_buckets(found)
        return found

    def sums(self, values: Sequence[float]) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found)
        return found.tolist()

    def differ(self, tensors: Sequence[Tensor]) -> bool:
        sums = [each.detach().contiguous().view(torch.uint8).sum(dtype=torch.int64) for each in tensors]
        own = torch.stack(sums) if sums else torch.zeros(1, dtype=torch.int64, device=self.device)
        most, least = own.clone(), own.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return not torch.equal(most, least)

    def fail(self) -> None:
        """Say that this rank fails, unless another one has failed before."""
        with suppress(RuntimeError):  # the store of rank 0 is gone
            self._store.compare_set(FAILED, "", str(self.rank))

    def silent(self) -> list[int]:
        """Say that this rank has lost another one; return the ranks that don't say the same within a few seconds."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        with suppress(RuntimeError):
            self._store.set(f"lost/{self.rank}", "")
            self._store.wait([f"lost/{rank}" for rank in others], timedelta(seconds=SILENCE))
        with suppress(RuntimeError):
            return [rank for rank in others if not self._store.check([f"lost/{rank}"])]
        return []

    def failed(self) -> int | None:
        """Return the rank that failed first; None if none has."""
        with suppress(RuntimeError):
            if self._store.check([FAILED]):
                return int(self._store.get(FAILED))
        return None


class _Sum(nn.Module):
    """The sum of the trained parameters of a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self) -> Tensor:
        """Return the sum."""
        return torch.stack([each.sum().double() for each in self.network.parameters() if each.requires_grad]).sum()


def _settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Take a backward pass without effect, from the last parameter to the first.

    Torch orders its buckets by the first backward pass, and sums over three or more ranks depend on their order. A
    training that goes on from a checkpoint must not order them after another step than an uninterrupted one.
    """
    trained = [each for each in wrapped.parameters() if each.requires_grad]
    whole, gradients = wrapped.module, [each.grad for each in trained]
    for each in trained:
        each.grad = None
    wrapped.module = _Sum(whole)
    torch.autograd.backward(wrapped())
    wrapped.module = whole
    for each, gradient in zip(trained, gradients, strict=True):
        each.grad = gradient


@contextmanager
def joined(seat: Seat, store: Store, device: torch.device) -> Iterator[Ranks]:
    """Join the ranks of a trial for as long as the context lasts.

    Libraries find the group in the usual variables of the environment. An error of this rank ends the group, so that
    no other rank waits for it.

    Raises:
        RankLost: another rank failed or ended before.
    """
    patience = timedelta(seconds=seat.step_timeout)
    with announced(seat):
        ranks = Ranks(seat, store, device)
        try:
            dist.init_process_group(
                BACKENDS[device.type],
                store=PrefixStore("group", store),
                rank=seat.rank,
                world_size=seat.size,
                timeout=patience,
            )
            yield ranks
        except BaseException as error:
            _release(error)
            _blame(ranks, error)
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def announced(seat: Seat) -> Iterator[None]:
    """Set the variables in which libraries find the group; afterwards the environment is as before."""
    before = dict(os.environ)
    numbers = {"RANK": seat.rank, "WORLD_SIZE": seat.size, "LOCAL_RANK": seat.local_rank, "MASTER_PORT": seat.port}
    os.environ.update({"MASTER_ADDR": seat.host, **{name: str(value) for name, value in numbers.items()}})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _release(error: BaseException | None) -> None:
    """Release the networks in the frames of an error: each holds the group, so the other ranks would wait for this one.

    The group is then destroyed by `joined`, not with a network: that destruction would wait, with Python's lock, for a
    thread of gloo that needs the lock.
    """
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    time.sleep(0.1)  # without the lock


@contextmanager
def losing(sentence: str) -> Iterator[None]:
    """Raise `RankLost` with a sentence for an error in reaching the other ranks."""
    try:
        yield
    except dist.DistError as error:
        said = str(error).splitlines()[0]
        raise RankLost(f"{sentence} ({said})") from ConnectionError(said)


def _blame(ranks: Ranks, error: BaseException) -> None:
    """Note that this rank failed; raise `RankLost` if its error only follows from that of another rank."""
    error_of_group = _error_of_group(error)
    if error_of_group is None:
        ranks.fail()
        return
    first = ranks.failed()
    lost = ranks.silent() if first is None else [first]
    who = ", ".join(f"rank {rank}" for rank in lost) or "another rank"
    logs = f"; its output is in a file `*.rank{lost[0]}.log` beside the log of the trial" if lost and lost[0] else ""
    said = str(error_of_group).splitlines()[0]
    raise RankLost(f"rank {ranks.rank} lost {who} of the trial{logs} ({said})") from ConnectionError(said)


def _error_of_group(error: BaseException | None) -> BaseException | None:
    """Return the error of the process group that caused an error, such as that of a training function; else None."""
    while error is not None:
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and ("gloo" in str(error) or "Connection" in str(error))
        ):
            return error
        error = error.__cause__ or error.__context__
    return None
