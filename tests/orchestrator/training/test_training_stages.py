"""Training stages: functions of their spec and their parent's state, checked before they are reported."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load
from store_cases import Content
from torch import nn

import pruning
from orchestrator.core.records import CurvePoint, StageRecord
from orchestrator.core.specs import NETWORK, PruneFields, StageFields, StageSpec
from orchestrator.core.work_order import Passed, Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.store import Store
from orchestrator.training import pruning_rounds, stage_record
from orchestrator.training.loop import training_job
from orchestrator.training.preflight.first_step import Misfit
from orchestrator.training.preflight.rehearsal import run_preflight
from orchestrator.training.pruning_rounds import LawBroken
from orchestrator.training.scoring.ranking import Round
from orchestrator.workloads.model_building import prunable
from orchestrator.workloads.tasks.task import Measured
from orchestrator.workloads.weight_files import plain_state, state_digest
from pruning import MaskSet

TRAIN = {
    "epochs": 1,
    "batch_size": 128,
    "eval_batch_size": 512,
    "precision": "fp32",
    "loss": None,
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
}
TASK = {"kind": "classification"}
PRUNE = {"types": ["Linear", "Conv2d"], "parameters": ["weight"], "include": ["*"], "exclude": []}
RANDOM = {"kind": "random_unstructured"}
SIZES = {"hidden.fc1.weight": 64 * 8, "classifier.fc1.weight": 80}


def dense(seed: int = 0, **changes: Any) -> StageSpec:
    model = {"kind": "mlp", "input_shape": None, "classes": None, "hidden": [8]}
    data = {"kind": "digits", "val_fraction": 0.15}
    fields = {"model": model, "data": data, "task": TASK, "train": TRAIN, "seed": seed, "device": "cpu", "threads": 1}
    return StageSpec("dense", {**fields, **changes})


def chain(
    *targets: float,
    method: Mapping[str, Any] = RANDOM,
    holding: str = "keeper",
    choices: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> tuple[StageSpec, ...]:
    specs = [dense(**changes)]
    for index, target in enumerate(targets, start=1):
        fields = {
            "method": method,
            **choices,
            "prune": {**PRUNE, "holding": holding},
            "task": TASK,
            "finetune": TRAIN,
            "seed": 0,
            "round": index,
            "target": target,
        }
        specs.append(StageSpec("round", fields, {NETWORK: specs[-1].key}))
    return tuple(specs)


def run(store: Store, specs: tuple[StageSpec, ...]) -> list[StageRecord]:
    return list(run_segment(WorkOrder(specs, Worker(store))))


@pytest.mark.parametrize(
    ("method", "scope"),
    [(RANDOM, "layer"), ({"kind": "l1_unstructured"}, "layer"), ({}, "global"), (RANDOM, "global")],
)
def test_counts_are_exact_in_every_round(store: Store, method: Mapping[str, Any], scope: str) -> None:
    records = run(store, chain(0.3, 0.55, 0.9, method=method, choices={"scope": {"kind": scope}}))
    total = sum(records[1].tensor_sizes.values())

    assert total == 64 * 8 + 80
    for record, target in zip(records[1:], (0.3, 0.55, 0.9), strict=True):
        masks = MaskSet.from_bytes(store.read(record.key, "masks.npz"))
        if scope == "global":
            assert sum(masks.kept().values()) == total - round(target * total)
        else:
            assert masks.kept() == {name: size - round(target * size) for name, size in masks.sizes().items()}
        assert record.sparsity == masks.sparsity()


def test_structured_rounds_count_channels(store: Store) -> None:
    method = {"kind": "ln_structured", "n": 2, "dim": 1}
    records = run(store, chain(0.25, 0.5, method=method))
    masks = MaskSet.from_bytes(store.read(records[2].key, "masks.npz"))

    assert {name: int(mask.any(0).sum()) for name, mask in masks.items()} == {
        name: mask.shape[1] - round(0.5 * mask.shape[1]) for name, mask in masks.items()
    }


def test_pruned_weights_stay_zero_through_momentum_and_weight_decay(store: Store) -> None:
    record = run(store, chain(0.5))[1]
    weights = load(store.read(record.key, "weights.safetensors"))
    for name, mask in MaskSet.from_bytes(store.read(record.key, "masks.npz")).items():
        assert not weights[name][~mask].any()
        assert weights[name][mask].all()
    assert state_digest(weights) == record.weights_digest


def test_a_keeper_and_hooks_train_to_the_same_bits(store: Store) -> None:
    kept, hooked = (run(store, chain(0.3, 0.6, holding=holding))[1:] for holding in ("keeper", "hooks"))

    assert [each.weights_digest for each in kept] == [each.weights_digest for each in hooked]
    assert [each.mask_digest for each in kept] == [each.mask_digest for each in hooked]
    assert not {each.key for each in kept} & {each.key for each in hooked}


@pytest.mark.parametrize("name", [*sorted(training_job.ELEMENTWISE), "torch.optim.Adafactor"])
def test_gradients_are_left_dense_only_where_that_gives_the_bits_of_masked_ones(
    name: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finetune = {**TRAIN, "optimizer": {"_target_": name, "lr": 0.01, "weight_decay": 0.01}}
    dense, pruned = chain(0.5)
    specs = dense, replace(pruned, fields={**pruned.fields, "finetune": finetune})
    chosen = run(store, specs)[1]
    monkeypatch.setattr(training_job, "ELEMENTWISE", frozenset())
    masked = run(Store(str(tmp_path / "other")), specs)[1]

    assert chosen.weights_digest == masked.weights_digest


def test_every_point_of_the_curve_is_told_as_it_comes(store: Store) -> None:
    told = list[tuple[str, CurvePoint, str]]()
    order = WorkOrder(
        chain(0.3), Worker(store, report=lambda key, point, metric: told.append((key, point, metric.name)))
    )
    records = list(run_segment(order))

    assert told == [(record.key, point, "accuracy") for record in records for point in record.curve]


def test_a_preflight_tells_no_point_since_the_display_does_not_know_its_stage(store: Store) -> None:
    dense, pruned = chain(0.3)
    pruned = replace(pruned, fields={**pruned.fields, "finetune": {**TRAIN, "eval_every": 1}})
    tell = Worker(store, report=lambda *_: pytest.fail("a point of a rehearsal"))

    assert list(run_preflight(WorkOrder((pruned,), tell, lineage=(dense,))))


def test_one_segment_or_many_give_the_same_bits(store: Store, tmp_path: Path) -> None:
    specs = chain(0.3, 0.6)
    other = Store(str(tmp_path / "other"))
    whole = list(run_segment(WorkOrder(specs, Worker(store), attempt=3)))
    orders = [WorkOrder((spec,), Worker(other), lineage=specs[:index]) for index, spec in enumerate(specs)]
    apart = [record for order in orders for record in run_segment(order)]

    assert [record.attempt for record in whole] == [3, 1, 1]
    assert [record.result() for record in whole] == [record.result() for record in apart]
    assert [store.read(r.key, "weights.safetensors") for r in whole] == [
        other.read(r.key, "weights.safetensors") for r in apart
    ]


def without_dense(store: Store, specs: Sequence[StageSpec]) -> list[str]:
    """Remove the dense stage, run the segment again, and return the stages that were trained for it."""
    store.discard(specs[0].key)
    before = {key: store.finished([key])[key].started for key in (spec.key for spec in specs[1:])}
    again = run(store, tuple(specs))
    return [record.key for record in again if record.started != before.get(record.key)]


def test_a_repeated_stage_of_equal_bits_keeps_what_started_from_it(store: Store) -> None:
    specs = chain(0.3, 0.6)
    dense, first, second = run(store, specs)

    assert [first.started_from, second.started_from] == [dense.weights_digest, first.weights_digest]
    assert without_dense(store, specs) == [specs[0].key]


def test_a_repeated_stage_of_other_bits_has_what_started_from_it_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = chain(0.3, 0.6)
    run(store, specs)
    derive = stage_record.derive
    monkeypatch.setattr(
        stage_record, "derive", lambda seed, place: derive(seed, f"elsewhere/{place}")
    )  # other random weights, as from another torch release

    assert without_dense(store, specs) == [spec.key for spec in specs]
    assert store.finished([spec.key for spec in specs]).keys() == {spec.key for spec in specs}


@pytest.mark.parametrize("loss", ["damaged", "gone", "weights dropped"])
def test_what_a_stage_starts_from_is_repeated_at_once_where_it_is_lost(store: Store, loss: str) -> None:
    specs = chain(0.3, 0.6)
    records = run(store, specs)
    for record in records:
        if loss == "damaged":
            Path(store.uri, "stages", record.key, "weights.safetensors").write_bytes(
                bytes(record.files["weights.safetensors"].bytes)
            )
        elif loss == "gone":
            store.discard(record.key)
    store.drop_weights([record.key for record in records] if loss == "weights dropped" else [])
    store.discard(specs[2].key)

    (healed,) = run_segment(WorkOrder(specs[2:], Worker(store), lineage=specs[:2]))

    assert healed.result() == records[2].result()
    found = store.finished([spec.key for spec in specs])
    assert [found[record.key].result() for record in records] == [record.result() for record in records]


def test_a_worker_whose_commit_came_second_goes_on_from_the_weights_that_stand(store: Store, tmp_path: Path) -> None:
    ours, theirs = chain(0.5), chain(0.5, seed=7)
    (standing,) = run(Store(str(tmp_path / "other")), theirs[:1])
    weights = Store(str(tmp_path / "other")).read(standing.key, "weights.safetensors")
    standing = replace(standing, key=ours[0].key, spec=ours[0].to_json())

    class Second(Store):
        def commit(self, record: StageRecord, files: Any) -> StageRecord:
            if record.key == ours[0].key:
                super().commit(standing, {"weights.safetensors": Content(weights)})
            return super().commit(record, files)

    dense, pruned = run(Second(store.uri), ours)

    assert dense.weights_digest == standing.weights_digest
    assert pruned.started_from == standing.weights_digest


def test_the_global_generators_are_neither_used_nor_moved(store: Store, tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = run(store, chain(0.5))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)

    assert [r.result() for r in run(Store(str(tmp_path / "other")), chain(0.5))] == [r.result() for r in first]


def test_seeds_draw_other_networks_and_other_masks(store: Store) -> None:
    first, second = run(store, chain(0.5)), run(store, chain(0.5, seed=1))

    assert first[0].weights_digest != second[0].weights_digest


def test_the_record_says_what_was_done(store: Store) -> None:
    trained, pruned = run(store, chain(0.5))

    names = ("loss", "accuracy", "top5")
    assert set(trained.after) == {f"{split}/{name}" for split in ("val", "test") for name in names}
    assert [metric.name for metric in trained.metrics] == ["accuracy", "top5"]
    for split in ("val", "test"):
        found = trained.details["measured"][split]
        assert sum(found["hits"]) / sum(found["of"]) == trained.after[f"{split}/accuracy"]
    assert trained.before == {}
    assert set(pruned.before) == {f"val/{name}" for name in names}, "the test split is read once, at the end"
    assert pruned.requested_sparsity == 0.5
    assert pruned.tensor_sizes == SIZES or set(pruned.tensor_sizes.values()) == set(SIZES.values())
    assert pruned.remaining_parameters == pruned.parameters - 296
    assert pruned.macs == 64 * 8 + 80
    assert pruned.macs_remaining == 296
    assert StageSpec.from_json(pruned.spec).key == pruned.key
    assert store.finished([pruned.key]) == {pruned.key: pruned}


class _PlainOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert module in ("orchestrator.core.records", "orchestrator.core.metrics"), f"{module}.{name}"
        return super().find_class(module, name)


def test_a_driver_reads_a_record_without_torch(store: Store) -> None:
    for record in run(store, chain(0.5)):
        assert _PlainOnly(io.BytesIO(pickle.dumps(record))).load() == record


def test_a_dead_layer_is_reported(store: Store) -> None:
    method = {"kind": "l1_unstructured"}
    (_, record) = run(store, chain(0.999, method=method))

    assert any("every weight of" in warning for warning in record.warnings)


class Forgetful(pruning.L1Unstructured):
    """Method that prunes one entry fewer than requested."""

    def compute_mask(self, scores: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        mask = super().compute_mask(scores, default_mask).clone()
        flat = mask.view(-1)
        flat[(flat == 0).nonzero()[:5]] = 1
        return mask


def test_a_loss_that_is_no_number_costs_no_stage(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "orchestrator.training.stage_record.evaluate", lambda *_, **__: Measured({"loss": math.nan, "accuracy": 0.5})
    )
    (record,) = run(store, (dense(),))

    assert record.after == {"val/accuracy": 0.5, "test/accuracy": 0.5}
    assert record.warnings == ("val/loss is nan", "test/loss is nan")
    assert store.finished([record.key])[record.key].after == record.after


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_only_a_primary_metric_that_is_nan_of_a_finite_loss_fails(
    store: Store, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    figures = Measured({"loss": 0.5, "accuracy": value})
    monkeypatch.setattr("orchestrator.training.stage_record.evaluate", lambda *_, **__: figures)
    said = r"gives NaN as accuracy, its primary metric, of the val split, while the loss is finite; return a number"
    with pytest.raises(training_job.TrainingError, match=said) if math.isnan(value) else nullcontext():
        run(store, (dense(),))


def test_a_method_that_prunes_less_than_it_is_told_fails(store: Store) -> None:
    with pytest.raises(LawBroken, match=r"achieved sparsity .* is not the requested 0\.5"):
        run(store, chain(0.5, method={"_target_": f"{__name__}.Forgetful"}))


def test_the_laws_are_held() -> None:
    model = nn.Linear(4, 2)
    chosen = prunable(model, PruneFields(tuple(PRUNE["types"])))
    parent = MaskSet({"weight": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])})
    masks = MaskSet({"weight": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])})
    weights = {"weight": masks["weight"].float()}
    fields = Round.of(StageFields.of({"method": RANDOM, "target": 0.25}))

    assert pruning_rounds.details(chosen, fields, parent, masks, weights)["dead_tensors"] == []
    with pytest.raises(LawBroken, match="not nested"):
        pruning_rounds.details(chosen, fields, MaskSet({"weight": 1 - masks["weight"].int()}), masks, weights)
    with pytest.raises(LawBroken, match="not zero: weight"):
        pruning_rounds.details(chosen, fields, parent, masks, {"weight": torch.ones(2, 4)})
    half = Round.of(StageFields.of({"method": RANDOM, "target": 0.5}))
    with pytest.raises(LawBroken, match=r"is not the requested 0\.5"):
        pruning_rounds.details(chosen, half, parent, masks, weights)
    with pytest.raises(LawBroken, match="is nan"):
        pruning_rounds.hold_finite({"loss": float("nan")}, "finetune", str)


def test_the_preflight_refuses_a_count_that_all_rounds_together_cannot_take(store: Store) -> None:
    def tried(amount: int) -> list[Passed]:
        *above, spec = chain(0.5, 0.5)
        spec = replace(spec, fields={**spec.fields, "target": None, "amount": amount})
        return list(run_preflight(WorkOrder((spec,), Worker(store), lineage=tuple(above))))

    assert tried(40), "of 80 entries"
    with pytest.raises(Misfit, match=r"`schedule.amount` \(=41\) over 2 rounds takes 82 entries"):
        tried(41)


@pytest.mark.parametrize("place", [(0, 1), (1, 3)])
def test_a_rewound_weight_has_the_saved_bytes_where_it_is_kept_and_is_zero_elsewhere(place: tuple[int, int]) -> None:
    masks = MaskSet({"weight": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])})
    saved = {"weight": torch.randn(2, 4), "bias": torch.randn(2)}
    rewound = {"weight": saved["weight"] * masks["weight"], "bias": saved["bias"].clone()}

    pruning_rounds.hold_rewound(rewound, saved, masks)
    rewound["weight"][place] += 1.0
    with pytest.raises(LawBroken, match="rewound weights differ from the weights of the step to rewind to: weight"):
        pruning_rounds.hold_rewound(rewound, saved, masks)


def test_the_plain_state_is_that_of_a_network_never_pruned() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    names = sorted(model.state_dict())
    pruning.l1_unstructured(model[0], "weight", amount=5)
    plain = plain_state(model)

    assert sorted(plain) == names
    assert int((plain["0.weight"] == 0).sum()) == 5
    nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).load_state_dict(plain)


def test_a_network_that_is_pruned_as_it_is_initialised_is_told(store: Store) -> None:
    untrained, trained = (run(store, (dense(train={**TRAIN, "epochs": n, "steps": None}),))[0] for n in (0, 1))

    assert untrained.warnings == ("the network is random: nothing was trained, and `model.weights` is null",)
    assert not trained.warnings
