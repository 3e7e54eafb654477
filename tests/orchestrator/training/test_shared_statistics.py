"""Statistics of scores that rounds share: computed once for a draw, with the results of rounds that share nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled
from small_trials import composed, planned, train

from orchestrator.core.specs import Plan
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.store.store import Store
from orchestrator.training.preflight.rehearsal import run_preflight
from orchestrator.training.scoring.examples import CountedLoss, SharedStatistics, source_of
from orchestrator.workloads import node_cache
from pruning.scores import input_norms

SHORT = (
    *("model=mlp", "model.hidden=[16,12]", "train.epochs=null", "train.steps=4", "train.batch_size=32"),
    *(
        "method=wanda",
        "schedule.order=at_once",
        "schedule=one_shot",
        "finetune.epochs=0",
        "prune.exclude=[]",
        "score.examples=24",
    ),
)
BATCHES = 3


def asked(*trials: str) -> Plan:
    return planned(*(composed(*SHORT, f"score.batch_size={24 // BATCHES}", *each.split()) for each in trials))


def sparsities() -> Plan:
    return asked(*(f"schedule.sparsity={each}" for each in (0.25, 0.5, 0.75)), "method=wanda_n_m schedule=half")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node's folder in a temporary directory, which keeps statistics that take no time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(node_cache, "LONG", 0.0)
    return Path(str(node_cache.node_folder()))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The passes for input norms, noted as they are made."""
    made: list[Any] = []
    real = input_norms.call_network
    monkeypatch.setattr(input_norms, "call_network", lambda *given: (made.append(given), real(*given))[1])
    return made


def results(plan: Plan, store: Store) -> dict[str, Any]:
    """Return key -> record, weights and masks of each round, without what may differ between runs."""
    records = train(plan, store)
    rounds = {key for trial in plan.trials for key in trial.stages[1:]}
    return {
        key: [records[key].result(), store.read(key, "weights.safetensors"), store.read(key, "masks.npz")]
        for key in rounds
    }


def test_the_sparsities_of_a_draw_share_one_computation_and_keep_their_bits(
    store: Store, tmp_path: Path, passes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = sparsities()
    found = results(plan, store)

    assert len(passes) == BATCHES
    assert {record["details"]["scoring"]["passes"] for record, *_ in found.values()} == {BATCHES}
    monkeypatch.setattr(node_cache, "node_folder", lambda: None)
    assert results(plan, Store(str(tmp_path / "alone"))) == found
    assert len(passes) == (1 + len(found)) * BATCHES


@pytest.mark.parametrize("damage", ["absent", "changed", "short"])
def test_statistics_that_are_damaged_are_computed_again(
    damage: str, store: Store, tmp_path: Path, folder: Path, passes: list[Any]
) -> None:
    plan = sparsities()
    found = results(plan, store)
    (path,) = folder.glob("*.statistics")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.unlink()
    if damage != "absent":
        path.write_bytes(content if damage == "changed" else content[:-9])

    assert results(plan, Store(str(tmp_path / "again"))) == found
    assert len(passes) == 2 * BATCHES


@sampled(3)
@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        (("seed=0", "seed=1"), 3 + 3),
        (("score.examples=24", "score.examples=16"), 3 + 2),
        (("train.steps=4", "train.steps=5"), 3 + 3),
        (("schedule=geometric schedule.sparsity=0.75 schedule.rounds=3",), 3 * 3),
        (("prune.exclude=[fc1.weight]", "prune.exclude=[]"), 3 + 3),
        (("schedule.inner=2",), 2 * 3),
    ],
)
def test_other_draws_networks_and_layers_have_passes_of_their_own(
    trials: tuple[str, ...], expected: int, store: Store, passes: list[Any]
) -> None:
    found = results(asked(*trials), store)

    assert len(passes) == expected
    assert sum(record["details"]["scoring"]["passes"] for record, *_ in found.values()) == expected


def test_a_loss_of_the_user_s_own_may_hold_state_and_shares_nothing(store: Store, passes: list[Any]) -> None:
    loss = "+finetune.loss={_target_:torch.nn.CrossEntropyLoss}"
    results(asked(*(f"{loss} schedule.sparsity={each}" for each in (0.25, 0.5))), store)

    assert len(passes) == 2 * BATCHES


def test_a_rehearsal_shares_nothing(store: Store, folder: Path, passes: list[Any]) -> None:
    plan = sparsities()
    dense, last = (plan.stages[key] for key in plan.trials[0].stages)

    assert next(run_preflight(WorkOrder((last,), Worker(store), lineage=(dense,))))
    assert passes
    assert not list(folder.glob("*.statistics"))
    assert source_of(last, "", "", torch.device("cpu")) is None


def test_other_examples_of_the_same_draw_have_statistics_of_their_own() -> None:
    """The digest of a stream, or of a large data set, covers only some of its examples."""
    loss = CountedLoss(lambda *_: torch.zeros(()))
    made: list[torch.Tensor] = []

    def make() -> dict[str, torch.Tensor]:
        made.append(loss(torch.nn.Identity(), None))
        return {"0.weight": torch.arange(3.0)}

    for batch in (torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3)):
        found = SharedStatistics({"parent": "a"}, [(batch, torch.zeros(2))], loss, torch.device("cpu"))(["wanda"], make)
        assert torch.equal(found["0.weight"], torch.arange(3.0))
    assert (len(made), loss.calls) == (2, 3)
