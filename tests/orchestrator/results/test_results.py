"""`orchestrator.open`: a store's sweeps as tables, figures and networks, and errors for missing ones."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from factories import config, make_plan, make_records, plan_of, sweep_info
from matplotlib.figure import Figure

import orchestrator
from orchestrator.__main__ import main as orchestrate
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.core.errors import OrchestratorError, StoreError
from orchestrator.core.specs import Plan
from orchestrator.results.frames import STEP_COLUMNS
from orchestrator.results.sweep_results import LINES, StoreResults, SweepResults
from orchestrator.store.saved_sweep import SavedSweep, manifest
from orchestrator.store.store import Store
from orchestrator.views.report import plain_files
from pruning import MaskSet

RUN = (
    *("model=mlp", "model.hidden=[12]", "train.epochs=1", "finetune.epochs=1", "schedule.rounds=2", "seed=0,1"),
    *("method=l1_unstructured", "schedule.sparsity=0.5,0.75", "cluster=inline", "tracking=none"),
)
PLAN = make_plan(sparsities=(0.5, 0.9))
RECORDS = make_records(PLAN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder where a sweep of four trials has run."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})
        patch.setattr(sys, "argv", ["orchestrator", "-m", *RUN])
        orchestrate()
    return folder


@pytest.fixture(scope="module")
def store(folder: Path) -> StoreResults:
    return orchestrator.open(str(folder / "store"))


@pytest.fixture(scope="module")
def sweep(store: StoreResults) -> SweepResults:
    return store.sweep()


def synthetic(plan: Plan = PLAN, **changes: object) -> SweepResults:
    """Return a sweep whose store does not exist."""
    return SweepResults(Store("nowhere", read_only=True), SavedSweep(sweep_info(), plan, make_records(plan), **changes))


def refusal(call: object, *arguments: object, **named: object) -> str:
    """Return the message of the error, which has one line."""
    assert callable(call)
    with pytest.raises(OrchestratorError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_store_lists_its_sweeps(store: StoreResults) -> None:
    found = store.sweeps()

    assert list(found.columns) == ["date", "status", "trials", "finished", "bytes", "command"]
    (line,) = found.itertuples()
    assert (line.status, line.trials, line.finished) == ("finished", 4, 4)
    assert line.bytes > 10_000
    assert "method=l1_unstructured" in line.command
    assert line.Index == store.sweep().name
    assert abs(line.date.timestamp() - pd.Timestamp.now().timestamp()) < 24 * 3600


@pytest.mark.parametrize("by", ["point", "round"])
def test_a_frame_has_the_columns_and_values_of_the_csv_file(sweep: SweepResults, by: str) -> None:
    write = plain_files.points_csv if by == "point" else plain_files.rows_csv
    lines = list(csv.DictReader(io.StringIO(write(sweep.comparison()).decode())))
    frame = sweep.frame(by=by)  # type: ignore[arg-type]

    settings = {"schedule.sparsity"}
    assert set(frame.columns) == set(lines[0]) | settings
    assert len(frame) == len(lines) == (3 if by == "point" else 12)
    for name in ("test_mean", "difference_low", "compression") if by == "point" else ("test", "sparsity", "macs"):
        told = [float(line[name]) if line[name] else float("nan") for line in lines]
        np.testing.assert_array_equal(frame[name], told)


def test_settings_that_vary_are_columns_with_typed_values(sweep: SweepResults) -> None:
    by_point, by_trial = sweep.frame(), sweep.frame(by="trial")

    assert by_point["schedule.sparsity"].isna().tolist() == [True, False, False], "the dense network is of both"
    assert by_point["schedule.sparsity"].tolist()[1:] == [0.5, 0.75]
    assert by_trial["schedule.sparsity"].tolist() == [0.5, 0.75, 0.5, 0.75]
    assert by_trial["seed"].tolist() == [0, 0, 1, 1]
    assert by_trial["status"].tolist() == ["finished"] * 4
    np.testing.assert_allclose(by_trial["difference"], by_trial["test"] - by_trial["dense"])
    dense = sweep.frame(by="round").query("round == 0").set_index("trial")["test"]
    assert by_trial.set_index("trial")["dense"].to_dict() == dense.to_dict()


def test_curves_are_those_of_the_records(sweep: SweepResults) -> None:
    frame = sweep.frame(by="step")
    trial = sweep.trials[3]
    history = trial.history()

    assert set(STEP_COLUMNS) < set(history.columns)
    own = frame[frame["trial"] == trial.name].reset_index(drop=True)
    pd.testing.assert_frame_equal(own[history.columns], history)
    assert history["round"].drop_duplicates().tolist() == [0, 1, 2]
    steps = [trial.record(number).steps for number in trial.rounds]
    last = history.groupby("round")["total_step"].max()
    assert last.tolist() == np.cumsum(steps).tolist()
    point = trial.record(1).curve[-1]
    assert history[history["round"] == 1].iloc[-1]["val/loss"] == point.metrics["val/loss"]


def test_a_trial_gives_masks_weights_and_the_network(sweep: SweepResults) -> None:
    trial = sweep.trial(sweep.trials[3].name)
    record, masks, weights, model = trial.record(), trial.masks(), trial.weights(), trial.model()

    assert trial.rounds == (0, 1, 2)
    assert masks.digest() == record.mask_digest
    assert trial.masks(2).nested_in(trial.masks(1))
    assert len(trial.masks(0)) == 0
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    for name, mask in masks.items():
        assert not weights[name][~mask.bool()].any()
        assert weights[name].count_nonzero() > 0
    data = sweep_data(trial)
    right = (model(data[0]).argmax(1) == data[1]).float().mean().item()
    assert right == pytest.approx(record.after["test/accuracy"], abs=1e-6)
    assert trial.model(0).state_dict().keys() == weights.keys()


def sweep_data(trial: object) -> tuple[torch.Tensor, torch.Tensor]:
    from orchestrator.workloads import data_loading

    (batch,) = data_loading.load({"kind": "digits"}).test.batches(10_000, device=torch.device("cpu"))
    return batch


def test_weights_that_retention_dropped_have_a_remedy(sweep: SweepResults) -> None:
    said = refusal(sweep.trials[0].weights, 1)

    assert "does not keep the weights of round 1 of trial" in said
    assert "store.keep=all" in said
    assert refusal(sweep.trials[0].model, 1) == said


def test_what_is_not_there_is_told_with_what_is_near(store: StoreResults, sweep: SweepResults, tmp_path: Path) -> None:
    trial = sweep.trials[0]
    near = trial.name.replace("seed", "sede")
    assert f"`name` (={near!r}) is not there; did you mean" in refusal(sweep.trial, near)
    assert repr(trial.name) in refusal(sweep.trial, near)
    assert "fits 4 trials" in refusal(sweep.trial, "seed")
    assert "did you mean 'point'?" in refusal(sweep.frame, by="points")
    assert "networks were compared by window with none" in refusal(sweep.paired_by_window, "dense")
    assert "must be one of 0, 1, 2" in refusal(trial.masks, 7)
    for wrong in (True, "1", [1]):
        assert "must be one of 0, 1, 2" in refusal(trial.masks, wrong)
    assert "`by` (=None) must be one of point, trial, round, step, mask_update, layer, gen" in refusal(
        sweep.frame, by=None
    )
    assert "must be a string" in refusal(sweep.trial, 3)
    assert "must be a string" in refusal(store.sweep, 3)
    assert f"did you mean {sweep.name}?" in refusal(store.sweep, "swep")
    assert f"did you mean {sweep.name}?" in refusal(store.sweep, sweep.name[1:])
    assert "`name` (='') does not exist" in refusal(store.sweep, "")
    for wrong in (None, 3, tmp_path):
        assert "must be a string: a directory or a URI" in refusal(orchestrator.open, wrong)
    (tmp_path / "notes.txt").touch()
    assert "holds other files and no store" in refusal(orchestrator.open, str(tmp_path))
    assert refusal(orchestrator.open, str(tmp_path / "none")).startswith("`uri` (=")
    assert "did you mean 'sparsity'?" in refusal(sweep.plot.tradeoff, "sparsty")
    assert "needs measurements of `deploy`" in refusal(sweep.plot.pareto, "latency")


def test_a_sweep_shows_itself_in_a_notebook_and_on_a_terminal(store: StoreResults, sweep: SweepResults) -> None:
    page = sweep._repr_html_()

    assert "<table>" in page
    assert page.count("data:image/svg+xml;base64,") == 1
    assert "4 of 4 trials finished" in page
    assert "mlp on digits" in str(sweep)
    assert repr(sweep) == f"<sweep {sweep.name!r}: finished, 4 trials>"
    assert sweep.name in store._repr_html_()


def test_a_notebook_shows_the_first_lines_of_a_long_table() -> None:
    sweep = synthetic(make_plan(("l1_unstructured",), [i / 100 for i in range(1, 90)], (0,), rounds=1))

    page = sweep._repr_html_()
    assert page.count("<tr class=") == LINES
    assert "and 30 more rows: <code>sweep.frame()</code> has all" in page


OWN = """
from pathlib import Path
from torch import nn

