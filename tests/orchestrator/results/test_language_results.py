"""Results of language models: pairs by window, layers, continuations, in frames and on the report's page."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import Any

import pytest
from factories import SIZES, make_plan, make_records, sweep_info
from matplotlib.figure import Figure

from orchestrator.compare.audit.checklist import audit
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.results.sweep_results import SweepResults
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.store.store import Store
from orchestrator.views.report import plain_files, tables
from orchestrator.views.report.page import page
from orchestrator.views.report.report_files import report

PLAN = make_plan(("l1_unstructured", "wanda"), (0.5,), seeds=(0, 1), rounds=1)
KL = Metric("kl_from_dense", "nats", "lower", margin=0.01, format=".4f")
LAYERS = ("conv2.weight", "fc1.weight")


def measured(key: str, record: StageRecord) -> StageRecord:
    """Return a record with the details and figures of a language model."""
    method = PLAN.stages[key].fields.get("method", {}).get("name", "dense")
    worse = {"dense": 0.0, "l1_unstructured": 2.0, "wanda": 1.0}[method]
    layers = {name: {"block": "b", "sparsity": 0.5, "error": 0.1 + i, "rows": 8} for i, name in enumerate(LAYERS)}
    details: dict[str, Any] = {
        "measured": {"test": {"windows": {"loss": [10.0 + worse, 12.0 + worse, 9.0], "tokens": [10, 10, 10]}}},
        "generations": [{"prompt": "The <b>", "text": f" {method}\nand\x1b more"}],
        **({"scoring": {"layers": layers}} if method == "wanda" else {}),
    }
    after = {**record.after, **({} if method == "dense" else {"test/kl_from_dense": worse / 10})}
    return replace(record, details=details, after=after, metrics=(*record.metrics, KL))


RECORDS = {key: measured(key, record) for key, record in make_records(PLAN).items()}
SWEEP = SweepResults(Store("nowhere", read_only=True), SavedSweep(sweep_info(), PLAN, RECORDS))


def test_records_keep_the_details_that_reports_read() -> None:
    for record in RECORDS.values():
        assert StageRecord.from_json(record.to_json()).windows("test") == record.windows("test")
    key = PLAN.trials[0].stages[-1]
    for wrong in ({"generations": [{"prompt": "a"}]}, {"measured": {"test": {"windows": {"loss": ["a"]}}}}):
        with pytest.raises(ValueError, match=r"generations|loss"):
            StageRecord.from_json(replace(RECORDS[key], details=wrong).to_json())


def test_pairs_by_window_are_a_frame_with_the_columns_of_the_csv_file() -> None:
    every, against = SWEEP.paired_by_window(), SWEEP.paired_by_window("wanda")
    lines = list(csv.DictReader(io.StringIO(plain_files.windows_csv(SWEEP.comparison()).decode())))

    assert list(every.columns) == list(lines[0])
    assert every[["line", "reference"]].to_numpy().tolist() == [
        ["l1_unstructured", "dense"],
        ["wanda", "dense"],
        ["wanda", "l1_unstructured"],
    ]
    assert every["difference"].tolist() == pytest.approx([4 / 30, 2 / 30, -2 / 30])
    assert against[["line", "reference"]].to_numpy().tolist() == [["l1_unstructured", "wanda"]]
    row = against.iloc[0]
    assert (row["difference"], row["windows"], row["draws_std"]) == (pytest.approx(2 / 30), 3, 0)
    assert row["windows_low"] < row["difference"] < row["windows_high"]
    with pytest.raises(OrchestratorError, match=r"`reference` \(='wnda'\) is not there; did you mean 'wanda'"):
        SWEEP.paired_by_window("wnda")


def test_layers_and_continuations_are_frames() -> None:
    layers, written = SWEEP.frame(by="layer"), SWEEP.frame(by="generation")
    pruned = layers[(layers["line"] == "wanda") & (layers["round"] == 1) & (layers["seed"] == 0)]

    assert pruned["layer"].tolist() == list(SIZES)
    assert pruned["error"].dropna().tolist() == [0.1, 1.1]
    assert pruned["density"].tolist() == pytest.approx([0.5] * 4)
    assert layers[layers["line"] == "l1_unstructured"]["error"].isna().all()
    assert written[["line", "round", "prompt"]].head(2).to_numpy().tolist() == [
        ["l1_unstructured", 0, "The <b>"],
        ["l1_unstructured", 1, "The <b>"],
    ]
    assert "\x1b" not in written.to_string()


def test_the_page_shows_pairs_metrics_and_continuations_side_by_side() -> None:
    comparison = SWEEP.comparison()
    continued = tables.generations(RECORDS, comparison)
    shown = page(sweep_info(), PLAN, comparison, audit(PLAN, RECORDS, comparison), {}, "", continued)

    assert "<h2>Differences by held-out window</h2>" in shown
    assert "kl from dense nats" in shown
    assert "The &lt;b&gt;" in shown
    assert "<b>" not in shown
    assert "\x1b" not in shown
    (table,) = continued.values()
    cells = [(row.label, row.cells[0]) for row in table.rows]
    assert cells == [("dense", ""), ("l1_unstructured", "50.00"), ("wanda", "50.00")]
    assert "further metrics on test" in "\n".join(tables.text_table(comparison))
    flat = plain_files.points(comparison)
    assert [point.get("test_kl_from_dense_mean") for point in flat] == [None, 0.2, 0.1]


def test_errors_of_layers_are_drawn_by_method() -> None:
    axes = SWEEP.plot.layer_errors(ax=Figure().add_subplot())

    assert [line.get_label() for line in axes.lines] == ["wanda"]
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([0.1, 1.1])
    assert axes.get_yscale() == "log"


def test_only_a_sweep_with_windows_has_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})
    plain = SweepResults(Store("nowhere", read_only=True), SavedSweep(sweep_info(), PLAN, make_records(PLAN)))
    files = [report(sweep_info(), PLAN, each.records, each.comparison()) for each in (SWEEP, plain)]

    assert ["comparison/windows.csv" in each for each in files] == [True, False]
    assert b"Continuations" not in files[1]["comparison/report.html"]
