"""One training by several processes is that of one process: weights, metrics, masks, decisions."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import CASES, outcome, together
from small_trials import planned, small
from torch import Tensor
from torch._C._distributed_c10d import HashStore, TCPStore

from orchestrator.core.work_order import Seat, Worker, WorkOrder
from orchestrator.execution.on_ray.rank_tasks import interface_of, seated
from orchestrator.execution.perform import failure_of
from orchestrator.store.store import Store
from orchestrator.training.loop.training_job import TrainingError
from orchestrator.training.preflight.first_step import Misfit
from orchestrator.training.preflight.rehearsal import run_preflight
from orchestrator.training.team import ranks
from orchestrator.training.team.together import require_reached
from orchestrator.workloads.splits import Share

SIZES = [pytest.param(2, id="2 processes"), pytest.param(4, id="4 processes", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SIZES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Outcomes of every rank."""
    return together(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread, as the ranks do: sums of floats depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two networks."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize("case", CASES)
def test_several_processes_train_as_one_does(case: str, found: dict[str, list[Any]]) -> None:
    weights, curve = outcome(CASES[case])
    (others, points), *_ = found[case]
    exact = 1e-6 if case == "synchronised" else 1e-12

    if case == "own statistics":  # of the share of rank 0 alone
        assert distance(weights, others) > 1e-6
        return
    assert distance(weights, others) < exact
    assert len(points) == len(curve)
    for point, expected in zip(points, curve, strict=True):  # sums of a batch: 1.3e-12 on processors with AVX-512
        assert point == pytest.approx(expected, abs=4 * exact)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_ends_with_the_same_bits(case: str, found: dict[str, list[Any]]) -> None:
    (weights, points), *rest = found[case]
    for others, their_points in rest:
        kept = [name for name in weights if case != "own statistics" or "running" not in name]
        assert all(torch.equal(weights[name], others[name]) for name in kept)
        assert their_points == points
    if case == "masked":
        assert any(bool((each == 0).any()) for each in weights.values())


def test_a_training_function_goes_on_with_the_draws_of_every_rank(found: dict[str, list[Any]]) -> None:
    for whole, resumed in found["drawing"]:
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_rank_whose_training_function_fails_says_so_and_the_others_that_they_lost_it(
    found: dict[str, list[Any]],
) -> None:
    said = found["said"]
    for name, failing in (("raising_on_first", 0), ("raising_on_last", len(said) - 1)):
        for rank, each in enumerate(said):
            if rank == failing:
                assert "failed after 1 steps with KeyError: 'mine'; fix the function" in each[name]
            else:
                assert each[name].startswith(f"RankLost: rank {rank} lost rank {failing} of the trial")


def test_a_training_function_leaves_all_ranks_one_network_and_their_group(found: dict[str, list[Any]]) -> None:
    for each in found["said"]:
        assert "must leave the same weights on all processes of the trial" in each["unwrapped"]
        assert "must leave torch's process group, but destroyed it" in each["tidy"]


def test_the_environment_is_as_before_whatever_a_library_does_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    before = dict(os.environ)
    with ranks.announced(Seat(1, 3, host="10.0.0.1", port=5, local_rank=0)):
        usual = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
        del os.environ["WORLD_SIZE"]
        os.environ["LOCAL_WORLD_SIZE"] = "1"

    assert usual == ["1", "3", "0", "10.0.0.1", "5"]
    assert os.environ == before


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8])
def test_shares_are_the_whole_batch_in_order(size: int, length: int) -> None:
    shares = [Share(rank, size) for rank in range(size)]
    items = [*range(length)]

    assert [each for share in shares if share.counts(length) for each in share.of(items)] == items
    assert all(len(share.of(items)) for share in shares), "one example stands in for an empty share"
    assert shares[0].counts(length), "rank 0 always has one"


def test_ranks_are_numbered_on_each_node() -> None:
    store, nodes = HashStore(), ["a", "a", "b", "a", "b"]

    assert [seated(Seat(rank, 5), store, node).local_rank for rank, node in enumerate(nodes)] == [0, 1, 0, 2, 1]