Path("ran").write_text("")


def net(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.mark.slow
def test_own_code_builds_a_network_only_if_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})
    (tmp_path / "read_own.py").write_text(OWN)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "theirs.yaml").write_text("_target_: read_own.net\nclasses: null\n")
    own = ["model=theirs", "schedule.sparsity=0.5", *(argument for argument in RUN[2:] if "sparsity" not in argument)]
    monkeypatch.setattr(sys, "argv", ["orchestrator", "--config-dir", "mine", "-m", *own])
    orchestrate()
    del sys.modules["read_own"]
    (tmp_path / "ran").unlink()
    trial = orchestrator.open().sweep().trials[0]

    said = refusal(trial.model)
    assert "`model._target_` (=read_own.net) of the sweep is code that must run" in said
    assert "run_own_code=True" in said
    assert trial.weights()["1.weight"].shape == (10, 64)
    assert not (tmp_path / "ran").exists()
    assert torch.equal(trial.model(run_own_code=True)[1].weight, trial.weights()["1.weight"])
    assert (tmp_path / "ran").exists()


FIGURES = ("tradeoff", "pareto", "fine_tuning", "curves", "densities", "layers")


def test_what_became_of_a_trial_takes_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    end, left = PLAN.trials[0].stages[-1], PLAN.trials[1].stages[-1]
    records = {key: record for key, record in RECORDS.items() if key not in (end, left)}
    sweep = SweepResults(Store("nowhere"), SavedSweep(sweep_info(), PLAN, records, {end: "loss is \x1bnan"}))
    whole = compare_trials(PLAN, records, {end: "loss is nan"}).trials
    monkeypatch.setattr(
        "orchestrator.results.sweep_results.compare_trials", lambda *_: pytest.fail("all were compared")
    )

    assert [trial.status for trial in sweep.trials] == list(whole.values())
    assert [trial.failure for trial in sweep.trials[:2]] == [r"loss is \x1bnan", None]
    assert repr(sweep.trials[1]) == f"<trial {PLAN.trials[1].name!r}: unfinished>"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_in_the_axes_that_are_given(name: str) -> None:
    axes = Figure().add_subplot()

    assert getattr(synthetic().plot, name)(ax=axes) is axes
    assert axes.has_data()
    assert axes.get_title().startswith("cnn on digits")


