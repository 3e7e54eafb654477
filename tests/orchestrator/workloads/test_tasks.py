"""Tasks: compared with scikit-learn and torch, whole and in batches, for every form of batch; errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference
from torch import Tensor, nn

from orchestrator.catalogue.tasks import TASKS
from orchestrator.catalogue.tasks import TaskRow as Row
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric
from orchestrator.workloads.tasks import task_building
from orchestrator.workloads.tasks.batch import LABELS, answer_of, labels_of, moved, size
from orchestrator.workloads.tasks.classification import Classification
from orchestrator.workloads.tasks.language_modelling import LanguageModelling
from orchestrator.workloads.tasks.regression import Regression
from orchestrator.workloads.tasks.segmentation import Segmentation
from orchestrator.workloads.tasks.supervised import Supervised
from orchestrator.workloads.tasks.task import Measured
from orchestrator.workloads.tasks.totals import Totals

MODEL = nn.Identity()
"""Network whose outputs are its inputs."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, of: int, seed: int = 1) -> Tensor:
    return torch.randint(of, shape, generator=torch.Generator().manual_seed(seed))


def measured(task: Supervised, outputs: Tensor, labels: Tensor) -> Measured:
    """Measure as one batch and in batches of 7, check that the results are equal, and return them."""
    whole = task.measure(MODEL, [(outputs, labels)])
    parts = list(zip(outputs.split(7), labels.split(7), strict=True))
    assert task.measure(MODEL, parts) == whole
    first, second = task.totals(MODEL, parts[:2]), task.totals(MODEL, parts[2:])
    assert Measured(task.figures(second + first), task.details(second + first)) == whole
    return whole


def test_classification_is_scikit_learns() -> None:
    logits, labels = drawn(50, 8), classes(50, of=8)
    found = measured(Classification(), logits, labels)

    assert found.figures["accuracy"] == reference.accuracy_score(labels, logits.argmax(1))
    top5 = reference.top_k_accuracy_score(labels, logits, k=5, labels=range(8))
    assert found.figures["top5"] == pytest.approx(top5, abs=1e-6)
    log = reference.log_loss(labels, logits.double().softmax(1), labels=range(8))
    assert found.figures["loss"] == pytest.approx(log, rel=1e-6)
    recall = reference.recall_score(labels, logits.argmax(1), average=None, zero_division=0)
    rates = np.divide(found.details["hits"], found.details["of"])
    assert rates == pytest.approx(recall, abs=1e-6)


def test_five_classes_have_no_top_five() -> None:
    assert set(measured(Classification(), drawn(20, 5), classes(20, of=5)).figures) == {"loss", "accuracy"}


@pytest.mark.parametrize("outputs", [1, 3])
def test_regression_is_scikit_learns(outputs: int) -> None:
    predictions, labels = drawn(50, outputs), drawn(50, outputs, seed=3) + 1000
    found = measured(Regression("m"), predictions, labels).figures

    pair = labels.double().numpy(), predictions.double().numpy()
    flat = [each.ravel() for each in pair]
    assert found["rmse"] == pytest.approx(reference.root_mean_squared_error(*flat), rel=1e-6)
    assert found["mae"] == pytest.approx(reference.mean_absolute_error(*flat), rel=1e-6)
    assert found["r2"] == pytest.approx(reference.r2_score(*pair), rel=1e-6)
    assert found["loss"] == pytest.approx(found["rmse"] ** 2, rel=1e-6)


def test_a_column_of_predictions_fits_plain_labels() -> None:
    labels = drawn(20)
    found = measured(Regression(), drawn(20, 1, seed=5), labels)
    assert found == measured(Regression(), drawn(20, 1, seed=5).squeeze(1), labels)
    flat = Regression().measure(MODEL, [(drawn(20), torch.ones(20))])
    assert math.isnan(flat.figures["r2"]), "NaN if the labels are constant"
    pair = torch.stack([labels, torch.ones(20)], 1)
    two = Regression().measure(MODEL, [(torch.stack([drawn(20, 1, seed=5).squeeze(1)] * 2, 1), pair)])
    assert two.figures["r2"] == found.figures["r2"], "outputs with constant labels are left out"


