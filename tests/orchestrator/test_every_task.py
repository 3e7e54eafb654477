"""Every task through the whole: plan, preflight, training, pruning, records, comparison, report and MLflow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sampling import sampled
from small_trials import composed

from orchestrator.config.schema import ConfigError
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Job
from orchestrator.sweep.conductor import run
from orchestrator.sweep.outcome import Outcome

MODELS = {
    "classification": {"_target_": "small_workloads.linear", "classes": None},
    "regression": {"_target_": "small_workloads.linear", "classes": None},
    "language_modelling": {"_target_": "small_workloads.Bigram"},
    "segmentation": {"_target_": "small_workloads.pixels"},
}
PRIMARY = {
    "classification": "accuracy",
    "regression": "rmse",
    "language_modelling": "perplexity",
    "segmentation": "mean_iou",
}
SETTINGS = (
    *("cluster=inline", "schedule=one_shot", "schedule.sparsity=0.5", "tracking.uri=sqlite:///mlflow.db"),
    *("train.epochs=3", "train.batch_size=8", "finetune.epochs=1", "train.optimizer.lr=0.05"),
)


def job(task: str, *overrides: str, data: str = "", **changes: Any) -> Job:
    config = composed(*SETTINGS, f"task={task}", *overrides)
    own = {"_target_": f"small_workloads.{data or task}_data", "name": data or task}
    return Job(
        (f"task={task}", *overrides), {**config, "model": {"name": task, **MODELS[task]}, "data": own, **changes}
    )


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, empty_database: bytes) -> Iterator[tuple[Path, Outcome]]:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "mlflow.db").write_bytes(empty_database)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})  # figures take longer than all else
        yield folder, run([job(task, seed=seed) for task in MODELS for seed in (0, 1)])


def last(outcome: Outcome, task: str) -> StageRecord:
    trial = next(trial for trial in outcome.plan.trials if trial.config["task"]["kind"] == task)
    return outcome.records[trial.stages[-1]]


@pytest.mark.filterwarnings("ignore")  # mlflow's own
@pytest.mark.parametrize("task", MODELS)
def test_a_task_is_trained_pruned_and_measured(swept: tuple[Path, Outcome], task: str) -> None:
    _, outcome = swept
    record = last(outcome, task)
    names = {"loss", *(metric.name for metric in record.metrics)} - {"top5"}

    assert outcome.status == "finished"
    assert record.primary.name == PRIMARY[task]
    assert {f"{split}/{name}" for split in ("val", "test") for name in names} <= set(record.after)
    assert {name for point in record.curve for name in point.metrics} >= {f"val/{name}" for name in names}
    best = max(record.curve, key=lambda point: record.primary.gain(point.metrics[f"val/{record.primary.name}"], 0))
    assert record.best_step == best.step
    index = [trial.stages[-1] for trial in outcome.plan.trials].index(record.key)
    assert outcome.objective(index) == record.figure("val")


@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_the_comparison_speaks_of_each_by_its_metric(swept: tuple[Path, Outcome]) -> None:
    folder, outcome = swept
    (path,) = folder.glob("outputs/*/comparison/comparison.json")
    found = json.loads(path.read_bytes())
    page = path.with_name("report.html").read_text()

    assert {metric["name"]: metric["better"] for metric in found["metrics"]} == {
        "accuracy": "higher",
        "rmse": "lower",
        "perplexity": "lower",
        "mean_iou": "higher",
    }
    for point in found["points"]:
        task = point["model"]
        values = [outcome.records[key].after[f"test/{PRIMARY[task]}"] for key in point["stages"]]
        assert point["metric"] == PRIMARY[task]
        assert point["test"]["mean"] == pytest.approx(sum(values) / 2)
    for heading in ("test accuracy %", "test rmse", "test perplexity", "test mean iou %"):
        assert f">{heading}</th>" in page


@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_mlflow_shows_each_by_its_metric(swept: tuple[Path, Outcome]) -> None:
    from mlflow import MlflowClient

    folder, outcome = swept
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    for task, metric in PRIMARY.items():
        record = last(outcome, task)
        found = [
            run.data.metrics
            for run in runs
            if run.data.params.get("task.kind", run.data.params.get("task.name")) == task
        ]
        assert record.after[f"test/{metric}"] in [metrics[f"test/{metric}"] for metrics in found]
        assert all(f"val/{metric}" in metrics for metrics in found)


def test_a_further_test_set_is_measured_once_a_stage(swept: tuple[Path, Outcome]) -> None:
    _, outcome = swept
    record = last(outcome, "classification")

    assert 0 <= record.after["test_corrupted/accuracy"] < record.after["test/accuracy"]
    assert not [name for point in record.curve for name in point.metrics if name.startswith("test")]
    assert sum(record.details["measured"]["test_corrupted"]["of"]) == 60


@sampled(3)
@pytest.mark.parametrize(
    ("task", "overrides", "data", "words"),
    [
        ("regression", (), "classification", r"`task` \(=regression\) needs labels that are floating point numbers"),
        ("classification", (), "regression", r"`task` \(=classification\) needs labels that are classes"),
        ("regression", ("train.monitor=accuracy",), "", r"`train.monitor` \(=accuracy\) must be one of rmse, mae, r2"),
        (
            "classification",
            ("train.monitor=top5",),
            "",
            r"`train.monitor` \(=top5\) must be a metric that `data` allow",
        ),
        ("regression", ("objective=val/acc",), "", r"`objective` \(=val/acc\) must be one of val/loss, val/rmse"),
        ("segmentation", (), "classification", "needs outputs of shape|Expected"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, overrides: tuple[str, ...], data: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words) as error:
        run([job(task, *overrides, "tracking=none", data=data)])
    assert "nothing was trained" in str(error.value)
    assert "Traceback" not in str(error.value)