def test_the_tradeoff_is_the_metric_with_its_bands_and_dense(sweep: SweepResults) -> None:
    axes = sweep.plot.tradeoff(ax=Figure().add_subplot())
    frame = sweep.frame()

    line, dense = axes.lines
    np.testing.assert_allclose(line.get_xdata(), 100 * frame["sparsity"][1:])
    np.testing.assert_allclose(line.get_ydata(), 100 * frame["test_mean"][1:])
    assert dense.get_ydata()[0] == pytest.approx(100 * frame["test_mean"][0])
    assert len(axes.collections) == 1, "the band of the line"
    assert axes.get_xlabel() == "sparsity (% of prunable weights)"


def test_curves_are_marked_where_a_round_begins(sweep: SweepResults) -> None:
    (line,) = sweep.plot.curves(ax=Figure().add_subplot()).lines
    history = sweep.trials[3].history()

    begins = history.groupby("round")["total_step"].max().tolist()[:-1]
    assert [line.get_xdata()[index] for index in line.get_markevery()] == begins


def test_the_front_is_of_what_masks_leave() -> None:
    sweep = synthetic()
    axes = sweep.plot.pareto("macs", ax=Figure().add_subplot())
    found = {line.get_label(): line for line in axes.lines}

    assert found["dense"].get_xdata() == [100.0]
    points = [point for point in sweep.comparison().operating_points if point.line == "l1_unstructured"]
    left = sorted(100 / point.speedup for point in points if point.speedup)
    np.testing.assert_allclose(found["l1_unstructured"].get_xdata(), left)