def test_language_modelling_is_cross_entropy_by_token() -> None:
    logits, targets = drawn(30, 6, 11), classes(30, 6, of=11)
    targets[::3, 4:] = -100
    found = measured(LanguageModelling(), logits, targets)

    mean = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), ignore_index=-100).item()
    assert found.figures["cross_entropy"] == pytest.approx(mean, rel=1e-6)
    assert found.figures["loss"] == found.figures["cross_entropy"]
    assert found.figures["perplexity"] == pytest.approx(math.exp(mean), rel=1e-6)
    assert found.details == {"tokens": 30 * 6 - 10 * 2}
    batch = (logits, targets)
    assert LanguageModelling().loss(MODEL, batch).item() == pytest.approx(mean, rel=1e-6)
    assert LanguageModelling().size(batch) == 160


class Bigram(nn.Module):
    """Network that returns logits of the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(drawn(11, 11))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.table[input_ids]
        if labels is None:
            return logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def test_tokens_of_every_form_say_the_same() -> None:
    tokens, model, task = classes(12, 7, of=11), Bigram(), LanguageModelling()
    forms: list[Any] = [
        tokens,
        (tokens[:, :-1], tokens[:, 1:]),
        {"input_ids": tokens},
        {"input_ids": tokens, "labels": tokens, "name": "not taken"},
        {"input_ids": tokens, "targets": tokens},
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)},
    ]
    found = [task.measure(model, [form]).figures for form in forms]

    for figures in found:
        assert figures == pytest.approx(found[0], rel=1e-6)
    assert [task.size(form) for form in forms] == [72] * 6
    assert [task.loss(model, form).item() for form in forms] == pytest.approx([found[0]["loss"]] * 6, rel=1e-6)
    for name in LABELS:
        half = torch.where(torch.arange(7) < 4, tokens, -100)
        assert [
            task.size(each) for each in ({"input_ids": tokens, name: half}, SimpleNamespace(x=tokens, **{name: half}))
        ] == [36, 36]
    padded = {"input_ids": tokens, "attention_mask": (torch.arange(7) < 5).long().expand(12, 7)}
    assert task.measure(model, [padded]).details == {"tokens": 12 * 4}


def test_segmentation_is_scikit_learns() -> None:
    logits, labels = drawn(21, 4, 5, 6), classes(21, 5, 6, of=3)  # the fourth class is predicted, never labelled
    labels[:, 0] = 255
    found = measured(Segmentation(), logits, labels)

    known = labels.flatten() != 255
    pair = labels.flatten()[known], logits.argmax(1).flatten()[known]
    assert found.figures["mean_iou"] == pytest.approx(reference.jaccard_score(*pair, average="macro"), abs=1e-6)
    assert found.figures["pixel_accuracy"] == pytest.approx(reference.accuracy_score(*pair), abs=1e-6)
    mean = F.cross_entropy(logits.double(), labels, ignore_index=255).item()
    assert found.figures["loss"] == pytest.approx(mean, rel=1e-6)
    assert Segmentation().loss(MODEL, (logits, labels)).item() == pytest.approx(mean, rel=1e-6)


@dataclass
class Example:
    x: Tensor
    y: Tensor


class Sized(nn.Module):
    """Network that takes arguments by name."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": x if extra is None else x + extra}


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Sized(), {"x": drawn(9, 3), "label": classes(9, of=3), "index": torch.arange(9)}),
        (Sized(), {"labels": classes(9, of=3), "x": drawn(9, 3), "extra": torch.zeros(9, 3)}),
        (Sized(), (drawn(9, 3), torch.zeros(9, 3), classes(9, of=3))),
        (nn.Identity(), {"pixels": drawn(9, 3), "targets": classes(9, of=3)}),
    ],
)
def test_batches_of_every_form_say_the_same(model: nn.Module, batch: Any) -> None:
    plain = Classification().measure(MODEL, [(drawn(9, 3), classes(9, of=3))])
    assert Classification().measure(model, [moved(batch, torch.device("cpu"))]) == plain
    assert size(batch) == 9
    assert torch.equal(labels_of(batch), classes(9, of=3))


