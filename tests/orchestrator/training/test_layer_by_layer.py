"""Rounds in the sequential order: equal to the engine's call, equal bits after interruptions, laws and refusals."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from sampling import sampled
from small_trials import bits, composed, planned, train

import pruning
from orchestrator.compare.round_columns import chosen
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.planning.plan import ConfigError
from orchestrator.store.store import Store
from orchestrator.training.loop.training_loop import Cancelled
from orchestrator.training.preflight import rehearsal
from orchestrator.training.preflight.rehearsal import run_preflight
from orchestrator.training.scoring.examples import ScoringData
from orchestrator.training.stage_record import StageInputs, measure
from orchestrator.workloads.networks.classifiers import mlp
from pruning import MaskSet
from pruning.reconstruction.layer_problem import LayerProblem, Solution, lowest

SHORT = (
    *("model=mlp", "model.hidden=[16,12]", "train.epochs=null", "train.steps=6", "train.batch_size=32"),
    *("finetune.epochs=null", "finetune.steps=4", "finetune.batch_size=32", "prune.exclude=[]", "score.examples=24"),
)
ONE_ROUND = ("schedule=one_shot", "schedule.sparsity=0.5", "score.batch_size=8")
ORDERS = {
    "sparsegpt": ONE_ROUND,
    "alps": (*ONE_ROUND, "score.rounds=20"),
    "wanda": ONE_ROUND,
    "sparsegpt 2:4": ("method=sparsegpt", "scope=window", "schedule=half", "score.batch_size=8"),
}
"""Name -> overrides of a method that prunes layer by layer."""


def by_outputs(problem: LayerProblem, power: float = 1.0) -> Solution:
    """Prune the entries of a layer with the smallest |w| * norm of the input ** power: a method of one's own."""
    scores = problem.weight.abs() * problem.hessian.diagonal() ** (power / 2)
    kept = lowest(scores, problem.kept, problem.target.count(scores.numel()))
    return Solution(problem.weight.masked_fill(~kept, 0), kept)


OWN = {name: f"{__name__}.{name}" for name in ("by_outputs", "wrong_result")}
ORDERS["magnitude, own"] = (
    *(*ONE_ROUND, "schedule.order=sequential", "score=own", f"score._target_={OWN['by_outputs']}"),
    "+score.power=0.5",
)


def wrong_result(problem: LayerProblem) -> LayerProblem:
    """Return something else than a solution."""
    return problem


def asked(name: str, *overrides: str) -> Plan:
    return planned(composed(*SHORT, f"method={name.split()[0].strip(',')}", *ORDERS[name], *overrides))


def chain(plan: Plan) -> tuple[StageSpec, ...]:
    often = {part: {"checkpoint_minutes": 1.0} for part in ("train", "finetune")}
    specs = [plan.stages[key] for key in plan.trials[0].stages]
    return tuple(replace(spec, location={**spec.location, **often}) for spec in specs)


def interrupted(specs: tuple[StageSpec, ...], store: Store, after: int) -> tuple[StageRecord, list[str]]:
    """Run stages, each attempt interrupted after some blocks or batches; return the record and the checkpoints."""
    reached: list[str] = []
    for _ in range(100):
        left = tuple(spec for spec in specs if not store.finished([spec.key]))
        if not left:
            break
        calls = iter(range(10**9))
        order = WorkOrder(
            left,
            Worker(store, cancelled=lambda calls=calls: next(calls) >= after, grace=9),
            lineage=specs[: len(specs) - len(left)],
        )
        with suppress(Cancelled):
            list(run_segment(order))
        reached.append(str(store.checkpoints.reached(specs[-1].key)))
    return store.finished([specs[-1].key])[specs[-1].key], reached


def hold_interruptions(specs: tuple[StageSpec, ...], store: Store, folder: Path) -> StageRecord:
    """Hold interrupted runs to the bits of a quiet one, whose record is returned."""
    quiet = list(run_segment(WorkOrder(specs, Worker(store))))[-1]
    for number, after in enumerate((1, 2)):
        fresh = Store(str(folder / f"other{number}"))
        found, reached = interrupted(specs, fresh, after)
        assert bits(found, fresh) == bits(quiet, store)
        assert {"block 1", "block 2"} & {*reached}, "it was interrupted between blocks"
        assert fresh.checkpoints.known() == []
    return quiet


@sampled(quick=lambda name: name in [*ORDERS][::2] and name != "sparsegpt")  # 2:4 is its code, too
@pytest.mark.parametrize("name", ORDERS)
def test_an_interrupted_pruning_gives_the_same_bits(name: str, store: Store, tmp_path: Path) -> None:
    hold_interruptions(chain(asked(name)), store, tmp_path)


