"""Rounds that fine-tune by low-rank updates: plain networks with zeros, equal bits after an interruption, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from sampling import sampled
from small_trials import planned, small
from test_checkpointing import bits, run
from test_training_stages import TRAIN, chain
from torch import Tensor

from orchestrator.config.schema import ConfigError
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.specs import NETWORK, StageSpec
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.store.store import Store
from orchestrator.training.preflight.rehearsal import run_preflight
from pruning import MaskSet

LORA = {"lora_rank": 2, "lora_alpha": 8.0, "lora_targets": ["*"]}


def low_rank(*targets: float, **changes: Any) -> tuple[StageSpec, ...]:
    """Return the stages of a trial whose rounds train low-rank updates."""
    specs = list(chain(*targets))
    for index, spec in enumerate(specs):
        part = "train" if index == 0 else "finetune"
        fields = spec.fields if index == 0 else {**spec.fields, "finetune": {**TRAIN, **LORA, **changes}}
        inputs = {} if index == 0 else {NETWORK: specs[index - 1].key}
        specs[index] = replace(spec, fields=fields, inputs=inputs, location={part: {"checkpoint_minutes": 1.0}})
    return tuple(specs)


def weights(store: Store, spec: StageSpec) -> Mapping[str, Tensor]:
    return load(store.read(spec.key, "weights.safetensors"))


@pytest.mark.parametrize("changes", [{}, {"ema": 0.5, "select": "last"}, {"clip_norm": 0.1, "epochs": 2}])
def test_a_round_changes_linear_weights_by_its_rank_and_leaves_zeros(store: Store, changes: dict[str, Any]) -> None:
    specs = low_rank(0.5, 0.75, **changes)
    run(store, specs)
    dense, *rounds = (weights(store, spec) for spec in specs)

    for before, after, spec in zip((dense, rounds[0]), rounds, specs[1:], strict=True):
        masks = MaskSet.from_bytes(store.read(spec.key, "masks.npz"))
        assert after.keys() == before.keys()
        for name, tensor in after.items():
            if name in masks:
                assert not tensor[~masks[name]].any()
                assert not torch.equal(tensor, before[name] * masks[name])
            else:
                assert torch.equal(tensor, before[name]), "frozen"


def test_an_interrupted_round_goes_on_to_the_same_bits(store: Store, tmp_path: Path) -> None:
    specs, other = low_rank(0.5, 0.75), Store(str(tmp_path / "other"))
    expected = run(other, specs)

    found = run(store, specs[:1])
    found += run(store, specs[1:], batches=4, above=specs[:1])
    assert store.checkpoints.known() == [specs[1].key]
    found += run(store, specs[1:], batches=13, above=specs[:1])
    assert store.checkpoints.known() == [specs[2].key]
    found += run(store, specs[2:], above=specs[:2])

    assert [bits(record, store) for record in found] == [bits(record, other) for record in expected]


def test_targets_that_match_no_layer_are_told_before_anything_trains(store: Store) -> None:
    specs = low_rank(0.5, lora_targets=["*.q_proj.weight"])

    with pytest.raises(OrchestratorError, match=r"`finetune\.lora_targets` \(=\['\*\.q_proj\.weight'\]\) must match"):
        list(run_preflight(WorkOrder(specs[1:], Worker(store), lineage=specs[:1])))


def test_settings_of_low_rank_updates_are_in_the_keys_of_their_rounds_alone() -> None:
    plain, ranked, other = planned(
        small(), small("finetune.lora_rank=4"), small("finetune.lora_rank=4", "finetune.lora_alpha=1")
    ).trials
    unread = planned(small("finetune.lora_alpha=3", "finetune.lora_targets=['*.q.*']")).trials[0]

    assert unread.stages == plain.stages
    assert len({plain.stages[1], ranked.stages[1], other.stages[1]}) == 3
    assert plain.stages[0] == ranked.stages[0] == other.stages[0]
    plan = planned(small(), small("finetune.lora_rank=4"))
    fields = [plan.stages[trial.stages[1]].fields for trial in plan.trials]
    assert "lora_rank" not in fields[0]["finetune"]
    assert [each["versions"].get("lora") for each in fields] == [None, 1]


@sampled(3)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("train.lora_rank=4",), r"`train\.lora_rank` \(=4\) must be null, as `train` trains the dense network"),
        (("finetune.lora_rank=0",), r"`finetune\.lora_rank` \(=0\) must be an integer of at least 1"),
        (("finetune.lora_targets=[]",), r"`finetune\.lora_targets` \(=\[\]\) must hold at least one pattern"),
        (("finetune.lora_rank=4", "prune.holding=hooks"), r"holds the masks in its updates, not by hooks"),
        (("finetune.lora_rank=4", "restart=reinit"), r"`finetune\.lora_rank` \(=4\) is for rounds that fine-tune"),
        (("finetune.lora_rank=4", "dynamics=rigl"), r"trains under fixed masks, but dynamics=rigl changes them"),
    ],
)
def test_what_does_not_go_together_is_refused_in_the_plan(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(small(*overrides))