def test_a_model_that_takes_any_name_gets_all() -> None:
    class Keywords(nn.Module):
        def forward(self, input_ids: Tensor, **others: Any) -> list[str]:
            return sorted(others)

    batch = {"input_ids": drawn(2, 3), "attention_mask": drawn(2, 3), "labels": drawn(2, 3)}
    assert answer_of(Keywords(), batch) == ["attention_mask", "labels"]
    assert answer_of(Keywords(), batch, labels=False) == ["attention_mask"]
    assert answer_of(Keywords(), {"pixels": drawn(2, 3), "labels": drawn(2)}) == [], "given by position"


def test_an_object_is_moved_and_handed_over_whole() -> None:
    class OfObject(nn.Module):
        def forward(self, example: Example) -> Tensor:
            return example.x

    batch = moved(Example(drawn(9, 3), classes(9, of=3)), torch.device("cpu"))
    assert Classification().measure(OfObject(), [batch]).figures["accuracy"] == pytest.approx(
        reference.accuracy_score(classes(9, of=3), drawn(9, 3).argmax(1))
    )


def test_what_is_moved_keeps_its_form() -> None:
    meta = torch.device("meta")
    batch = {"a": [torch.ones(2), ("text", torch.ones(3))], "b": Example(torch.ones(1), torch.ones(1)), "c": 5}
    found = moved(batch, meta)

    assert found["a"][0].device == found["a"][1][1].device == found["b"].x.device == meta
    assert (found["a"][1][0], found["c"]) == ("text", 5)


def test_the_loss_is_the_one_that_is_given_then_the_models_then_the_tasks() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return SimpleNamespace(logits=x, loss=None if labels is None else x.new_tensor(7.0))

    batch = {"x": drawn(4, 3), "labels": classes(4, of=3)}
    pair = (batch["x"], batch["labels"])
    task = Classification()
    other = task.with_loss(nn.MultiMarginLoss())

    assert task.loss(Own(), batch) == task.measure(Own(), [batch]).figures["loss"] == 7
    assert other.loss(Own(), batch) == nn.MultiMarginLoss()(*pair)
    assert other.measure(Own(), [batch]).figures["loss"] == pytest.approx(nn.MultiMarginLoss()(*pair).item(), rel=1e-6)
    assert task.loss(MODEL, pair) == F.cross_entropy(*pair)


def test_a_figure_that_no_record_can_hold_is_infinite_with_its_sign() -> None:
    found = task_building.measured(Regression(), {"loss": -1e150, "rmse": 1e151, "mae": -1e151}).figures

    assert found == {"loss": -1e150, "rmse": math.inf, "mae": -math.inf}


def test_soft_labels_are_trained_by_but_not_measured() -> None:
    soft = drawn(4, 3).softmax(1)
    assert Classification().loss(MODEL, (drawn(4, 3), soft)) == F.cross_entropy(drawn(4, 3), soft)
    with pytest.raises(OrchestratorError, match="needs labels that are classes"):
        Classification().measure(MODEL, [(drawn(4, 3), soft)])


FLOATS, INTS = drawn(4), classes(4, of=3)


