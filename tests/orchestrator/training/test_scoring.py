"""Scoring in a round: examples come from the training split only, masks equal the engine's, and costs are recorded."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from composition import composed
from sampling import sampled
from torch import nn
from training_cases import CLASSES, CPU, TRAIN, network, points, problem

import pruning
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.records import StageRecord
from orchestrator.core.seeding import derive
from orchestrator.core.specs import Job, PruneFields, ScoreFields, StageFields
from orchestrator.sweep.conductor import run
from orchestrator.training import pruning_rounds
from orchestrator.training.pruning_rounds import chosen_weights, prune_round
from orchestrator.training.scoring.examples import ScoringData
from orchestrator.training.scoring.ranking import Read, Round
from orchestrator.workloads.model_building import prunable
from orchestrator.workloads.splits import LoaderSplit
from pruning import MaskSet

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "methods.md").read_text()
PRUNE = PruneFields(("Linear",))


def drawn(score: ScoreFields, rescorings: int = 1, seed: int = 0) -> list[Any]:
    return ScoringData(problem().train, score, seed, CPU).batches(rescorings) or []


def fields(**changes: Any) -> StageFields:
    return StageFields.of({"method": {}, "prune": vars(PRUNE), "seed": 0, "round": 1, "target": 0.5, **changes})


def pruned(model: nn.Module, parent: MaskSet | None = None, **changes: Any) -> tuple[MaskSet, Any]:
    read = Read(problem(), CLASSES, torch.Generator())
    return prune_round(model, Round.of(fields(**changes)), parent or MaskSet({}), read)


def rows(batches: list[Any]) -> set[tuple[float, ...]]:
    return {tuple(row.tolist()) for inputs, _ in batches for row in inputs}


def test_examples_are_those_of_the_training_split_in_one_batch_by_a_seed_of_their_own() -> None:
    (batch,) = drawn(ScoreFields(examples=20))
    (again,), (other,) = drawn(ScoreFields(examples=20)), drawn(ScoreFields(examples=20), seed=1)

    assert len(batch[1]) == 20
    assert rows([batch]) <= rows([problem().train.take(torch.arange(TRAIN))])
    assert not rows([batch]) & rows([(points(30, 2).images, None)]), "the test split is read once, at the end"
    assert torch.equal(batch[0], again[0])
    assert not torch.equal(batch[0], other[0])


@pytest.mark.parametrize(
    ("score", "sizes"),
    [
        (ScoreFields(examples=1000), [50]),
        (ScoreFields(examples=24, batch_size=8), [8, 8, 8]),
        (ScoreFields(examples=1000, batch_size=20), [20, 20, 10]),
        (ScoreFields(), []),
    ],
)
def test_there_are_as_many_as_asked_for_and_at_most_all(score: ScoreFields, sizes: list[int]) -> None:
    assert [len(labels) for _, labels in drawn(score)] == sizes


@pytest.mark.slow
def test_dependency_groups_go_as_wholes_and_further_in_a_later_round() -> None:
    groups = {
        "unit": {"kind": "group"},
        "scope": {"kind": "global", "budget": "parameters"},
        "score": {"kind": "magnitude"},
    }
    model = network()
    first, scoring = pruned(model, **groups, target=0.2)

    second, later = pruned(copy.deepcopy(model), first, **groups, target=0.5, round=2)

    assert set(first) == {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight"}
    assert second.nested_in(first)
    assert not pruning.is_pruned(model)
    for masks, details, target in ((first, scoring.details, 0.2), (second, later.details, 0.5)):
        shrunk = network()
        masks.apply(shrunk)
        found = pruning.shrink(shrunk, points(2, 1).images).shrunk
        assert details["removed"] == pytest.approx(1 - found.after / found.before)
        assert details["removed"] >= target
        weights = {name: each * masks[name] for name, each in network().state_dict().items() if name in masks}
        chosen = prunable(network(), PRUNE)
        said = pruning_rounds.details(
            chosen, Round.of(fields(**groups, target=target)), MaskSet({}), masks, weights, details
        )
        assert details["removed"] - target < said["rounding"] == details["step"] < 0.2
        with pytest.raises(pruning_rounds.LawBroken, match=r"is below the requested 0\.900000 of the parameters"):
            pruning_rounds.details(chosen, Round.of(fields(**groups, target=0.9)), MaskSet({}), masks, weights, details)
    shuffled, control = pruned(network(), **groups, target=0.5, restart={"control": "shuffle"})
    assert control.details["units"] == later.details["units"]
    assert shuffled != second


@pytest.mark.parametrize(("scope", "rounding"), [("layer", 0.5 / 16), ("global", 0.5 / 16)])
def test_of_channels_a_round_says_what_is_gone_and_what_whole_ones_allow(scope: str, rounding: float) -> None:
    chosen = {"unit": {"kind": "channel", "reduce": "l1"}, "scope": {"kind": scope}, "score": {"kind": "magnitude"}}
    masks, scoring = pruned(network(), **chosen, target=0.3)
    gone = sum(int((~mask.flatten(1).any(1)).sum()) for mask in masks.values())
    weights = {name: each * masks[name] for name, each in network().state_dict().items() if name in masks}
    given = Round.of(fields(**chosen, target=0.3)), MaskSet({}), masks, weights, scoring.details

    assert scoring.details["units"] == {"0.weight": 16}, "the outputs of the other layer are the network's"
    assert scoring.details["removed"] == pytest.approx(gone / 16)
    assert pruning_rounds.details(prunable(network(), PRUNE), *given)["rounding"] == pytest.approx(rounding)


class Branching(nn.Sequential):
    def forward(self, images: torch.Tensor) -> Any:
        return super().forward(images if images.sum() > 0 else -images)


def test_a_network_that_cannot_be_followed_is_told_in_a_sentence() -> None:
    with pytest.raises(
        OrchestratorError, match=r"^`unit.kind` \(='group'\) needs to trace the network: Branching cannot be traced by"
    ):
        pruned(Branching(*network()), unit={"kind": "group"}, score={"kind": "magnitude"})


def test_each_rescoring_has_other_examples() -> None:
    first, second, third = drawn(ScoreFields(examples=20), rescorings=3)

    assert not rows([first]) & rows([second])
    assert [len(each[1]) for each in (first, second, third)] == [20, 20, 20]


def test_as_many_of_each_class() -> None:
    (batch,) = drawn(ScoreFields(per_class=4))

    assert batch[1].bincount().tolist() == [4, 4, 4]
    split = LoaderSplit([(torch.zeros(2), torch.zeros(2))])  # type: ignore[arg-type]
    with pytest.raises(
        OrchestratorError, match=r"`score.per_class` \(=4\) must be null for `data` without one class for each example"
    ):
        ScoringData(split, ScoreFields(per_class=4), 0, CPU).batches(1)


def test_nothing_is_augmented() -> None:
    split = LoaderSplit([(torch.ones(2), 0)] * 4, transform=lambda inputs: inputs * 7)  # type: ignore[arg-type]
    batches = ScoringData(split, ScoreFields(examples=4), 0, CPU).batches(1)

    assert batches is not None
    assert torch.equal(batches[0][0], torch.ones(4, 2))


def test_a_round_is_the_engine_s_plan_on_these_examples() -> None:
    score = {"kind": "snip", "examples": 20, "batch_norm": "train"}
    batches = drawn(ScoreFields(examples=20), seed=derive(0, "1/score"))
    model = network()
    masks, scoring = pruned(model, score=score, scope={"kind": "global"})
    found = network()
    pruning.prune(found, "snip", sparsity=0.5, batches=batches, loss=CLASSES.loss, parameters=["0.weight", "4.weight"])

    assert masks == MaskSet.collect(found)
    assert (scoring.details["examples"], scoring.details["passes"], scoring.details["score"]) == (20, 1, "snip")
    assert scoring.details["split"] == "train"
    assert set(scoring.seconds) == {"scoring", "selection"}
    assert all(bool((model.get_parameter(name)[~mask] == 0).all()) for name, mask in masks.items())
    assert not MaskSet.collect(model)


def test_what_a_score_ranks_by_magnitude_is_what_the_class_prunes() -> None:
    for scope in ("layer", "global"):
        first, second = network(), network()
        masks, _ = pruned(first, target=0.3, scope={"kind": scope})
        masks, _ = pruned(first, masks, target=0.7, scope={"kind": scope})
        layers = [(second[0], "weight"), (second[4], "weight")]
        for amount in (0.3, 0.7):
            counts = [round(amount * each.weight.numel()) for each, _ in layers]
            for (layer, name), count in zip(layers, counts, strict=True):
                pruned_so_far = 0 if not hasattr(layer, "weight_mask") else int((layer.weight_mask == 0).sum())
                if scope == "layer":
                    pruning.l1_unstructured(layer, name, amount=count - pruned_so_far)
            if scope == "global":
                total = sum(each.weight.numel() for each, _ in layers)
                gone = sum(int((each.weight == 0).sum()) for each, _ in layers)
                pruning.global_unstructured(layers, pruning.L1Unstructured, amount=round(amount * total) - gone)
        assert masks == MaskSet.collect(second)


def test_what_the_network_lacks_is_told_in_a_sentence() -> None:
    plainer = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    with pytest.raises(OrchestratorError, match="ranks channels by the BatchNorm after their layer"):
        pruned(plainer, score={"kind": "bn_scale"}, unit={"kind": "channel"})
    for score, said in (
        ({"kind": "synflow"}, "applies gelu"),
        ({"kind": "snip", "batch_norm": "eval"}, "must hold scoring data"),
    ):
        with pytest.raises(OrchestratorError, match=said):
            pruned(plainer, score=score)
    with pytest.raises(OrchestratorError, match=r"`scope.m` \(=3\) must divide the input dimension"):
        pruned(plainer, scope={"kind": "window", "n": 1, "m": 3})


def gradients(model: nn.Module, batches: list[Any], loss: Any) -> dict[str, torch.Tensor]:
    for batch in batches:
        loss(model, batch).backward()
    return {name: p.grad.abs() for name, p in model.named_parameters() if p.grad is not None}


def test_an_argument_that_a_score_of_one_s_own_does_not_take_is_called_as_it_was_set() -> None:
    own = {"_target_": f"{__name__}.gradients"}
    with pytest.raises(
        OrchestratorError, match=r"^`score.mixx` \(=0.5\) is not taken by .*, which takes no options\.$"
    ):
        pruned(network(), score={**own, "mixx": 0.5})
    with pytest.raises(OrchestratorError, match=r"Did you mean `score.examples`\?$"):
        pruned(network(), score={**own, "exampels": 8})


def test_a_score_of_one_s_own_without_its_examples_is_told_the_setting_that_gives_them() -> None:
    own = {"_target_": f"{__name__}.gradients"}
    with pytest.raises(
        OrchestratorError, match=r"^`score._target_` \(=test_scoring.gradients\) .*pass score.examples=128 to give"
    ):
        pruned(network(), score=own)
    masks, _ = pruned(network(), score={**own, "examples": 8})
    assert masks.sparsity() == pytest.approx(0.5, abs=0.01)


def of_the_model(model: nn.Module, *, power: float) -> dict[str, torch.Tensor]:
    return {name: p.abs() ** power for name, p in model.named_parameters()}


def mistyped(model: nn.Module, batches: Any, loss: Any) -> dict[str, torch.Tensor]:
    return {name: p.abs() + "1" for name, p in model.named_parameters()}


def of_hooked_names(model: nn.Module, batches: Any, loss: Any) -> dict[str, torch.Tensor]:
    return {f"{name}_orig": p.abs() for name, p in model.named_parameters()}


def of_one_layer(model: nn.Module, batches: Any, loss: Any) -> dict[str, torch.Tensor]:
    return dict([next((name, p.abs()) for name, p in model.named_parameters() if p.ndim > 1)])


def of_wrong_shape(model: nn.Module, batches: Any, loss: Any) -> dict[str, torch.Tensor]:
    return {name: p.sum() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "of_the_model",
            r"^`score._target_` \(=test_scoring.of_the_model\) is called with \(model, batches, loss\), but takes "
            r"\(model: .*, \*, power: .*\).*: too many positional arguments; change its parameters, or its keys under",
        ),
        (
            "mistyped",
            r"^`score._target_` \(=test_scoring.mistyped\) failed with TypeError: .*; fix the function, or change",
        ),
        (
            "of_hooked_names",
            r"^`score._target_` \(=test_scoring.of_hooked_names\) cannot rank the network: .*'.*weight_orig'\) must "
            r"return scores by the names of the parameters to prune, such as '.*weight'\.",
        ),
        ("of_one_layer", r"^`score._target_` \(=test_scoring.of_one_layer\) cannot rank the network: `scores` lack '"),
        ("of_wrong_shape", r"^`score._target_` \(=test_scoring.of_wrong_shape\) cannot rank the network: `scores\['"),
    ],
)
def test_an_own_score_that_cannot_be_used_is_named_with_its_fault(name: str, said: str) -> None:
    with pytest.raises(OrchestratorError, match=said) as caught:
        pruned(network(), score={"_target_": f"{__name__}.{name}"})
    assert "score.examples" not in str(caught.value)


class Unfinished(pruning.BasePruningMethod):
    """Class without the method that computes its masks."""

    PRUNING_TYPE = "unstructured"


def test_an_own_class_without_compute_mask_is_refused() -> None:
    with pytest.raises(OrchestratorError) as caught:
        pruned(network(), method={"_target_": f"{__name__}.Unfinished"})

    assert str(caught.value) == (
        "`method._target_` (=test_scoring.Unfinished) lacks `compute_mask`; define it in the class."
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


QUICK = (
    *("cluster=inline", "tracking=none", "model=mlp", "model.hidden=[8]", "train.epochs=1", "finetune.epochs=1"),
    *("schedule.sparsity=0.5", "schedule.rounds=1"),
)


def trained(*overrides: str, **nodes: Any) -> list[StageRecord]:
    config = {**composed(*QUICK, *overrides), **nodes}
    outcome = run([Job((), config)])

    assert outcome.status == "finished", outcome
    return [outcome.records[key] for key in outcome.plan.trials[0].stages]


def test_the_score_that_the_page_shows_ranks_a_sweep(home: Path) -> None:
    shown = dict(re.findall(r"^```python (\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))["own_score"]
    (home / "mine.py").write_text("import torch\n\n\n" + shown.split("\n\n\n")[0])
    (node,) = re.findall(r"^```yaml\n# conf/score/(?:\w+).yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    *_, found = trained("scope=global", score=yaml.safe_load(node))

    assert found.details["scoring"]["score"] == "mine.gradient_to_weight"
    assert found.details["scoring"]["examples"] == 128
    assert found.sparsity == 0.5
    assert found.measurements["scoring"] > 0


def test_a_preflight_scores_once_where_a_round_scores_anew(home: Path) -> None:
    (home / "counted.py").write_text(
        "def magnitude(model, batches, loss):\n"
        "    with open('calls', 'a') as file:\n"
        "        file.write('.')\n"
        "    return {n: p.detach().abs() for n, p in model.named_parameters() if n.startswith('fc')}\n"
    )
    *_, found = trained("schedule.inner=5", score={"_target_": "counted.magnitude"})

    assert found.details["scoring"]["rescorings"] == 5
    assert (home / "calls").read_text() == "." * (1 + 5)


@sampled(2)
@pytest.mark.parametrize("method", ["synflow", "slimming", "obs"])
def test_a_method_is_trained_through_and_holds_its_laws(home: Path, method: str) -> None:
    others = {
        "slimming": ("model=cnn", "model.channels=[4,4]", "train.penalty=1e-4"),
        "synflow": ("model=cnn", "model.channels=[4,4]", "schedule.inner=5"),
    }
    *_, found = trained(f"method={method}", *others.get(method, ()))

    assert home.is_dir()
    assert found.details["scoring"]["rescorings"] == (5 if method == "synflow" else 1)
    if method == "slimming":
        assert found.tensor_sparsity["classifier.fc1.weight"] == 0.0
    else:
        assert found.sparsity == 0.5


class Spare(nn.Module):
    """Layers of which a call leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.relu(self.first(x)))
        return found


@pytest.mark.parametrize(("unit", "told"), [("channel", 1), ("entry", 0)])
def test_layers_whose_channels_may_be_outputs_are_told(unit: str, told: int) -> None:
    own = Round.of(fields(unit={"kind": unit}, scope={"kind": "layer"}, score={"kind": "magnitude"}))
    sentences = chosen_weights(Spare(), own, problem()).doubt

    assert len(sentences) == told
    assert all("does not run other.weight: outputs are pruned there" in each for each in sentences)
    named = replace(own, fields=replace(own.fields, prune=replace(own.fields.prune, include=("other.weight",))))
    assert not chosen_weights(Spare(), named, problem()).doubt
