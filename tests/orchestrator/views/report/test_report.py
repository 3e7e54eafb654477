from __future__ import annotations

import csv
import dataclasses
import io
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import numpy as np
import pytest
from browser import MISSING, browser
from factories import SIZES, config, make_plan, make_records, plan_of, sweep_info
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from store_cases import Content

from orchestrator.commands.compare_command import main as compare_main
from orchestrator.commands.store_command import main as store_main
from orchestrator.commands.sync_command import main as sync_main
from orchestrator.compare.audit.checklist import RULES
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.secondary_figures import Harm
from orchestrator.compare.statistics import Estimate
from orchestrator.core.file_names import NOTE_FILE
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.results.sweep_results import SweepResults
from orchestrator.store.saved_sweep import SavedSweep, load, manifest
from orchestrator.store.store import Store
from orchestrator.views.report import tables
from orchestrator.views.report.columns import CONSIDERED, OF_A_TOKEN, difference, interval, narrow, spread
from orchestrator.views.report.figures import drawing, figure_data, figure_table, layer_data
from orchestrator.views.report.figures.layer_data import overlap_of
from orchestrator.views.report.page import page
from orchestrator.views.report.report_files import kept, report, write
from orchestrator.views.report.tables import print_comparison
from orchestrator.views.tracking.read_back import load_from_mlflow
from pruning.masks import mask_files as mask_files

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's own

PLAN = make_plan(sparsities=(0.5, 0.9), rounds=1)
RECORDS = make_records(PLAN)


class Page(HTMLParser):
    """Parser that collects tags, references and identifiers, and checks that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.identifiers: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.references.append(value or "")
            if name == "id":
                self.identifiers.append(value or "")
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "br", "img"):
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def masks(key: str, name: str) -> bytes:
    """Return random masks as a store's file."""
    import torch

    from pruning import MaskSet

    generator = torch.Generator().manual_seed(int(key[:8], 16))
    return MaskSet({name: torch.rand(size, generator=generator) < 0.5 for name, size in SIZES.items()}).to_bytes()


def mask_file(held: dict[str, NDArray[np.bool_]]) -> bytes:
    return mask_files.write_npz(mask_files.encode(held, "digest"))


@pytest.fixture(scope="module", autouse=True)
def _drawn_once() -> Iterator[None]:
    """Draw figures of equal data once: their files are equal (see `test_drawing`), and drawing is the slowest part."""
    render, figure, drawn = drawing._rendered, drawing.figure, dict[str, dict[str, bytes]]()

    def rendered(draw: Callable[[], Any]) -> dict[str, bytes]:
        import matplotlib  # noqa: F401 - a test breaks this import

        data, kind = draw()
        key = f"{kind}{data}"
        if key not in drawn:
            drawn[key] = render(lambda: figure(data, kind))
        return drawn[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "figure", lambda data, kind: (data, kind))
        patch.setattr(drawing, "_rendered", rendered)
        yield


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return report(sweep_info(), PLAN, RECORDS, compare_trials(PLAN, RECORDS), masks)


def test_a_report_has_a_page_tables_figures_and_the_audit(files: dict[str, bytes]) -> None:
    assert {path.removeprefix("comparison/") for path in files} == {
        "report.html",
        "summary.csv",
        "trials.csv",
        "comparison.json",
        "audit.json",
        "metrics.json",
        "README.md",
        *(f"figures/{name}.{kind}" for name in FIGURES for kind in ("svg", "png")),
    }
    assert len(json.loads(files["comparison/audit.json"])) == sum(not rule.searches_only for rule in RULES)
    dense = [record.after["test/accuracy"] for record in RECORDS.values() if record.round == 0]
    metrics = json.loads(files["comparison/metrics.json"])
    assert metrics["summary/dense_accuracy"] == pytest.approx(np.mean(dense))
    found = compare_trials(PLAN, RECORDS)
    for point in found.operating_points:
        assert point.difference is not None
        place = f"{point.line}/{point.sparsity:.3g}"
        assert metrics[f"difference/{place}"] == point.difference.mean
        assert metrics[f"compression/{place}"] == point.compression
    best = max((point.sparsity for point in found.largest_matching.values() if point), default=0.0)
    assert metrics["summary/best_matching_sparsity"] == best