@pytest.mark.parametrize(
    ("task", "batch", "words"),
    [
        (
            Classification(),
            (drawn(4, 3), FLOATS),
            r"`task` \(=classification\) needs labels that are classes.* \(4,\) floa",
        ),
        (
            Classification(),
            (drawn(4, 3, 2), INTS),
            r"needs outputs of shape \(batch, classes\), found \(4, 3, 2\) float32",
        ),
        (
            Classification(),
            (drawn(4, 3), classes(4, 3, of=2)),
            r"needs integer labels of shape \(batch,\), found \(4, 3\) int64; return labels.argmax\(1\) if",
        ),
        (Classification(), (drawn(4, 3), classes(4, 1, of=3)), r"found \(4, 1\) int64; return labels.flatten\(\)\.$"),
        (Classification(), (drawn(4, 3), classes(5, of=3)), r"with labels of shape \(batch,\), not \(5,\)"),
        (
            Regression(),
            (drawn(4, 1), INTS),
            r"`task` \(=regression\) needs labels that are floating point.*classification",
        ),
        (Regression(), (drawn(4, 3), FLOATS), r"needs outputs of the shape of its labels, \(4,\), found \(4, 3\)"),
        (LanguageModelling(), (drawn(4, 3), classes(4, 3, of=5)), r"needs outputs of shape \(batch, length, tokens\)"),
        (LanguageModelling(), (drawn(4, 3, 5), drawn(4, 3)), "needs labels that are classes"),
        (LanguageModelling(), {"x": drawn(4, 3)}, r"needs tokens of shape \(batch, length\), found {x: \(4, 3\)"),
        (
            Segmentation(),
            (drawn(4, 3, 8, 8), classes(4, 4, 4, of=3)),
            r"for labels of shape \(4, 4, 4\), found \(4, 3, 8",
        ),
        (Classification(), (drawn(4, 3),), "must hold a tensor of labels"),
        (Classification(), {"x": drawn(4, 3)}, "one of the names labels, label, target"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(task: Supervised, batch: Any, words: str) -> None:
    with pytest.raises(OrchestratorError, match=words) as error:
        task.loss(MODEL, batch)
    assert "\n" not in str(error.value)


def test_an_answer_without_outputs_is_refused() -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "nothing"

    with pytest.raises(OrchestratorError, match=r"`model` must return a tensor of outputs.* not str"):
        Classification().loss(Silent(), (drawn(4, 3), INTS))


@given(st.lists(st.lists(st.floats(-1e300, 1e300), max_size=6), max_size=6))
def test_sums_are_exact_whatever_the_parts(parts: list[list[float]]) -> None:
    totals, merged = Totals(), Totals()
    totals.add("x", torch.zeros(0, dtype=torch.float64))
    merged.add("x", torch.zeros(0, dtype=torch.float64))
    for part in parts:
        values = torch.tensor(part, dtype=torch.float64)
        totals.add("x", values)
        one = Totals()
        one.add("x", values)
        merged = merged + one

    exact = sum(map(Fraction, (value for part in parts for value in part)), Fraction(0))
    assert totals.exact("x") == merged.exact("x") == [exact]


F1 = {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 4, "average": "macro"}
ERROR = {"_target_": "torchmetrics.MeanSquaredError", "squared": False}


def test_metrics_of_torchmetrics_are_scikit_learns() -> None:
    task = task_building.build({"kind": "torchmetrics", "measures": {"f1": F1}, "margin": 0.02})
    logits, labels = drawn(50, 4), classes(50, of=4)
    parts = list(zip(logits.split(7), labels.split(7), strict=True))
    whole, batched = (task_building.measured(task, task.measure(MODEL, each)) for each in ([(logits, labels)], parts))

    assert task.metrics[0].better == "higher"
    assert task.metrics[0].margin == 0.02
    score = reference.f1_score(labels, logits.argmax(1), average="macro")
    assert whole.figures["f1"] == pytest.approx(score, abs=1e-6)
    assert batched.figures == pytest.approx(whole.figures, rel=1e-12)
    assert task.measure(MODEL, parts) == batched, "each measurement starts from zero"


def test_our_figures_are_those_of_torchmetrics() -> None:
    from torchmetrics import classification, regression, text

    logits, labels = drawn(50, 8), classes(50, of=8)
    ours = measured(Classification(), logits, labels).figures
    for name, top in (("accuracy", 1), ("top5", 5)):
        theirs = classification.MulticlassAccuracy(8, average="micro", top_k=top)(logits, labels)
        assert ours[name] == pytest.approx(float(theirs), abs=1e-6)
    outputs, numbers = drawn(50, 2), drawn(50, 2, seed=3)
    figures = measured(Regression(), outputs, numbers).figures
    assert figures["rmse"] == pytest.approx(
        float(regression.MeanSquaredError(squared=False)(outputs, numbers)), abs=1e-6
    )
    assert figures["r2"] == pytest.approx(float(regression.R2Score()(outputs, numbers)), abs=1e-5)
    tokens, targets = drawn(12, 6, 9), classes(12, 6, of=9)
    perplexity = text.Perplexity()(tokens, targets)
    assert measured(LanguageModelling(), tokens, targets).figures["perplexity"] == pytest.approx(
        float(perplexity), rel=1e-6
    )
    pixels, told = classes(9, 5, 5, of=3), drawn(9, 3, 5, 5)
    overlap = classification.MulticlassJaccardIndex(3)(told, pixels)
    assert measured(Segmentation(), told, pixels).figures["mean_iou"] == pytest.approx(float(overlap), abs=1e-6)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (
            {"measures": {"f1": F1}, "better": {"f1": "lower"}},
            r"`task.better.f1` \(=lower\) .* its own direction is higher",
        ),
        (
            {"measures": {"mean": {"_target_": "torchmetrics.MeanMetric"}}},
            "it does not say so itself; pass higher or lower",
        ),
        (
            {"measures": {"f1": F1}, "better": {"nonsense": "lower"}},
            r"`task.better` \(=\{'nonsense': 'lower'\}\) must name metrics of `task.measures` \(f1\), not nonsense",
        ),
        ({"measures": {}}, r"`task.measures` \(=\{\}\) must hold at least one metric"),
        (
            {"measures": {"x": {"_target_": "torch.nn.ReLU"}}},
            r"`task.measures.x` \(=ReLU\) must be a metric of torchmetrics",
        ),
        (
            {"measures": {"x": {"_target_": "torchmetrics.NoSuch"}}},
            r"`task.measures.x._target_` .* could not be created",
        ),
    ],
)
def test_a_wrong_metric_is_refused_in_a_sentence(node: dict[str, Any], words: str) -> None:
    with pytest.raises(OrchestratorError, match=words):
        task_building.build({"kind": "torchmetrics", **node})


def test_a_metric_that_does_not_take_the_outputs_is_told_by_its_key() -> None:
    task = task_building.build({"kind": "torchmetrics", "measures": {"f1": F1}})
    with pytest.raises(OrchestratorError) as caught:
        task.measure(MODEL, [(drawn(6, 5), classes(6, of=5))])

    told = "`task.measures.f1` (=MulticlassF1Score) does not take outputs (6, 5) float32 with labels (6,) int64: ValueE"
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith("; change the metric's arguments, or use another metric.")


def test_a_metric_of_many_numbers_is_refused() -> None:
    task = task_building.build({"kind": "torchmetrics", "measures": {"f1": {**F1, "average": None}}})
    with pytest.raises(OrchestratorError, match=r"`task.measures.f1` .* must compute one number"):
        task.measure(MODEL, [(drawn(9, 4), classes(9, of=4))])


class Members:
    """Task with the members that a test names."""

    def __init__(self, **members: Any) -> None:
        vars(self).update({"loss": len, "size": len, "measure": len, "metrics": (RMSE,)} | members)
        if members.get("size") == "none":
            del self.size


RMSE = Metric("rmse", "", "lower", 0.1)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"size": "none"}, "must have `metrics`, `loss`, `size` and `measure`, but lacks `size`"),
        ({"metrics": []}, "must have at least one `Metric`"),
        ({"metrics": ["rmse"]}, "must have at least one `Metric`"),
        ({"metrics": [{"bad": 1}]}, "must have at least one `Metric`"),
    ],
)
def test_an_own_task_is_held_to_its_members(members: dict[str, Any], words: str) -> None:
    with pytest.raises(OrchestratorError, match=words):
        task_building.build({"_target_": f"{__name__}.Members", **members})


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ({"count": torch.tensor(3)}, "that JSON can hold: Object of type Tensor"),
        ({"count": np.int64(3)}, "that JSON can hold: Object of type int64"),
        ({"share": math.nan}, "that JSON can hold: Out of range float"),
        ({"hits": [1, 2], "of": [3]}, "with `hits` and `of` as lists of counts"),
        ({"hits": [0.5], "of": [3]}, "with `hits` and `of` as lists of counts"),
        ({"hits": 1, "of": 2}, "with `hits` and `of` as lists of counts"),
    ],
)
def test_details_are_what_a_record_can_hold(details: dict[str, Any], words: str) -> None:
    task = task_building.build({"_target_": f"{__name__}.Members"})
    assert task_building.measured(
        task, Measured({"loss": 1.0, "rmse": 1.0}, {"hits": [1], "of": (3,), "x": {"y": None}})
    )
    with pytest.raises(OrchestratorError, match=words):
        task_building.measured(task, Measured({"loss": 1.0, "rmse": 1.0}, details))