def test_several_panels_are_chosen_by_title() -> None:
    networks = [{"name": name, "kind": "cnn"} for name in ("a", "b")]
    plot = synthetic(plan_of([config("l1_unstructured", 0.5, 0, model=network) for network in networks])).plot

    assert "`panel` must be given; pass one of 'a on digits', 'b on digits'" in refusal(plot.tradeoff)
    assert plot.tradeoff(panel="b", ax=Figure().add_subplot()).get_title() == "b on digits"
    assert "did you mean 'b on digits' or" in refusal(plot.layers, panel="b in digits")


def test_names_from_a_store_are_no_markup_and_steer_no_terminal() -> None:
    name = "<script>alert(1)</script>\x1b[2J $\\frac{$"
    plan = plan_of([config("l1_unstructured", s, 0, method={"name": name, "kind": "l1"}) for s in (0.5, 0.9)])
    failed = {plan.trials[0].stages[-1]: name}
    records = {key: record for key, record in make_records(plan).items() if key not in failed}
    sweep = SweepResults(Store("nowhere", read_only=True), SavedSweep(sweep_info(), plan, records, failed))

    assert "<script" not in sweep._repr_html_()
    assert "\x1b" not in str(sweep) + repr(sweep.trials) + str(sweep.trials[0].failure)
    for by in ("point", "trial", "round", "step"):
        assert "\x1b" not in sweep.frame(by=by).to_string()  # type: ignore[arg-type]
    figure = Figure()
    sweep.plot.tradeoff(ax=figure.add_subplot())
    figure.draw_without_rendering()  # raises if the name is parsed as a formula


def test_failed_and_unfinished_trials_have_lines_without_figures() -> None:
    end = PLAN.trials[0].stages[-1]
    left = PLAN.trials[1].stages[-1]
    records = {key: record for key, record in RECORDS.items() if key not in (end, left)}
    saved = SavedSweep(sweep_info(), PLAN, records, {end: "loss is nan"})
    sweep = SweepResults(Store("nowhere", read_only=True), saved)
    frame = sweep.frame(by="trial")

    assert frame["status"].tolist()[:3] == ["failed", "unfinished", "finished"]
    assert frame["failure"].tolist()[0] == "loss is nan"
    assert frame["test"].isna().tolist()[:3] == [True, True, False]
    assert sweep.trials[0].rounds == (0, 1)
    assert "pass a finished round (0, 1)" in refusal(sweep.trials[0].masks)
    assert sweep.status == "failed"


@pytest.mark.parametrize("name", FIGURES)
def test_what_no_trial_has_finished_cannot_be_drawn(name: str) -> None:
    dense = {trial.dense for trial in PLAN.trials}
    saved = SavedSweep(sweep_info(), PLAN, {key: record for key, record in RECORDS.items() if key in dense})
    plot = SweepResults(Store("nowhere", read_only=True), saved).plot

    if name not in ("densities", "layers", "fine_tuning", "curves"):
        assert getattr(plot, name)(ax=Figure().add_subplot()).get_title() == "cnn on digits", "of dense networks"
    else:
        assert "the figure needs a finished " in refusal(getattr(plot, name))