def test_the_page_is_whole_and_asks_for_nothing(files: dict[str, bytes]) -> None:
    page = Page(files["comparison/report.html"].decode())

    assert page.open == []
    assert all(reference.startswith(("#", "data:image/png;")) for reference in page.references)
    assert len(set(page.identifiers)) == len(page.identifiers)
    assert {each[1:] for each in page.references if each[0] == "#"} <= set(page.identifiers)
    text = files["comparison/report.html"].decode()
    assert not re.search(r"<(script|link|iframe|img)\b|@import|url\((?!#)", text)


def test_the_page_says_what_was_run_and_keeps_secrets(files: dict[str, bytes]) -> None:
    text = files["comparison/report.html"].decode()

    assert "python -m orchestrator +sweep=synthetic" in text
    assert "2.13.0" in text
    assert not any(b"hunter2" in content for content in files.values())


def test_names_cannot_break_out_of_the_page() -> None:
    plan = dataclasses.replace(
        PLAN, trials=tuple(dataclasses.replace(trial, name=f"<script>{trial.name}") for trial in PLAN.trials)
    )
    key = plan.trials[0].stages[-1]
    records = {k: v for k, v in RECORDS.items() if k != key}
    found = compare_trials(plan, records, {key: "<img src=x>"})
    text = report(sweep_info("<b>&"), plan, records, found)["comparison/report.html"]

    assert b"<script>" not in text
    assert b"<img" not in text
    assert b"<b>&<" not in text


@pytest.mark.slow
def test_names_are_no_formula_no_markup_and_steer_no_terminal() -> None:
    plan = plan_of([config("=1+1|<img src=x>[a](http://h)*", 0.9, seed, 1) for seed in (0, 1)])
    found = compare_trials(plan, make_records(plan), {plan.trials[0].stages[-1]: "\x1b[2J"})
    files = report(sweep_info(), plan, make_records(plan), found)
    said = io.StringIO()
    print_comparison(dataclasses.replace(found, trials={"\x1b[2Jtrial": "failed"}), Console(file=said))

    assert r"| =1+1\|&lt;img src=x&gt;\[a\](http://h)\* |" in files["comparison/README.md"].decode()
    for name in ("trials", "summary"):
        rows = list(csv.reader(files[f"comparison/{name}.csv"].decode().splitlines()))
        assert any(cell.startswith("'=1+1|") for row in rows for cell in row)
        assert not [cell for row in rows for cell in row if cell.startswith(("=", "+", "@"))]
    assert r"\x1b[2Jtrial" in said.getvalue()
    assert "\x1b" not in said.getvalue()