def better_up() -> Members:
    return Members(metrics=(Metric("rmse", "", "up", 0.1),))


def spoken() -> Members:
    return Members(metrics=(Metric("Off By!", "", "lower", 0.1),))


def twice() -> Members:
    return Members(metrics=(RMSE, RMSE))


def test_an_own_task_has_metrics_that_can_be() -> None:
    assert task_building.build({"_target_": f"{__name__}.Members"}).metrics == (RMSE,)
    with pytest.raises(OrchestratorError, match=r"has an invalid metric .*'up'.*: `better` must be `higher` or `lo"):
        task_building.build({"_target_": f"{__name__}.better_up"})
    with pytest.raises(OrchestratorError, match=r"'Off By!'.*: `name` must be 1 to 40 letters, digits and underscores"):
        task_building.build({"_target_": f"{__name__}.spoken"})
    with pytest.raises(OrchestratorError, match="must give its metrics different names"):
        task_building.build({"_target_": f"{__name__}.twice"})
    with pytest.raises(OrchestratorError, match="must return a number as `rmse` from `measure`"):
        task_building.measured(task_building.build({"_target_": f"{__name__}.Members"}), {"loss": 1.0})


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (
            {"loss": torch.ones(2), "rmse": 1.0},
            r"a number as `loss` from `measure`, not a Tensor of shape \(2,\);",
        ),
        (
            {"loss": 1.0, "rmse": np.ones(2)},
            r"a number as `rmse` from `measure`, not a ndarray of shape \(2,\);",
        ),
        ({"loss": None, "rmse": 1.0}, "a number as `loss` from `measure`, not a NoneType; return a float"),
    ],
)
def test_a_figure_that_is_not_a_number_is_named_with_its_kind(figures: dict[str, Any], words: str) -> None:
    task = task_building.build({"_target_": f"{__name__}.Members"})
    with pytest.raises(OrchestratorError, match=words):
        task_building.measured(task, figures)
    assert task_building.measured(task, {"loss": torch.tensor(1.0), "rmse": np.float32(2)}).figures == {
        "loss": 1.0,
        "rmse": 2.0,
    }