@pytest.mark.parametrize(("method", "outputs"), [("sparsegpt", 1), ("wanda", 1), ("wanda", 3)])
def test_blocks_of_inputs_are_pruned_whole(method: str, outputs: int, store: Store) -> None:
    plan = asked(method, "unit=block", f"unit.outputs={outputs}", "model.hidden=[18,12]")
    record = train(plan, store)[plan.trials[0].stages[-1]]
    masks = MaskSet.from_bytes(store.read(record.key, "masks.npz"))

    assert plan.stages[record.key].typed.order == "sequential"
    assert record.details["scoring"]["unit"] == "block"
    assert record.details["scoring"]["units"]["2.weight" if "2.weight" in masks else [*masks][1]] == 12 * 5 // outputs
    for name, mask in masks.items():
        for blocks in (block.flatten() for part in mask.split(4, dim=1) for block in part.split(outputs)):
            assert bool(blocks.any()) == bool(blocks.all()), name
    assert record.details["scoring"]["removed"] == pytest.approx(0.5, abs=0.02)
    assert chosen(plan.stages[record.key].typed, record).budget == "blocks"


def test_each_pruned_block_is_reported(store: Store) -> None:
    specs, points = chain(asked("sparsegpt")), []
    list(run_segment(WorkOrder(specs, Worker(store, report=lambda _key, point, _metric: points.append(point)))))

    found = [(point.step, dict(point.metrics)) for point in points if "blocks" in point.metrics]
    assert found == [(number, {"blocks": 3}) for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "method", "options"), [("sparsegpt", "sparsegpt", {}), ("magnitude, own", by_outputs, {"power": 0.5})]
)
def test_a_round_is_the_engines_call(
    name: str, method: Any, options: dict[str, float], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network, the examples and the settings of the sweep give what `pruning.layerwise` gives by hand."""
    seen: dict[str, Any] = {}
    taken = ScoringData.batches

    def batches(self: ScoringData, rescorings: int) -> Any:
        seen["batches"] = taken(self, rescorings)
        return seen["batches"]

    monkeypatch.setattr(ScoringData, "batches", batches)
    plan = asked(name, "finetune.steps=null", "finetune.epochs=0")
    records = train(plan, store)
    dense, last = plan.trials[0].stages
    network = mlp((1, 8, 8), 10, (16, 12))
    network.load_state_dict(load(store.read(dense, "weights.safetensors")))
    batches_of_all = [images for images, _ in seen["batches"]]
    found = pruning.layerwise(network, method, batches_of_all, sparsity=0.5, **options)

    weights = load(store.read(last, "weights.safetensors"))
    for key, tensor in network.state_dict().items():
        assert torch.equal(weights[key], tensor)
    assert sum(len(images) for images, _ in seen["batches"]) == 24
    details = records[last].details["scoring"]
    assert [each["error"] for each in details["layers"].values()] == [each.error for each in found.layers.values()]
    assert {each["rows"] for each in details["layers"].values()} == {24}
    named = OWN["by_outputs"] if options else "sparsegpt"
    assert (details["examples"], details["score"], details["removed"]) == (24, named, records[last].sparsity)


def test_an_own_method_for_layers_that_returns_something_else_is_named(store: Store) -> None:
    plan = asked("magnitude, own", f"score._target_={OWN['wrong_result']}", "~score.power")
    with pytest.raises(
        OrchestratorError, match=r"`score\._target_` \(=.*\.wrong_result\) .* must return a Solution of"
    ):
        train(plan, store)


def test_rounds_are_nested_and_exact(store: Store) -> None:
    plan = asked("sparsegpt", "schedule=geometric", "schedule.sparsity=0.875", "schedule.rounds=3")
    records = train(plan, store)
    _, *rounds = plan.trials[0].stages
    masks = [MaskSet.from_bytes(store.read(key, "masks.npz")) for key in rounds]

    assert all(later.nested_in(earlier) for earlier, later in pairwise(masks))
    assert [records[key].sparsity for key in rounds] == pytest.approx([0.5, 0.75, 0.875], abs=1e-3)


def test_given_densities_and_what_is_not_pruned(store: Store) -> None:
    plan = asked(
        "sparsegpt",
        "schedule.sparsity=null",
        "scope=given",
        "+scope.densities={fc1.*: 0.25, fc2.*: 0.75}",
        "prune.exclude=[fc3.weight]",
    )
    record = train(plan, store)[plan.trials[0].stages[-1]]

    assert record.tensor_sparsity == pytest.approx({"fc1.weight": 0.75, "fc2.weight": 0.25})


def test_a_rehearsal_prunes_the_first_block(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, pruned, asked_for = asked("sparsegpt"), [], []
    plainly = pruning.layerwise
    monkeypatch.setattr(rehearsal, "measure", measure_noting(pruned))

    def noted(model: Any, method: Any, batches: Any, **named: Any) -> Any:
        asked_for.append((batches, named))
        return plainly(model, method, batches, **named)

    monkeypatch.setattr(pruning, "layerwise", noted)
    dense, last = (plan.stages[key] for key in plan.trials[0].stages)

    assert next(run_preflight(WorkOrder((last,), Worker(store), lineage=(dense,))))
    assert pruned[0] == [True, False, False]
    ((batches, named),) = asked_for
    assert (len(batches), named["replay"]) == (2, False), "of three batches"


def measure_noting(pruned: list[list[bool]]) -> Any:
    """Return `measure`, which also notes which layers have zeros."""

    def noting(stage: StageInputs, *given: Any) -> Any:
        weights = [each for name, each in stage.model.named_parameters() if name.endswith("weight")]
        pruned.append([bool((each == 0).any()) for each in weights])
        return measure(stage, *given)

    return noting


@pytest.mark.slow
def test_an_order_that_follows_the_score_is_no_other_stage() -> None:
    def keys(*overrides: str) -> tuple[str, ...]:
        return planned(composed(*SHORT, *ONE_ROUND, *overrides)).trials[0].stages

    at_once_too = ("schedule.order=at_once",)
    assert keys("method=wanda") == keys("method=wanda", "schedule.order=sequential")
    assert keys("method=wanda")[-1] != keys("method=wanda", "schedule.order=at_once")[-1]
    at_once = ("method=wanda", "score=wanda", "scope=layer")
    assert keys(*at_once) == keys(*at_once, "schedule.order=at_once"), "not the published method"
    trials = [planned(composed(*SHORT, *ONE_ROUND, "method=wanda", *more)).trials[0] for more in ((), at_once_too)]
    assert [trial.config["method"]["name"] for trial in trials] == ["wanda", "wanda, order=at_once"]
    assert keys("method=sparsegpt") == keys("method=magnitude", "score=sparsegpt")
    assert keys("method=sparsegpt") == keys("method=sparsegpt", "schedule.order=sequential")


@sampled(16)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("method=sparsegpt", "schedule.order=at_once"), "prunes layer by layer; use order='sequential'"),
        (("method=magnitude", "schedule.order=sequential"), "use a score of sparsegpt, alps, wanda, a function (Layer"),
        ((*ORDERS["magnitude, own"], "score.examples=null"), "`score.examples` (=null) must be given"),
        ((*ORDERS["magnitude, own"], "scope=global"), "it must be 'layer' or 'window'"),
        (("method=random_unstructured", "schedule.order=sequential"), "leave out `schedule.order`"),
        (("method=sparsegpt", "scope=row"), "it must be 'layer' or 'window'"),
        (("method=wanda", "schedule.order=sequential", "scope=layer"), "must be 'row' or 'window', and"),
        (("method=wanda", "schedule.inner=3"), "it must be 1; or schedule.order must be 'at_once'."),
        (("method=sparsegpt", "scope=global"), "'layer' or 'window', and scope.allocation 'each' or 'given'."),
        (("method=sparsegpt", "unit=channel"), "`unit.kind` (='channel') cannot be combined"),
        (("method=sparsegpt", "scope=erk"), "`scope.allocation` (='erk') cannot be combined"),
        (("method=sparsegpt", "repair=least_squares"), "`repair.kind` (='least_squares') cannot be combined"),
        (("method=sparsegpt", "schedule.inner=3"), "`schedule.inner` (=3) cannot be combined"),
        (("method=sparsegpt", "dynamics=free"), "`dynamics.kind` (='free') cannot be combined"),
        (("method=sparsegpt", "restart.control=invert"), "`restart.control` (='invert') cannot be combined"),
        (("method=sparsegpt", "restart.control=shuffle"), "`restart.control` (=shuffle) shuffles a mask"),
        (("method=sparsegpt", "score.examples=null"), "`score.examples` (=null) must be given"),
        (("method=sparsegpt", "score.damping=0"), "`score.damping` (=0"),
        (("schedule.order=both",), "`schedule.order` (=both) must be"),
    ],
)
def test_what_cannot_be_together_is_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(composed("schedule=one_shot", "schedule.sparsity=0.5", *overrides))

    assert said in str(error.value)


def test_one_call_names_the_function_for_it() -> None:
    with pytest.raises(ValueError, match=r"call pruning\.layerwise\(model, 'sparsegpt', batches, sparsity=0\.5\)"):
        pruning.prune(torch.nn.Linear(4, 4), "sparsegpt", sparsity=0.5)