def test_a_sweep_of_which_nothing_finished_has_a_report_too() -> None:
    files = report(sweep_info(), PLAN, {}, compare_trials(PLAN, {}), masks)

    assert b"0 of 12 trials finished" in files["comparison/report.html"]
    assert not any("figures" in path for path in files)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: bytes) -> Store:
    """Store with two finished sweeps, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("mlflow.db").write_bytes(empty_database)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    store = Store("store")
    for name, seeds in (("first-1", (0, 1)), ("second-2", (2,))):
        plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=seeds, rounds=1)
        commit(store, plan, make_records(plan))
        store.save_sweep(name, manifest(sweep_info(name), plan))
    return store


def commit(store: Store, plan: Plan, records: dict[str, StageRecord]) -> None:
    for key, record in records.items():
        held = {"masks.npz": Content(masks(key, "masks.npz"))} if record.kind == "round" else {}
        store.commit(dataclasses.replace(record, files={}), held)


def test_a_saved_sweep_is_loaded_as_it_was(stored: Store) -> None:
    sweep = load(stored, "first-1")

    assert [trial.name for trial in sweep.plan.trials] == [
        "l1_unstructured sparsity=0.9 seed=0",
        "l1_unstructured sparsity=0.9 seed=1",
    ]
    assert set(sweep.records) == set(sweep.plan.stages)
    assert sweep.info.command.startswith("python -m orchestrator +sweep=synthetic")
    assert "hunter2" not in repr(sweep)


@pytest.mark.slow
def test_compare_rebuilds_and_merges_from_the_store(stored: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_main(["first", "second-2", "--merge", "--output", "out"]) == 0

    out = capsys.readouterr().out
    assert "l1_unstructured" in out
    assert re.search(r"90\.01 .* 3$", out, re.MULTILINE)
    assert re.search(r"^Audit: \d+ of \d+ rules pass", out, re.MULTILINE)
    assert b"first-1 + second-2" in Path("out/comparison/report.html").read_bytes()


def test_why_trials_of_any_merged_sweep_failed_is_told(stored: Store, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5,), seeds=(5,), rounds=1)
    (broken,) = plan.trials[0].stages[1:]
    commit(stored, plan, {key: record for key, record in make_records(plan).items() if key != broken})
    stored.save_sweep("third-3", manifest(sweep_info("third-3"), plan, {broken: "its disk is full"}))

    for names in (["first", "third"], ["third", "first"]):
        compare_main([*names, "--merge"])
        assert "its disk is full" in capsys.readouterr().out


def test_the_margin_can_be_changed_afterwards(stored: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_main(["first", "--margin", "0.75", "--output", "out"]) == 0

    assert "match: a loss of 75.00 points" in capsys.readouterr().out
    assert json.loads(Path("out/comparison/comparison.json").read_bytes())["metrics"][0]["margin"] == 0.75
    assert b"match: a loss of 75.00 points" in Path("out/comparison/report.html").read_bytes()


def test_of_many_lines_page_and_figures_show_some_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [f"method_{number:02d}" for number in range(45)]
    plan = plan_of([config(method, 0.9, 0, 1) for method in methods])
    records = make_records(plan)
    for trial in plan.trials:
        last = records[trial.stages[-1]]
        good = 0.5 + int(trial.config["method"]["name"][-2:]) / 100
        records[last.key] = dataclasses.replace(last, after={**last.after, "val/accuracy": good})
    monkeypatch.setattr("orchestrator.views.report.table.ROWS", 10)
    monkeypatch.setattr("orchestrator.views.report.page.ROWS", 10)
    comparison = compare_trials(plan, records)
    (plot,) = figure_data.tradeoff(comparison)
    text = page(sweep_info(), plan, comparison, (), {"cost": b'<svg width="1pt"></svg>'})

    assert [series.label for series in plot.series] == methods[-figure_data.LINES :]
    assert (
        '<p class="quiet">Figures show only the 20 lines with the best means on validation for cnn on digits (45'
        in text
    )
    assert text.count("<tr") == 2 * (1 + 10) + 1 + (1 + 44)  # two tables, the audit, and the pairs of methods
    assert "36 more rows are in summary.csv." in text
    assert "\nand 35 more, in trials.csv</pre>" in text
    assert "5 more lines are in summary.csv of the report." in text
    assert figure_data.left_out(compare_trials(PLAN, RECORDS)) == ""


def test_the_links_of_the_readme_lead_to_files_beside_it(files: dict[str, bytes]) -> None:
    links = re.findall(r"\]\(([^)]*)\)", files["comparison/README.md"].decode())

    assert "report.html" in links
    assert {f"comparison/{link}" for link in links} <= files.keys()


def test_compare_lists_what_there_is(stored: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_main([]) == 0
    assert sorted(line.split()[0] for line in capsys.readouterr().out.splitlines()) == ["first-1", "second-2"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        [""],
        ["first", "--option", "x"],
        ["first", "--margin", "1"],
        ["first", "--margin", "nan"],
        ["first", "--margin", "x"],
        ["first", "--output", "store/store.json"],
    ],
)
def test_a_users_mistake_is_a_sentence(stored: Store, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert compare_main(arguments) == 2
    assert capsys.readouterr().err.startswith("`")


@pytest.mark.slow
def test_sync_completes_mlflow_from_the_store(stored: Store, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow import MlflowClient

    assert sync_main(["first"]) == 0
    assert sync_main(["first", "second"]) == 0

    assert "2 trials are in MLflow" in capsys.readouterr().out
    client = MlflowClient(f"sqlite:///{Path('mlflow.db').absolute()}")
    runs = client.search_runs([client.get_experiment_by_name("pruning").experiment_id])
    assert sorted(run.info.run_name for run in runs) == [
        "first-1",
        "l1_unstructured sparsity=0.9 seed=0",
        "l1_unstructured sparsity=0.9 seed=1",
        "l1_unstructured sparsity=0.9 seed=2",
        "second-2",
    ]
    assert {run.info.status for run in runs} == {"FINISHED"}
    (parent,) = [run for run in runs if run.info.run_name == "first-1"]
    assert f"/runs/{parent.info.run_id}/artifacts/comparison/report.html" in parent.data.tags["mlflow.note.content"]


@pytest.mark.slow
def test_no_command_but_a_sweep_runs_what_a_configuration_names(
    stored: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("planted.py").write_text("raise SystemExit('this ran')")
    monkeypatch.syspath_prepend(tmp_path)
    parts = ("model", "data", "train", "finetune", "method")
    own = {
        part: {"name": "own", "_target_": "planted.thing", "optimizer": {"_target_": "planted.SGD"}} for part in parts
    }
    plan = plan_of([config("own", 0.9, 0, 1, **own)])
    commit(stored, plan, make_records(plan))
    stored.save_sweep("own-1", manifest(sweep_info("own-1"), plan))

    assert compare_main(["own", "--output", "out"]) == 0
    assert sync_main(["own"]) == 0
    for line in ("list", "show own", "copy own there", "report", "prune", "verify", "delete own --yes"):
        assert store_main(line.split()) == 0
    assert "planted" not in sys.modules


@pytest.mark.slow
def test_a_comparison_can_be_rebuilt_from_mlflow_alone(stored: Store, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"sqlite:///{Path('mlflow.db').absolute()}"
    assert sync_main(["first"]) == 0
    sweep = load_from_mlflow("first-1", uri)
    original = load(stored, "first-1")

    assert sweep.plan == original.plan
    assert sweep.records == original.records
    assert sweep.info.command == original.info.command
    capsys.readouterr()
    assert compare_main(["first-1", "--mlflow", uri]) == 0
    assert "90.01" in capsys.readouterr().out
    assert compare_main(["nope", "--mlflow", uri]) == 2
    assert "`SWEEP` (='nope') does not exist" in capsys.readouterr().err
    assert compare_main(["fir", "--mlflow", uri]) == 0
    assert "90.01" in capsys.readouterr().out
    assert compare_main(["--mlflow", uri]) == 0
    assert capsys.readouterr().out.split() == ["first-1"]


@pytest.mark.parametrize("names", [[], ["first"]])
def test_reading_from_mlflow_makes_no_database(
    names: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert compare_main([*names, "--mlflow", f"sqlite:///{tmp_path}/typo/mlflow.db"]) == 2

    out, err = capfd.readouterr()
    assert f"{tmp_path}/typo/mlflow.db cannot be read: No such file or directory" in err
    assert (out, err.count("\n")) == ("", 1)
    assert not (tmp_path / "typo").exists()


def test_sync_without_a_name_completes_every_sweep_that_can_be_read(
    stored: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path("store") / "sweeps" / "damaged-3.json").write_text("{")

    assert sync_main(["--list"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert sorted(listed) == ["damaged-3", "first-1", "second-2"]
    assert " damaged " in listed["damaged-3"]
    assert sync_main([]) == 2
    out, err = capsys.readouterr()
    assert "first-1: 2 trials are in MLflow" in out
    assert "second-2: 1 trials are in MLflow" in out
    assert "damaged-3" in err
    assert load_from_mlflow("second-2").plan == load(stored, "second-2").plan


def test_sync_stops_where_mlflow_cannot_be_opened(stored: Store, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()

    assert sync_main(["--uri", "sqlite:///folder", "--experiment", "a b"]) == 3
    told = capsys.readouterr().err
    assert "it is a directory" in told
    assert told.splitlines()[-1].strip() == (
        "python -m orchestrator.sync first-1 second-2 --uri sqlite:///folder --experiment 'a b'"
    )


def test_sync_tells_of_failures_and_of_what_was_never_run(stored: Store) -> None:
    from mlflow import MlflowClient

    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5,), seeds=(5, 6), rounds=1)
    (_, broken), (_, missing) = (trial.stages for trial in plan.trials)
    records = {key: record for key, record in make_records(plan).items() if key not in (broken, missing)}
    commit(stored, plan, records)
    stored.save_sweep("third-3", manifest(sweep_info("third-3"), plan, {broken: "loss is nan"}))

    assert sync_main(["third"]) == 0

    client = MlflowClient(f"sqlite:///{Path('mlflow.db').absolute()}")
    runs = client.search_runs([client.get_experiment_by_name("pruning").experiment_id])
    assert {run.info.run_name.rpartition("seed=")[2]: run.info.status for run in runs} == {
        "third-3": "FAILED",
        "5": "FAILED",
        "6": "KILLED",
    }
    assert load_from_mlflow("third-3").failures == {broken: "loss is nan"}


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_browser_shows_the_page_without_an_error(files: dict[str, bytes], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(files["comparison/report.html"])
    with browser(tmp_path / "profile") as window:
        window.open(page.as_uri())
        window.wait_for_text("synthetic", "Comparison", "random_unstructured", "Figures", "every trial finished")
        sizes = window.script(
            "return [...document.querySelectorAll('figure > svg')].map(svg => svg.getBoundingClientRect())"
            ".map(box => Math.min(box.width, box.height))"
        )

        assert window.errors() == []
        assert len(sizes) == sum(path.endswith(".svg") for path in files)
        assert min(sizes) > 100
        assert window.script("return performance.getEntriesByType('resource').length") == 0
        for width in (1280, 800, 390):
            window.resize(width)
            assert window.script("return document.documentElement.scrollWidth") == width, "the page is wider than it"
        colours = {}
        for scheme in ("light", "dark"):
            window.prefer(scheme)
            colours[scheme] = window.script(
                "return [[document.body, 'color'], [document.body, 'backgroundColor'], [document.querySelector("
                "'figure svg'), 'backgroundColor']].map(([element, name]) => getComputedStyle(element)[name])"
            )
        assert colours["light"][:2] == ["rgb(26, 26, 26)", "rgb(255, 255, 255)"]
        assert colours["dark"] == ["rgb(230, 230, 230)", "rgb(22, 24, 27)", "rgb(255, 255, 255)"]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_table_of_two_texts_and_unequal_costs_fits_1200_pixels(tmp_path: Path) -> None:
    def with_plays(record: StageRecord) -> StageRecord:
        more = {"test_plays/accuracy": record.after["test/accuracy"] - 0.1}
        return replace(record, after={**record.after, **more}, steps=record.steps + len(record.key) * record.round)

    records = {key: with_plays(record) for key, record in RECORDS.items()}
    slower = {key: replace(record, steps=2 * record.steps) for key, record in list(records.items())[-6:]}
    found = compare_trials(PLAN, {**records, **slower})
    odd = tuple(
        replace(point, requested_sparsity=point.sparsity - 0.1, harmed=(Harm(1, 0.25), Harm(2, 0.125), Harm(7, 0.1)))
        for point in found.points
    )
    (tmp_path / "report.html").write_text(page(sweep_info(), PLAN, replace(found, points=odd), (), {}))
    with browser(tmp_path / "profile") as window:
        window.open((tmp_path / "report.html").as_uri())
        window.resize(1200)
        wider = "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth).length"

        assert window.script("return document.querySelector('table').innerText").count("vs dense") == 2
        assert window.script(f"return {wider}") == 0, "a table is cut off"


def test_a_report_is_kept_only_while_it_is_of_the_same_comparison(files: dict[str, bytes], tmp_path: Path) -> None:
    comparison = compare_trials(PLAN, RECORDS)
    fewer = compare_trials(PLAN, dict(list(RECORDS.items())[:-1]))
    assert kept(tmp_path, comparison) == {}

    write(tmp_path, files)

    assert kept(tmp_path, comparison) == files
    assert kept(tmp_path, fewer) == {}
    assert list(files)[-1] == "comparison/comparison.json", "written last, so a report that was cut off is not kept"


def test_only_files_that_changed_are_written(tmp_path: Path) -> None:
    write(tmp_path, {"comparison/same.csv": b"same", "comparison/other.csv": b"old"})
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "comparison").iterdir()}
    write(tmp_path, {"comparison/same.csv": b"same", "comparison/other.csv": b"new", "new/one.csv": b"1"})

    assert (tmp_path / "comparison/same.csv").stat().st_mtime_ns == before["same.csv"]
    assert (tmp_path / "comparison/other.csv").read_bytes() == b"new"
    assert (tmp_path / "new/one.csv").read_bytes() == b"1"


def test_masks_damaged_in_the_store_are_left_out_and_told(
    files: dict[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(str(tmp_path / "store"))
    commit(store, PLAN, RECORDS)
    chosen = layer_data.overlapping(compare_trials(PLAN, RECORDS))
    path = next((tmp_path / "store").rglob(f"{chosen[0]}/**/masks.npz"))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-9] + b"\0" * 9)
    found = report(sweep_info(), PLAN, RECORDS, compare_trials(PLAN, RECORDS), store.read)

    assert set(found) == set(files)
    assert found["comparison/figures/overlap.svg"] != files["comparison/figures/overlap.svg"]
    assert found["comparison/report.html"].count(b"<figure id=") == len(FIGURES)
    (told,) = caplog.messages
    assert chosen[0][:12] in told
    assert "\n" not in told


def test_masks_none_of_which_can_be_read_have_no_figure(caplog: pytest.LogCaptureFixture) -> None:
    found = report(sweep_info(), PLAN, RECORDS, compare_trials(PLAN, RECORDS), lambda key, name: b"nonsense")

    assert "comparison/figures/overlap.svg" not in found
    assert "comparison/figures/tradeoff.svg" in found
    assert len(caplog.messages) == 6


@pytest.mark.slow
def test_masks_of_networks_of_other_shapes_are_not_compared() -> None:
    channels = [{"name": "cnn", "channels": channels} for channels in ([8, 8], [16, 16])]
    methods = ("l1_unstructured", "random_unstructured")
    plan = plan_of([config(m, 0.9, s, 1, model=model) for model in channels for m in methods for s in (0, 1)])
    records, comparison = make_records(plan), compare_trials(plan, make_records(plan))

    def width(key: str) -> int:
        return int(plan.stages[plan.stages[key].parent or key].fields["model"]["channels"][0])

    def read(key: str, name: str) -> bytes:
        return mask_file({"conv.weight": np.ones((width(key), 3), bool), "fc.weight": np.ones((width(key), 5), bool)})

    for key, record in records.items():
        sizes = {"conv.weight": 3 * width(key), "fc.weight": 5 * width(key)}
        records[key] = dataclasses.replace(record, tensor_sizes=sizes)
    matrices = overlap_of(records, comparison, read)
    (matrix,) = matrices

    assert matrix.values == ((1.0, 1.0, None, None),) * 2 + ((None, None, 1.0, 1.0),) * 2
    assert "comparison/figures/overlap.svg" in report(sweep_info(), plan, records, comparison, read)


def test_where_no_two_masks_are_of_one_shape_there_is_no_overlap() -> None:
    channels = [{"name": "cnn", "channels": channels} for channels in ([8, 8], [16, 16])]
    plan = plan_of([config("l1_unstructured", 0.9, 0, 1, model=model) for model in channels])
    comparison = compare_trials(plan, make_records(plan))
    shapes = {trial.stages[-1]: trial.config["model"]["channels"] for trial in plan.trials}

    records = {
        key: dataclasses.replace(record, tensor_sizes={"w": int(np.prod(shapes.get(key, 0)))})
        for key, record in make_records(plan).items()
    }
    assert overlap_of(records, comparison, lambda key, name: mask_file({"w": np.ones(shapes[key], bool)})) == ()


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        (5, "has 6 entries, and the record says 5"),
        (10**9, "is left out: the figure compares at most 134217728 entries of masks"),
    ],
)
def test_masks_that_claim_more_than_their_record_or_than_memory_holds_are_not_read(
    caplog: pytest.LogCaptureFixture, recorded: int, said: str
) -> None:
    records, comparison = make_records(PLAN), compare_trials(PLAN, RECORDS)
    records = {key: dataclasses.replace(record, tensor_sizes={"w": recorded}) for key, record in records.items()}
    forged = mask_file({"w": np.ones(recorded + 1 if recorded < 10 else 1, bool)})

    assert overlap_of(records, comparison, lambda key, name: forged) == ()
    assert said in caplog.text


FIGURES = ("tradeoff", "fine_tuning", "curves", "layers", "overlap")


def fail(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("no room\nfor https://me:hunter2@host")


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_that_cannot_be_made_costs_no_other_file(
    files: dict[str, bytes],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(figure_table.FIGURES, name, replace(figure_table.FIGURES[name], data=fail))  # type: ignore[misc]
    made = report(sweep_info(), PLAN, RECORDS, compare_trials(PLAN, RECORDS), masks)

    assert set(made) == {path for path in files if f"figures/{name}." not in path}
    assert made["comparison/report.html"].count(b"<figure id=") == len(FIGURES) - 1
    assert caplog.messages == [
        f"The report is made without the figure {name}: RuntimeError: no room for https://me:***@host"
    ]


def test_no_figure_can_be_drawn_and_the_tables_stand(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # like a broken installation: ImportError
    drawing.prepare()
    made = report(sweep_info(), PLAN, RECORDS, compare_trials(PLAN, RECORDS), masks)

    assert set(made) == {path for path in files if "figures/" not in path}
    assert len(caplog.messages) == len(FIGURES)


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ("page", "comparison/report.html"),
        ("headline", "comparison/metrics.json"),
        ("note", "comparison/README.md"),
    ],
)
def test_a_page_that_cannot_be_made_costs_no_other_file(
    files: dict[str, bytes], part: str, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"orchestrator.views.report.report_files.{part}", fail)
    made = report(sweep_info(), PLAN, RECORDS, compare_trials(PLAN, RECORDS), masks)

    assert made == {name: content for name, content in files.items() if name != path}
    assert caplog.messages == [f"The report is made without {path}: RuntimeError: no room for https://me:***@host"]


def test_an_audit_that_fails_leaves_the_page(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("orchestrator.views.report.report_files.audit", fail)
    made = report(sweep_info(), PLAN, RECORDS, compare_trials(PLAN, RECORDS))

    assert b"<h2>Comparison</h2>" in made["comparison/report.html"]
    assert json.loads(made["comparison/audit.json"]) == []
    assert len(caplog.messages) == 1


@pytest.mark.slow
def test_a_driver_draws_the_report_without_torch(tmp_path: Path) -> None:
    (tmp_path / "sweep").write_bytes(
        pickle.dumps((sweep_info(), PLAN, RECORDS, {key: masks(key, "") for key in RECORDS}))
    )
    code = """