@pytest.mark.parametrize("row", [row for row in TASKS.values() if "measures" not in row.in_sweeps])
def test_a_row_names_the_primary_metric_that_is_a_fraction(row: Row) -> None:
    primary = row.load()().metrics[0]
    assert row.fraction == ("" if primary.scale == 1 else primary.title)


class Constant(nn.Module):
    """Network whose answer is the same for every example."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, inputs: Tensor) -> Tensor:
        return self.answer.expand(len(inputs), *self.answer.shape)


def test_a_task_knows_the_metric_of_the_best_constant_answer() -> None:
    labels, numbers = torch.tensor([0, 1, 1, 2]), torch.tensor([1.0, 2.0, 4.0, 5.0])
    pixels = torch.tensor([[[0, 1], [1, 2]]])
    cases = (
        (Classification(), F.one_hot(torch.tensor(1), 3).float(), (torch.zeros(4, 1), labels), "accuracy"),
        (Regression(), torch.tensor([3.0]), (torch.zeros(4, 1), numbers), "rmse"),
        (
            Segmentation(),
            torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1).expand(3, 2, 2),
            (torch.zeros(1, 1), pixels),
            "mean_iou",
        ),
    )
    for task, answer, batch, metric in cases:
        found = task.measure(Constant(answer), [batch])
        assert found.details["constant"] == pytest.approx(found.figures[metric])