def test_what_is_known_of_a_trial_before_it_ends_is_told_and_whole_numbers_stay_whole() -> None:
    end, dense = PLAN.trials[0].stages[-1], set(PLAN.trials[1].stages)
    records = {key: record for key, record in RECORDS.items() if key != end and key not in dense}
    whole, found = (
        SweepResults(Store("nowhere", read_only=True), SavedSweep(sweep_info(), PLAN, each)).frame(by="trial")
        for each in (RECORDS, records)
    )

    for name in ("model", "data", "line", "method", "schedule", "seed"):
        assert found[name].tolist() == whole[name].tolist()
    assert found["steps"].isna().any()
    assert (str(found["seed"].dtype), str(found["steps"].dtype)) == ("int64", "Int64")


def test_a_line_for_each_point_begins_with_what_it_is_of() -> None:
    assert list(synthetic().frame().columns)[:3] == ["model", "data", "line"]


def test_nothing_finished_is_no_error() -> None:
    sweep = SweepResults(Store("nowhere", read_only=True), SavedSweep(sweep_info(), PLAN))

    assert len(sweep.frame()) == len(sweep.frame(by="round")) == len(sweep.frame(by="step")) == 0
    assert len(sweep.frame(by="trial")) == len(PLAN.trials)
    assert "0 of 12 trials finished" in sweep._repr_html_()
    for name in (*FIGURES, "overlap"):
        assert "which the sweep does not have; draw another figure" in refusal(getattr(sweep.plot, name))


def test_one_trial_and_a_metric_that_is_no_fraction() -> None:
    plan = make_plan(("l1_unstructured",), (0.5,), (0,), rounds=1)
    rmse = replace(RECORDS[PLAN.trials[0].dense].metrics[0], name="rmse", unit="m", better="lower", format=".3f")
    records = {
        key: replace(record, metrics=(rmse,), after={"val/rmse": 2.0, "test/rmse": 3.0}, before={})
        for key, record in make_records(plan).items()
    }
    sweep = SweepResults(Store("nowhere", read_only=True), SavedSweep(sweep_info(), plan, records))

    assert sweep.frame()[["metric", "test_mean"]].to_numpy().tolist() == [["rmse", 3.0]] * 2
    assert sweep.frame()["test_low"].isna().all()
    assert sweep.plot.tradeoff(ax=Figure().add_subplot()).get_ylabel() == "test rmse (m)"
    assert "rmse" in sweep._repr_html_()


@pytest.mark.parametrize("content", [b"no masks", MaskSet({"fc1.weight": torch.ones(3)}).to_bytes()])
def test_masks_of_another_network_are_refused(tmp_path: Path, content: bytes) -> None:
    plan, store = make_plan(("l1_unstructured",), (0.5,), (0,)), Store(str(tmp_path))
    for record in make_records(plan).values():
        store.commit(replace(record, files={}), {"masks.npz": lambda file: file.write(content)})
    store.save_sweep("mine", manifest(sweep_info("mine"), plan))

    with pytest.raises(StoreError, match=r"masks\.npz is damaged: no masks can be read: .*The next run sets it aside"):
        orchestrator.open(str(tmp_path)).sweep("mine").trials[0].masks()


def test_a_damaged_stage_is_left_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = make_plan(("l1_unstructured",), (0.5,), (0,))
    store = Store(str(tmp_path))
    for key in plan.stages:
        store.commit(replace(make_records(plan)[key], files={}), {})
    store.save_sweep("mine", manifest(sweep_info("mine"), plan))
    record = tmp_path / "stages" / plan.trials[0].stages[-1] / "record.json"
    record.write_bytes(record.read_bytes()[:-9])
    before = sorted(tmp_path.rglob("*"))

    sweep = orchestrator.open(str(tmp_path)).sweep("mine")

    assert sweep.frame(by="trial")["status"].tolist() == ["unfinished"]
    assert sorted(tmp_path.rglob("*")) == before
    assert "is damaged" in caplog.text


def test_a_store_of_objects_is_opened_with_its_options(s3: dict[str, object]) -> None:
    plan = make_plan(("l1_unstructured",), (0.5,), (0,))
    store = Store("s3://bucket/results", options=s3)
    for record in make_records(plan).values():
        store.commit(replace(record, files={}), {})
    store.save_sweep("mine", manifest(sweep_info("mine"), plan))

    found = orchestrator.open("s3://bucket/results", options=s3)

    assert found.sweeps().index.tolist() == ["mine"]
    assert len(found.sweep().frame(by="round")) == 3


