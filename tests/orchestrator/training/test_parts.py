"""Parts of a round: a round that continues from them ends with the bits of one that ran whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sampling import sampled
from small_trials import bits, planned, small, train

from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.store import Store

RACE = ("search=halving", "search.rungs=training", "search.first=1", "search.factor=2", "finetune.epochs=4")
TRAINED = ("train.epochs=4", "train.batch_size=2")
ROUNDS = {
    "fine-tuned": (),
    "averages": ("finetune.ema=0.9", "finetune.select=last"),
    "by steps": ("finetune.epochs=null", "finetune.steps=11", "search.first=3"),
    "early stop": ("finetune.patience=1", "finetune.eval_every=2"),
    "hooks": ("prune.holding=hooks",),
    "two rounds": ("schedule=geometric", "schedule.rounds=2"),
    "rewound": ("restart=rewind", "restart.step=1ep", "train.epochs=5"),
    "before training": (*TRAINED, "schedule=at_start", "method=snip"),
    "small": ("method=magnitude", "unit=channel", "prune.exclude=[2.*]", "restart.control=small", "train.epochs=4"),
    "rigl": (*TRAINED, "method=rigl", "dynamics.every=4", "prune.exclude=[]"),
    "gradual": (*TRAINED, "method=gradual", "dynamics.every=4", "prune.exclude=[]"),
    "straight through": (*TRAINED, "method=ste"),
    "scored on data": ("method=wanda",),
    "low rank": ("finetune.lora_rank=2",),
}
"""Kinds of rounds by their overrides."""
QUICK = ("fine-tuned", "rewound", "before training", "small")
"""Rounds that each run of the tests continues; the others are slow."""


def raced(case: str) -> Plan:
    """Return the plan of a trial with parts."""
    return planned(small(*RACE, *ROUNDS[case]))


def run(plan: Plan, key: str, store: Store) -> StageRecord:
    """Run one stage whose inputs are finished."""
    order = WorkOrder((plan.stages[key],), Worker(store, grace=9), lineage=plan.lineage(key))
    return list(run_segment(order))[-1]


@sampled(quick=lambda case: case in QUICK)
@pytest.mark.parametrize("case", ROUNDS)
def test_a_round_that_continues_from_its_parts_has_the_same_bits(case: str, store: Store, tmp_path: Path) -> None:
    plan = raced(case)
    trial, alone = plan.trials[0], Store(str(tmp_path / "alone"))
    whole = plan.without(trial.parts)
    expected = train(replace(whole, finished={}), alone)[trial.stages[-1]]
    end, begun = trial.stages[-1], plan.without({*trial.parts, trial.stages[-1]})
    train(replace(begun, finished={}), store)
    parts = [run(plan, key, store) for key in trial.parts]
    found = run(plan, end, store)

    assert len(parts) == 2
    assert bits(found, store) == bits(expected, alone)
    assert found.warnings == expected.warnings
    assert [each.steps for each in parts] == sorted({each.steps for each in parts}) or case == "early stop"
    assert parts[-1].steps < found.steps or case == "early stop"
    assert found.seconds > parts[-1].seconds > parts[0].seconds, "a round counts the seconds of its parts"
    for part in parts:
        assert not any(name.startswith("test") for name in part.after), "a search never sees the test split"