def test_a_rank_that_waits_in_vain_for_the_group_says_that_it_lost_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SILENCE", 0.1)
    with (
        pytest.raises(ranks.RankLost, match=r"^rank 1 lost rank 0 of the trial") as raised,
        ranks.joined(Seat(1, 2, step_timeout=0.5), HashStore(), torch.device("cpu")),
    ):
        pytest.fail("nobody else joined")
    assert failure_of(raised.value).transient


def test_a_rank_whose_leader_dies_before_they_meet_says_so() -> None:
    leader = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", leader.port, None, False, wait_for_workers=False)
    del leader
    with pytest.raises(ranks.RankLost, match=r"^rank 1 lost rank 0") as raised, ranks.losing("rank 1 lost rank 0"):
        seated(Seat(1, 2), store, "node")
    assert failure_of(raised.value).transient


def test_the_ranks_meet_over_the_interface_of_an_address() -> None:
    pytest.importorskip("ray")  # has Python find psutil
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        found = [interface_of(each.address) for each in addresses if each.family == socket.AF_INET]
        assert all(each == name for each in found)
    assert interface_of("127.0.0.1") == interface_of("127.0.0.7") is not None
    assert interface_of("203.0.113.1") is None


DDP = ("parallel=ddp", "parallel.processes=2", "cluster.cpus_per_trial=2")


def tried(folder: Path, *overrides: str, **parts: Any) -> None:
    """Try the dense stage of a small trial of two processes on a few examples."""
    plan = planned(small(*DDP, *overrides) | parts)
    list(run_preflight(WorkOrder((plan.stages[plan.trials[0].dense],), Worker(Store(str(folder))))))


def test_a_parameter_that_the_loss_does_not_reach_is_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(Misfit, match=r"does not depend on \(idle.weight; idle.bias\)"):
        tried(tmp_path, model={"_target_": "small_workloads.unreached", "name": "m"})


def hardest(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of the harder half of the examples."""
    losses = torch.nn.functional.cross_entropy(outputs, labels, reduction="none")
    return losses.topk(max(1, len(losses) // 2)).values.mean()


def test_a_loss_that_is_no_mean_over_examples_is_refused_before_the_training(tmp_path: Path) -> None:
    own = (f"+train.loss._target_={__name__}.hardest", "+train.loss._partial_=true")

    with pytest.raises(
        Misfit, match=r"`train.loss._target_` .* must be a mean over examples, as each process of a trial"
    ):
        tried(tmp_path, *own)
    tried(tmp_path, "+train.loss._target_=torch.nn.CrossEntropyLoss", "+train.loss.label_smoothing=0.1")


@pytest.mark.parametrize(("size", "refused"), [(57, True), (19, True), (20, False), (30, False)])
def test_a_share_of_one_example_is_refused_where_batch_norm_cannot_normalise_it(
    size: int, refused: bool, tmp_path: Path
) -> None:
    """Batches of 57 and of 19 leave 3 of 60 examples for the last one."""
    asked = (f"train.batch_size={size}", "finetune.batch_size=20")
    if refused:
        with pytest.raises(Misfit, match=r"of a batch of 3 some of the 2 processes get one example"):
            tried(tmp_path, *asked)
        tried(tmp_path, *asked, "parallel.sync_batch_norm=true")
        tried(tmp_path, *asked, "train.drop_last=true")
        tried(tmp_path, *asked, model={"_target_": "small_workloads.linear", "classes": 2, "name": "m"})
    else:
        tried(tmp_path, *asked)


def test_a_step_that_skips_parameters_ends_the_training_by_name() -> None:
    reached, skipped = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    reached.grad = torch.zeros(1)

    require_reached("train", [reached])
    with pytest.raises(TrainingError, match=r"^`train` took a step .* did not depend on 1 of .* pass parallel=none"):
        require_reached("train", [reached, skipped])