import pickle, sys
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.views.report.report_files import report
info, plan, records, masks = pickle.load(open(sys.argv[1], "rb"))
files = report(info, plan, records, compare_trials(plan, records), lambda key, name: masks[key])
print("comparison/figures/overlap.svg" in files, {"torch", "ray", "mlflow"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "sweep")], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[0] == "True set()"


def test_the_description_says_how_many_figures_are_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.views.report.report_files.METRICS_SHOWN", 3)
    found = report(sweep_info(), PLAN, RECORDS, compare_trials(PLAN, RECORDS))

    assert len(json.loads(found["comparison/metrics.json"])) == 3
    assert "has the first 3 of 15 figures" in found[NOTE_FILE].decode()


@pytest.mark.parametrize(("total", "cell"), [(120_000, "0 left"), (0, "–")])
def test_multiply_accumulates_of_0_are_told_and_are_no_infinite_speedup(total: int, cell: str) -> None:
    """A fully pruned network has no MACs left; a network with unknown operations has none counted."""
    changed = {
        key: dataclasses.replace(record, macs=total, macs_remaining=0.0)
        for key, record in RECORDS.items()
        if record.round or not total
    }
    records = RECORDS | changed
    found = compare_trials(PLAN, records)
    sweep = SweepResults(Store("nowhere"), SavedSweep(sweep_info(), PLAN, records, {}))
    files = report(sweep_info(), PLAN, records, found)

    lines = [line for line in tables.text_table(found) if re.match(r" +\d\d\.\d\d ", line)]
    assert [f" {cell} " in line for line in lines] == [True] * 4
    assert "0 left: none remain, at one seed or all; –: none are counted." in next(tables.notes(found))
    assert f"<td>{cell}</td>" in files["comparison/report.html"].decode().replace("\xa0", " ")
    assert f"| {cell} |" in files[NOTE_FILE].decode()
    for name in ("trials", "summary"):
        rows = list(csv.DictReader(io.StringIO(files[f"comparison/{name}.csv"].decode())))
        pruned = [row for row in rows if row["round"] != "0"]
        assert {(row["speedup"], float(row["macs"]), float(row["macs_remaining"])) for row in pruned} == {
            ("", float(total), 0.0)
        }
    for by in ("point", "trial", "round"):
        frame = sweep.frame(by=by)  # type: ignore[arg-type]
        assert frame["speedup"][frame["round"] > 0].isna().all()
    assert not re.search(
        r"\binf\b", "".join(content.decode() for name, content in files.items() if "figures" not in name)
    )
    figure = Figure()
    sweep.plot.pareto("macs", ax=figure.add_subplot())
    figure.draw_without_rendering()


