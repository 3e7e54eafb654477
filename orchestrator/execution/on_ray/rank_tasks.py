"""Processes of one trial on Ray: placed all or none, they meet at rank 0, and end together."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import Cancelled
from orchestrator.core.events import Failure
from orchestrator.core.redact import logger
from orchestrator.core.work_order import Item, Seat, WorkOrder
from orchestrator.execution.perform import resolve

if TYPE_CHECKING:
    from ray import ObjectRef

MEETINGS = "pruning-orchestrator/meetings"
"""Namespace of Ray's key-value store that holds where the ranks of a trial meet."""
PATIENCE = 300.0
"""Seconds that a rank waits for rank 0 to say where they meet."""
LOOK = 0.02
"""Seconds between two looks."""
LOOPBACK = "127.0.0.1"
FOLLOW = "orchestrator.training.training_stages:follow"
WAIT_FOR_RANKS = 3.0
"""Seconds that the driver waits for the other ranks to say why a trial failed."""
_log = logger(__name__)


@dataclass
class Team:
    """The placement of a trial's processes, and the tasks of the ranks that follow rank 0."""

    group: Any
    """Ray's placement group."""
    followers: Sequence[ObjectRef[Any]] = ()
    log: str = ""
    nodes: frozenset[str] = frozenset()
    """Ids of the nodes that hold the processes, once rank 0 has begun."""
    _ended_since: float | None = None
    """When a rank was first seen to have failed while rank 0 went on."""

    def option(self, rank: int) -> dict[str, Any]:
        """Return the option that places the task of a rank."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, rank)}

    def begun(self) -> None:
        """Note where the processes are: Ray does not report those on a node that it has lost touch with."""
        from ray.util import placement_group_table

        self.nodes = frozenset(placement_group_table(self.group)["bundles_to_node_id"].values())

    def dismiss(self) -> None:
        """End all processes of the trial that still work for it, and give their place back."""
        from ray.util import remove_placement_group

        remove_placement_group(self.group)

    def lost(self) -> Failure | None:
        """Return the failure of a rank if rank 0 has not noticed it for a few seconds, as in a meeting; else None."""
        import ray

        ended, _ = ray.wait([*self.followers], num_returns=len(self.followers), timeout=0)
        if not any(_outcome(follower) is not None for follower in ended):
            return None
        self._ended_since = self._ended_since or time.monotonic()
        late = time.monotonic() - self._ended_since > WAIT_FOR_RANKS
        return self.blamed(Failure("the trial lost a rank", transient=True)) if late else None

    def blamed(self, failure: Failure) -> Failure:
        """Return the failure of another rank, which caused that of rank 0; the given one if none has failed."""
        import ray

        ended, _ = ray.wait([*self.followers], num_returns=len(self.followers), timeout=WAIT_FOR_RANKS)
        for rank, follower in enumerate(self.followers, start=1):
            if follower in ended and (found := _outcome(follower)) is not None:
                return replace(found, message=f"rank {rank}: {found.message}", log=found.log or log_of(self.log, rank))
        return failure


def placed(bundle: dict[str, float], size: int, *, one_node: bool) -> Team:
    """Ask Ray for the places of a trial's processes, all or none.

    Args:
        bundle: resources of a process
        size: number of processes
        one_node: whether all of them must be on one node; otherwise they are on as few as possible
    """
    from ray.util import placement_group

    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # else Ray prints the end of each rank that is killed
    return Team(placement_group([dict(bundle)] * size, strategy="STRICT_PACK" if one_node else "PACK"))


def seat_of(size: int, sync_batch_norm: bool, timeout: float | None) -> Seat:
    """Return the place of rank 0 of a new trial, whose stages may take `timeout` seconds.

    A step that takes half of that time hangs: the ranks then say which of them does not answer.
    """
    seat = Seat(0, size, meeting=uuid.uuid4().hex, sync_batch_norm=sync_batch_norm, timeout=timeout)
    return seat if timeout is None else replace(seat, step_timeout=min(seat.step_timeout, timeout / 2))


def log_of(log: str, rank: int) -> str:
    """Return the file for the output of a rank."""
    return log if rank == 0 or not log else f"{log.removesuffix('.log')}.rank{rank}.log"


def in_ranks(work: Callable[[WorkOrder], Iterator[Item]] | str, order: WorkOrder) -> Iterator[Item]:
    """Do the work of rank 0, with the other ranks in the trainings."""
    import torch

    from orchestrator.training.team.ranks import joined

    assert order.worker.seat is not None
    seat, store = _opened(order.worker.seat)
    try:
        with joined(seat, store, torch.device(order.worker.device)) as ranks:
            try:
                yield from resolve(work)(order.done_by(ranks=ranks))
            finally:
                ranks.say(None)
    finally:
        _forget(seat)


def following(order: WorkOrder) -> Iterator[Any]:
    """Do the work of a rank that follows; yields nothing. Only the rank that failed first reports a failure.

    Rank 0 tells why a training is cancelled.
    """
    import torch

    from orchestrator.training.team.ranks import RankLost, joined

    assert order.worker.seat is not None
    follow: Callable[[WorkOrder], None] = resolve(FOLLOW)
    seat, store = _met(order.worker.seat)
    try:
        with joined(seat, store, torch.device(order.worker.device)) as ranks:
            follow(order.done_by(ranks=ranks))
    except Cancelled:
        _log.warning("rank %d ended with the others, as the training was cancelled", seat.rank)
    except RankLost as error:
        _log.warning("%s", error)  # goes to the log of this rank
    yield from ()


def _opened(seat: Seat) -> tuple[Seat, Any]:
    """Open the store of the ranks on this node, and say where it is; it listens on one address only."""
    from ray.experimental.internal_kv import _internal_kv_put
    from torch._C._distributed_c10d import TCPStore

    host = _own_address()
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.bind((host, 0))
    listening.listen(seat.size)
    seat = replace(seat, host=host, port=listening.getsockname()[1])
    store = TCPStore(host, seat.port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())
    _internal_kv_put(seat.meeting, f"{seat.host} {seat.port}".encode(), namespace=MEETINGS)
    _meet_over(host)
    return seated(seat, store, _node()), store


def _met(seat: Seat) -> tuple[Seat, Any]:
    """Wait until rank 0 says where the ranks meet, and join its store."""
    from torch._C._distributed_c10d import TCPStore

    from orchestrator.training.team.ranks import losing

    deadline, found = time.monotonic() + PATIENCE, _place_of(seat)
    while not found:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not begin within {PATIENCE:g} s")
        time.sleep(LOOK)
        found = _place_of(seat)
    host, port = found.split()
    _meet_over(_own_address())
    with losing(f"rank {seat.rank} lost rank 0 of the trial"):
        store = TCPStore(host, int(port), None, False, wait_for_workers=False)
        return seated(replace(seat, host=host, port=int(port)), store, _node()), store


def seated(seat: Seat, store: Any, node: str) -> Seat:
    """Return the seat with its number among the ranks of the trial on its node."""
    store.set(f"node/{seat.rank}", node)
    before = [store.get(f"node/{rank}").decode() for rank in range(seat.rank)]  # waits for each
    return replace(seat, local_rank=before.count(node))


def _node() -> str:
    import ray

    found: str = ray.get_runtime_context().get_node_id()
    return found


def _place_of(seat: Seat) -> str:
    """Return where the ranks meet; empty before rank 0 has said so."""
    from ray.experimental.internal_kv import _internal_kv_get

    found: bytes | None = _internal_kv_get(seat.meeting, namespace=MEETINGS)
    return (found or b"").decode()


def _forget(seat: Seat) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(seat.meeting, namespace=MEETINGS)


def _own_address() -> str:
    from ray.util import get_node_ip_address

    found: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    return found


def interface_of(address: str) -> str | None:
    """Return the name of this machine's network interface with an address; None if no interface has the address."""
    import psutil  # comes with Ray

    wanted = LOOPBACK if ip_address(address).is_loopback else address  # every 127.x.x.x is on the one interface
    found = psutil.net_if_addrs().items()
    return next((name for name, own in found if any(each.address == wanted for each in own)), None)


def _meet_over(address: str) -> None:
    """Let gloo listen on the interface of this node's address.

    By itself gloo takes the address of the host's name, which is 127.0.1.1 on many machines: no other node reaches it.
    """
    if (interface := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _outcome(follower: ObjectRef[Any]) -> Failure | None:
    """Return the failure of a rank that has ended; None if it has none."""
    import ray
    from ray import exceptions

    try:
        found: Failure | None = ray.get(follower, timeout=0)
        return found
    except exceptions.WorkerCrashedError:
        return Failure("the process died: killed, out of memory, or a crash in native code", transient=True)
    except exceptions.RayError as error:
        return Failure(f"the process was lost: {str(error).strip().splitlines()[0].partition('. ')[0]}", transient=True)