def test_a_line_by_trial_is_that_of_its_last_round() -> None:
    sweep = synthetic()
    by_trial, last = (sweep.frame(by="trial"), sweep.frame(by="round").query("final"))
    both = [name for name in by_trial.columns if name in last.columns]

    assert {"test", "sparsity", "total_steps", "own_seconds", "seed", "line"} < set(both)
    pd.testing.assert_frame_equal(by_trial[both], last[both].reset_index(drop=True))


def test_only_points_are_of_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points, with their intervals and tests, take most of the time of a large sweep."""
    monkeypatch.setattr("orchestrator.results.sweep_results.compare_trials", None)

    assert [len(synthetic().frame(by=by)) for by in ("trial", "round", "step")] == [12, 36, 240]  # type: ignore[arg-type]


@pytest.mark.slow  # builds ten thousand trials
@pytest.mark.parametrize("by", ["point", "trial", "round", "step"])
def test_ten_thousand_trials_are_a_frame_in_seconds(by: str) -> None:
    methods = [f"m{number}" for number in range(20)]
    made = make_plan(methods, [number / 101 for number in range(1, 101)], range(5), rounds=3)
    plan = Plan.from_json(json.loads(json.dumps(made.to_json())))  # shares parts, as a plan loaded from a store
    sweep = SweepResults(Store("nowhere", read_only=True), SavedSweep(sweep_info(), plan, make_records(plan)))
    begun = time.process_time()
    frame = sweep.frame(by=by)  # type: ignore[arg-type]

    assert time.process_time() - begun < 6, "seconds of a processor, on a loaded machine; 3 on a quiet one"
    assert len(frame) == {"point": 2001, "trial": 10_000, "round": 40_000, "step": 240_000}[by]


LIGHT = """
import sys, time
sys.modules["torch"] = sys.modules["hydra"] = sys.modules["ray"] = sys.modules["mlflow"] = None
import orchestrator
assert not any(name.startswith("orchestrator.") for name in sys.modules)
store = orchestrator.open(sys.argv[1])
store.sweeps()
seconds = time.process_time()
sweep = store.sweep()
for by in ("point", "trial", "round", "step"):
    sweep.frame(by=by)
sweep._repr_html_()
sweep.trials[0].record()
print(seconds)
"""


@pytest.mark.slow
def test_tables_need_neither_torch_nor_hydra_nor_ray_nor_mlflow(store: StoreResults) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, store.store.uri], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 3, "seconds of a processor, on a loaded machine; some 0.7 on a quiet one"


MODEL = """
import json, sys
import orchestrator
trial = orchestrator.open(sys.argv[1]).sweep().trials[0]
trial.masks(), trial.weights(), trial.model()
print(json.dumps([name for name in ("ray", "mlflow") if name in sys.modules]))
"""


@pytest.mark.slow
def test_a_network_needs_neither_ray_nor_mlflow(store: StoreResults) -> None:
    done = subprocess.run([sys.executable, "-c", MODEL, store.store.uri], capture_output=True, text=True, check=True)

    assert json.loads(done.stdout) == []


DOCS = Path(orchestrator.__file__).parent.parent / "docs"


def test_the_page_runs_as_it_stands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(
        r"^```python results\n(.*?)^```$", (DOCS / "how-to" / "results.md").read_text(), re.DOTALL | re.M
    )

    assert len(blocks) == 5
    run(blocks, folder, monkeypatch)
    assert (folder / "figure.pdf").exists()


def test_the_notebook_runs_cell_by_cell(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = json.loads((DOCS / "tutorials" / "read-results.ipynb").read_text())
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]

    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), "run it, and keep what it shows out"
    run(["".join(cell["source"]) for cell in cells], folder, monkeypatch)


def run(blocks: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run code blocks in order, as a notebook does, in a folder where a sweep has run."""
    from matplotlib import pyplot

    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    try:
        for block in blocks:
            exec(block, names)
    finally:
        pyplot.close("all")