def test_a_mean_has_the_decimals_of_its_spread_and_of_its_interval() -> None:
    metric, found = Metric("rmse", "", "lower", margin=0.01, format=".4g"), Estimate(3, 0.393, 0.009971, 0.3682, 0.4178)

    assert spread(found, metric) == "0.393 ± 0.010"
    assert interval(found, metric) == "0.368 – 0.418"
    assert difference(found, metric) == "+0.393 [+0.368, +0.418]"
    assert difference(Estimate(3, -0.05, 0.1, -0.0604, -0.0396), replace(metric, format=".1%"), "%") == (
        "-5.0% [-6.0%, -4.0%]"
    )
    assert spread(Estimate(1, 0.393), metric) == "0.393"


def test_the_table_shows_the_parameters_that_one_token_uses_if_a_network_is_a_mixture() -> None:
    plan = make_plan(["magnitude"])
    records = make_records(plan)
    dense = compare_trials(plan, records)
    assert OF_A_TOKEN not in narrow(dense, dense.points)
    mixture = {
        key: replace(record, details={**record.details, "active_parameters": record.remaining_parameters - 100})
        for key, record in records.items()
    }
    comparison = compare_trials(plan, mixture)
    point = next(point for point in comparison.points if point.round)

    assert OF_A_TOKEN in narrow(comparison, comparison.points)
    left = fmean(mixture[key].remaining_parameters for key in point.stages)
    assert OF_A_TOKEN.cell(point) == f"{left:,.0f} / {left - 100:,.0f}"
    assert {row.remaining_parameters - (row.active_parameters or 0) for row in comparison.rows} == {100}


def test_the_table_shows_the_share_of_the_weights_that_are_prunable_if_some_are_not() -> None:
    plan = make_plan(["magnitude"])
    records = make_records(plan)
    whole, total = {"entries": 200, "considered": 200}, compare_trials(plan, records)
    assert all(point.considered is None for point in total.points)
    for weights, shown in ((whole, False), ({**whole, "considered": 27, "dense": {"experts": 173}}, True)):
        changed = {
            key: replace(record, details={**record.details, "matrix_weights": weights}) if record.round else record
            for key, record in records.items()
        }
        comparison = compare_trials(plan, changed)
        point = next(point for point in comparison.points if point.round)

        assert (CONSIDERED in narrow(comparison, comparison.points)) is shown
        assert CONSIDERED.cell(point) == ("13.50" if shown else "100.00")
        assert any("prunable %: share of" in note for note in tables.notes(comparison)) is shown
        assert changed[point.stages[0]].figures["sparsity/considered"] == (0.135 if shown else 1.0)
