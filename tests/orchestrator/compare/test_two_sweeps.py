"""Differences between two sweeps: pairing and verdicts by hand, texts, and refusals."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import ACCURACY, config, make_plan, make_records, plan_of, sweep_info

from orchestrator.commands.compare_command import main
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.pairing import Side
from orchestrator.compare.two_sweeps import TwoSweeps, compare_two
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import DENSE, NETWORK, Plan, StageSpec
from orchestrator.store.saved_sweep import SavedSweep, manifest
from orchestrator.store.store import Store
from orchestrator.views.report.side_by_side import two_sweeps_csv, two_sweeps_text

SEEDS = (0, 1, 2)
TRAIN = {"epochs": 20, "batch_size": 64, "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.002}}


def trained(plan: Plan, values: Mapping[int, float], dense: float = 0.95, **changes: Any) -> dict[str, StageRecord]:
    """Return records of a plan: pruned networks have their seed's accuracy, dense networks one for all seeds."""
    records = make_records(plan)
    for key, record in records.items():
        value = values.get(plan.stages[key].fields["seed"], 0.9) if record.round else dense
        records[key] = replace(record, after={**record.after, "test/accuracy": value}, **changes)
    return records


def side(
    name: str, plan: Plan, records: Mapping[str, StageRecord], failures: Mapping[str, str] | None = None, **more: str
) -> Side:
    info = sweep_info(name)
    info = replace(info, environment={**info.environment, **more})
    return Side(SavedSweep(info, plan, records, failures or {}), compare_trials(plan, records, failures))


def swept(name: str, values: Sequence[float], method: str = "l1_unstructured", **groups: Any) -> Side:
    plan = plan_of([config(method, 0.5, seed, 1, **groups) for seed in range(len(values))])
    return side(name, plan, trained(plan, dict(enumerate(values))))


def words(found: TwoSweeps) -> dict[str, str]:
    """Return line -> verdict on its primary metric."""
    return {point.name.line: point.differences[0].word for point in found.points}


def said(found: TwoSweeps) -> str:
    return "\n".join(two_sweeps_text(found))


def test_settings_that_no_stage_reads_are_no_difference() -> None:
    scores = ({"kind": "magnitude"}, {"kind": "taylor", "examples": 128})
    found = compare_two(*(swept(name, (0.8, 0.9), score=score) for name, score in zip("ab", scores, strict=True)))

    assert found.differing == {}, "the stages here have no field `score`, as those of a class that prunes"
    assert {point.same_stages for point in found.points} == {True}


def test_differences_are_paired_by_seed_by_hand() -> None:
    # 0.03, 0.04, 0.05: 0.04 +- t(0.975, 2) * 0.01 / sqrt(3) = 0.04 +- 0.024841
    found = compare_two(swept("old", (0.80, 0.85, 0.90)), swept("new", (0.83, 0.89, 0.95), "lamp"))
    dense, point = found.points
    change = point.differences[0].verdict.change

    assert change is not None
    assert (change.mean, change.low, change.high) == pytest.approx((0.04, 0.015159, 0.064841), abs=1e-6)
    assert (point.differences[0].verdict.baseline, point.differences[0].verdict.now) == pytest.approx((0.85, 0.89))
    assert words(found) == {"dense": "the same", "l1_unstructured | lamp": "better"}
    assert (dense.same_stages, point.same_stages) == (True, False)
    assert found.differing == {"method.name": ("l1_unstructured", "lamp"), "method.kind": ("l1_unstructured", "lamp")}
    text = said(found)
    assert "Paired in spite of different names: l1_unstructured | lamp." in text
    assert "     50.00      test/accuracy %    85.00    89.00   +4.00 [+1.52, +6.48]     3          better" in text
    assert "the same stages" in text


@pytest.mark.parametrize(
    ("gains", "word"),
    [
        ((0.03, 0.04, 0.05), "better"),
        ((-0.03, -0.04, -0.05), "worse"),
        ((-0.001, 0.001, 0.0), "no worse"),
        ((-0.02, 0.0, 0.03), "open"),
        ((0.0, 0.0, 0.0), "the same"),
        ((0.02, 0.02, 0.02), "better"),
        ((-0.02, -0.02, -0.02), "worse"),
        ((-0.005, -0.005, -0.005), "undecided"),
        ((0.005, 0.005, 0.005), "undecided"),
        ((0.02,), "undecided"),
        ((0.02, math.nan, 0.01), "undecided"),
    ],
)
def test_each_word_by_what_the_interval_leaves_out(gains: tuple[float, ...], word: str) -> None:
    was = (0.8125, 0.875, 0.75)[: len(gains)]
    found = compare_two(swept("old", was), swept("new", [a + b for a, b in zip(was, gains, strict=True)], "lamp"))

    assert words(found)["l1_unstructured | lamp"] == word
    if len(gains) == 1:
        assert "undecided: l1_unstructured | lamp at 50.00%, test/accuracy: one seed has no interval; run more" in (
            said(found)
        )
        assert "No difference of a primary metric has an interval" in said(found)


def test_of_a_metric_of_which_less_is_better_less_is_better() -> None:
    rmse = Metric("rmse", "", "lower", margin=0.01)
    sides = []
    for name, values in (("old", (0.5, 0.6, 0.7)), ("new", (0.4, 0.51, 0.6))):
        plan = plan_of([config("l1" if name == "old" else "lamp", 0.5, seed, 1) for seed in SEEDS])
        records = make_records(plan)
        for key, record in records.items():
            figures = {f"{split}/rmse": values[plan.stages[key].fields["seed"]] for split in ("val", "test")}
            records[key] = replace(record, metrics=(rmse,), after={**record.after, **figures}, before={})
        sides.append(side(name, plan, records))

    assert words(compare_two(*sides))["l1 | lamp"] == "better"


def test_the_same_sweep_twice_is_the_same_stages() -> None:
    plan = make_plan(seeds=SEEDS, rounds=2)
    one = side("one", plan, make_records(plan))
    found = compare_two(one, one)

    assert len(found.points) == 5, "dense and two points of two lines"
    assert set(words(found).values()) == {"the same"}
    assert all(point.same_stages for point in found.points)
    assert all(each.verdict.change and each.verdict.change.mean == 0 for p in found.points for each in p.differences)
    assert found.only == ((), ())
    assert not found.tested
    assert "The sweeps do not differ" in said(found)
    assert said(found).count("the same stages") == 5


def test_an_interval_takes_seeds_that_differ() -> None:
    same = said(compare_two(swept("old", (0.75, 0.875)), swept("new", (0.75, 0.875), "lamp")))
    moved = said(compare_two(swept("old", (0.75, 0.875)), swept("new", (0.7421875, 0.8671875), "lamp")))
    apart = said(compare_two(swept("old", (0.75, 0.875)), swept("new", (0.75, 0.8), "lamp")))

    for text in (same, moved):
        assert ", +" not in text
        assert ", -" not in text
        assert "2 seeds: t =" not in text
        assert "No difference of a primary metric has an interval" in text
    assert "-0.78     2       undecided" in moved
    assert "2 seeds: t = 12.7" in apart


def test_equal_stages_with_other_results_are_told() -> None:
    plan = make_plan(("l1_unstructured",), (0.5,), SEEDS, 1)
    found = compare_two(
        side("one", plan, trained(plan, {0: 0.9, 1: 0.8, 2: 0.7})),
        side("two", plan, trained(plan, {0: 0.91, 1: 0.8, 2: 0.7}, environment={"processor": "Pen", "torch": "3"})),
    )

    assert "l1_unstructured at 50.00%, test/accuracy: the stages are the same, but their results are not" in said(found)


def test_lines_are_paired_by_settings_whatever_they_are_called() -> None:
    """Labels name the settings that distinguish lines within one sweep; the other sweep has other lines."""
    many = plan_of([config("l1", 0.9, seed, rounds) for seed in SEEDS for rounds in (1, 3)])
    many = replace(many, trials=tuple(replace(trial, name=f"{i}") for i, trial in enumerate(many.trials)))
    one = plan_of([config("l1", 0.9, seed, 3) for seed in SEEDS])
    found = compare_two(side("many", many, make_records(many)), side("one", one, make_records(one)))

    assert set(words(found)) == {"dense", "l1, rounds=3 | l1"}
    assert [point.line for point in found.only[0]] == ["l1, rounds=1"]
    # every round is an operating point in one sweep, as on the other's line with three rounds
    assert [point.name.round for point in found.points] == [0, 1, 2, 3]
    assert found.differing == {}, "one of two values of a setting is no difference between the sweeps"


def test_what_differs_in_all_of_both_is_told_and_nothing_is_paired_by_it() -> None:
    def plan(**groups: Any) -> Plan:
        return plan_of([config(method, 0.5, seed, 1, **groups) for method in ("l1", "lamp") for seed in SEEDS])

    before, now = plan(), plan(train=TRAIN)
    found = compare_two(
        side("old", before, make_records(before), torch="2.12.0"),
        side("new", now, trained(now, {}, environment={"torch": "2.13.0", "processor": "Pen"})),
    )

    assert found.differing == {"train.epochs": ("12", "20"), "torch": ("2.12.0", "2.13.0")}
    assert set(words(found)) == {"dense", "l1", "lamp"}
    assert "  train.epochs  12      20" in said(found)
    assert "method.name" not in said(found)


def test_versions_of_components_and_own_code_are_told() -> None:
    def plan(version: int, digest: str) -> Plan:
        found = make_plan(("l1",), (0.5,), SEEDS, 1)
        keys, stages = {}, {}
        for key, spec in found.stages.items():
            inputs = {role: keys[each] for role, each in spec.inputs.items()}
            fields = {**spec.fields, "versions": {"training": version}, "sources": {"modules": {"mine": digest}}}
            changed = replace(spec, fields=fields, inputs=inputs)
            keys[key], stages[changed.key] = changed.key, changed
        trials = [
            replace(trial, stages=tuple(keys[key] for key in trial.stages), dense=keys[trial.dense])
            for trial in found.trials
        ]
        return Plan(stages, tuple(trials))

    old, new = plan(1, "a" * 64), plan(2, "b" * 64)
    found = compare_two(side("old", old, make_records(old)), side("new", new, make_records(new)))

    assert found.differing == {"versions.training": ("1", "2"), "modules.mine": ("a" * 12, "b" * 12)}
    assert not any(point.same_stages for point in found.points)


def test_what_stands_on_one_side_is_named() -> None:
    first, second = (
        make_plan(("l1", "random"), (0.5, 0.9), (0, 1, 2), 1),
        make_plan(("l1", "lamp"), (0.5,), (1, 2, 3), 1),
    )
    found = compare_two(side("old", first, make_records(first)), side("new", second, make_records(second)))

    assert set(words(found)) == {"dense", "l1"}
    assert [each.seeds for point in found.points for each in point.differences] == [(1, 2), (1, 2)]
    text = said(found)
    assert "Only in old: l1 of cnn on digits at 90.00%, random of cnn on digits at 50.00%, 90.00%." in text
    assert "Only in new: lamp of cnn on digits at 50.00%." in text
    assert "Seeds only in old: 0, at 2 of 2 points." in text
    assert "Seeds only in new: 3, at 2 of 2 points." in text


def test_nothing_in_common_another_metric_and_no_common_seed_are_refused() -> None:
    other = swept("new", (0.9, 0.8), model={"name": "mlp", "kind": "mlp"})
    with pytest.raises(
        OrchestratorError, match=r"old and new have no points that can be paired.* l1_unstructured of mlp on digits"
    ):
        compare_two(swept("old", (0.9, 0.8)), other)
    perplexity = Metric("perplexity", "", "lower", 0.1)
    plan = make_plan(("l1_unstructured",), (0.5,), (0, 1), 1)
    records = {
        key: replace(
            record, metrics=(perplexity,), after={**record.after, "test/perplexity": 9.0, "val/perplexity": 9.0}
        )
        for key, record in make_records(plan).items()
    }
    with pytest.raises(OrchestratorError, match="old is compared by accuracy, new by perplexity"):
        compare_two(swept("old", (0.9, 0.8)), side("new", plan, records))
    plan = make_plan(("l1_unstructured",), (0.5,), (7, 8), 1)
    with pytest.raises(OrchestratorError, match="no seed in common at any point"):
        compare_two(swept("old", (0.9, 0.8)), side("new", plan, make_records(plan)))


def test_failed_trials_are_told_and_their_seeds_left_out() -> None:
    plan = make_plan(("l1_unstructured",), (0.5,), SEEDS, 1)
    failed = plan.trials[1].stages[-1]
    records = {key: record for key, record in make_records(plan).items() if key != failed}
    found = compare_two(side("old", plan, make_records(plan)), side("new", plan, records, {failed: "loss is nan"}))

    assert [each.seeds for each in found.points[1].differences] == [(0, 2)]
    assert "In new 1 of 3 trials did not finish, 1 of them failed:" in said(found)
    assert "l1_unstructured sparsity=0.5 seed=1: loss is nan" in said(found)
    assert "Seeds only in old: 1, at 1 of 2 points." in said(found)


def test_many_comparisons_are_counted_and_held_together() -> None:
    """Simulate sweeps without a difference: one in twenty intervals excludes 0."""
    import numpy as np

    draw = np.random.default_rng(0)
    levels = [round(0.005 + 0.0096 * k, 4) for k in range(99)]
    sides = []
    for method in ("l1", "lamp"):
        plan = plan_of([config(method, level, seed, 1) for level in levels for seed in range(4)])
        records = make_records(plan)
        for key, record in records.items():
            value = 0.9 + 0.01 * draw.standard_normal()
            records[key] = replace(record, after={**record.after, "test/accuracy": value})
        sides.append(side(method, plan, records))
    found = compare_two(*sides)
    alone, together = found.beyond_zero

    assert len(found.tested) == 100  # with dense, which is drawn again too
    assert 1 <= alone <= 12
    assert together <= 1
    assert found.level_together == pytest.approx(1 - 0.05 / len(found.tested))


def measured(name: str, speedups: Sequence[float], processor: str = "Pen", kilobytes: float = 5.0) -> Side:
    plan = make_plan(("l1_unstructured",), (0.5,), range(len(speedups)), 1)
    records, stages, trials = make_records(plan), dict(plan.stages), []
    for trial, speedup in zip(plan.trials, speedups, strict=True):
        pair = [StageSpec("deploy", {"format": "onnx"}, {NETWORK: key}) for key in (trial.stages[-1], trial.dense)]
        inputs = {NETWORK: pair[0].key, DENSE: pair[1].key}
        latency = StageSpec("measure", {"format": "onnx", "measure": {"batch_sizes": [8]}}, inputs)
        figures = {"bytes": 1e3 * kilobytes, "dense_bytes": 9e3, "latency_ms/8": 1 / speedup, "dense_ms/8": 1.0}
        figures |= {"speedup/8": speedup, "speedup_low/8": speedup, "speedup_high/8": speedup}
        for spec in (*pair, latency):
            stages[spec.key] = spec
            records[spec.key] = replace(
                records[trial.dense],
                key=spec.key,
                kind=spec.kind,
                spec=spec.to_json(),
                after={},
                measurements=figures,
                environment={"processor": processor, "threads": "1", "runtime": "onnxruntime 1"},
            )
        trials.append(replace(trial, measured=(latency.key,)))
    return side(name, Plan(stages, tuple(trials)), records)


def test_what_was_measured_stands_beside_and_is_never_compared_across_machines() -> None:
    def of(found: TwoSweeps) -> dict[str, str]:
        return {each.verdict.figure: each.word for each in found.points[1].differences}

    figures = ["deploy/onnx/8/latency_ms", "deploy/onnx/8/speedup", "deploy/onnx/bytes"]
    found = compare_two(measured("old", (2.0, 2.1, 2.2)), measured("new", (3.0, 3.1, 3.3), kilobytes=4.0))
    assert of(found) == {"test/accuracy": "the same", **dict.fromkeys(figures, "better")}
    there = compare_two(measured("old", (2.0, 2.1, 2.2)), measured("new", (3.0, 3.1, 3.3), "Abacus"))
    assert of(there) == {
        "test/accuracy": "the same",
        **dict.fromkeys(figures[:2], "undecided"),
        "deploy/onnx/bytes": "the same",
    }
    assert all(each.verdict.change is None for each in there.points[1].differences if each.word == "undecided")
    assert "measured on processor Abacus, threads 1, runtime onnxruntime 1, but for old on processor Pen" in said(there)
    assert ("Pen", "Abacus") in there.differing.values()


def halved(name: str, unit: str, sparsity: float, budget: str = "channels", method: str = "l1") -> Side:
    """Return a sweep with half of a budget requested, and the sparsity of weights that it reached."""
    plan = make_plan((method,), (0.5,), (0, 1), 1)
    chosen = {"unit": {"kind": unit}, "scope": {"kind": "layer", "budget": budget}}
    keys = {trial.stages[-1] for trial in plan.trials}
    stages = {
        key: replace(spec, fields={**spec.fields, **chosen}) if key in keys else spec
        for key, spec in plan.stages.items()
    }
    trials = tuple(replace(trial, config={**trial.config, **chosen}) for trial in plan.trials)
    records = make_records(plan)
    scoring = {} if method == "ln_structured" else {"score": "magnitude", "removed": 0.5}
    records |= {key: replace(records[key], sparsity=sparsity, details={"scoring": scoring}) for key in keys}
    return side(name, Plan(stages, trials), records)


@pytest.mark.parametrize(
    ("first", "second", "judged", "told"),
    [
        (
            halved("w", "entry", 0.5),
            halved("c", "group", 0.7147),
            False,
            "of weights in w, of channels (unit=group) in c",
        ),
        (
            halved("a", "channel", 0.5),
            halved("c", "group", 0.7147),
            False,
            "of channels (unit=channel) in a, of channels",
        ),
        (
            halved("p", "group", 0.6, "macs"),
            halved("c", "group", 0.7147),
            False,
            "of MACs (unit=group) in p, of channels",
        ),
        (
            halved("b", "group", 0.6),
            halved("c", "group", 0.7147, method="lamp"),
            True,
            "asked: fraction of channels (unit=group);",
        ),
    ],
)
def test_sizes_have_no_verdict_where_what_was_asked_for_is_unlike(
    first: Side, second: Side, judged: bool, told: str
) -> None:
    found = compare_two(first, second)
    dense, point = found.points
    was = float(first.comparison.operating_points[0].sparsity)
    rows = {each.verdict.figure: each for each in point.differences}

    assert [*rows] == ["test/accuracy", "sparsity", "parameters/remaining"]
    assert (rows["sparsity"].verdict.baseline, rows["sparsity"].verdict.now) == pytest.approx((was, 0.7147))
    assert rows["sparsity"].word == "no verdict"
    assert rows["parameters/remaining"].word == ("better" if judged else "no verdict")
    assert "sparsity" not in {each.verdict.figure for each in dense.differences}
    text = said(found)
    assert f"     50.00   sparsity % reached {100 * was:>8.2f}    71.47" in text
    assert told in text


def test_of_weights_in_both_nothing_is_said_of_what_was_asked() -> None:
    found = compare_two(halved("a", "entry", 0.5), halved("b", "entry", 0.504, method="lamp"))

    assert "sparsity" not in {each.verdict.figure for point in found.points for each in point.differences}
    assert "asked:" not in said(found)


def test_what_classes_cut_in_whole_channels_is_asked_of_channels() -> None:
    found = compare_two(
        halved("g", "entry", 0.528, method="ln_structured"), halved("h", "entry", 0.5, method="l1_unstructured")
    )
    rows = {each.verdict.figure: each.word for each in found.points[1].differences}

    assert (rows["sparsity"], rows["parameters/remaining"]) == ("no verdict", "no verdict")
    assert "asked: fraction of channels in g, of weights in h; the networks of a row differ in size" in said(found)
    assert "asked: fraction of weights" not in said(found)


def test_sparsities_that_were_reached_are_explained_where_weights_were_asked_of_both() -> None:
    found = compare_two(halved("a", "entry", 0.528), halved("b", "entry", 0.5, method="lamp"))
    rows = {each.verdict.figure: each.word for each in found.points[1].differences}

    assert (rows["sparsity"], rows["parameters/remaining"]) == ("no verdict", "no verdict")
    assert "asked: fraction of weights; if the achieved sparsities differ, both are shown" in said(found)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command next to a store with two sweeps; return its exit status and output."""
    monkeypatch.chdir(tmp_path)
    save("store", "old-1", "l1")
    save("store", "new-2", "lamp")
    save("there", "new-3", "lamp")

    def command(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(arguments)
        except SystemExit as error:
            status = int(error.code or 0)
        return status, *capsys.readouterr()

    return command


def save(uri: str, name: str, method: str) -> None:
    plan, store = make_plan((method,), (0.5,), SEEDS, 1), Store(uri)
    for record in make_records(plan).values():
        store.commit(replace(record, files={}), {})
    store.save_sweep(name, manifest(sweep_info(name), plan))


def test_an_output_that_is_no_folder_is_refused_before_anything_is_read(run: Run) -> None:
    Path("file").write_text("")
    for output in ("file", "file/below"):
        why = f"{Path('file').absolute()} is not a directory"
        said = f"`--output` (={output}) cannot be written: {why}; name another folder.\n"
        assert run("old", "new", "--output", output) == run("old", "--output", output) == (2, "", said)


def test_the_command_pairs_two_and_merges_on_request(run: Run) -> None:
    status, out, err = run("old", "new", "--output", "out")
    assert (status, err) == (0, "")
    assert out.startswith("first:  old-1\nsecond: new-2\ndifferent between the sweeps, equal within each:\n")
    rows = list(csv.DictReader(io.StringIO(Path("out/comparison/differences.csv").read_text())))
    assert [row["line"] for row in rows] == ["dense", "l1 | lamp", "l1 | lamp"][: len(rows)]
    change = float(rows[1]["second"]) - float(rows[1]["first"])
    assert float(rows[1]["change_mean"]) == pytest.approx(change)
    assert (rows[0]["same_stages"], rows[1]["seeds"]) == ("True", "0 1 2")

    status, elsewhere, _ = run("old", "new", "--other-store", "there")
    assert status == 0
    assert elsewhere.splitlines()[1] == f"second: new-3 of {Path('there').absolute()}"
    assert elsewhere.splitlines()[2:] == out.splitlines()[2:-1], "but for the file that was written"
    status, out, _ = run("old", "new", "--merge")
    assert status == 0
    assert "Largest matching sparsity of lamp" in out


@pytest.mark.parametrize(
    ("arguments", "loss"),
    [
        ([], "a loss of 1.00 points of accuracy or more"),
        (["--margin", "0.003"], "a loss of 0.30 points of accuracy or more"),
        (["--margin", "0"], "any loss of accuracy"),
    ],
)
def test_the_margin_that_was_used_is_told(run: Run, arguments: list[str], loss: str) -> None:
    _, out, _ = run("old", "new", *arguments)

    assert f"no worse: {loss} is ruled out (one-sided 97.5% limit); open: it is not." in out


def test_of_a_sweep_in_which_nothing_has_finished_the_status_says_so(run: Run) -> None:
    Store("store").save_sweep("cut-4", manifest(sweep_info("cut-4"), make_plan(("l2",), (0.25,), (7,), 1)))

    status, out, _ = run("cut-4", "--output", "out")

    assert status == 2
    assert "1 of 1 trials did not finish" in out
    assert Path("out/comparison/report.html").exists()


def test_mistakes_are_told_in_a_sentence(run: Run) -> None:
    def refused(*arguments: str) -> str:
        status, out, err = run(*arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        return err

    assert "pass --merge" in refused("old", "new", "old")
    assert "name two" in refused("old", "--other-store", "there")
    assert "name two" in refused("old", "new", "--merge", "--other-store", "there")
    assert "`SWEEP` (='new-2') does not exist" in refused("old", "new-2", "--other-store", "there")
    assert "does not exist or is empty" in refused("old", "new", "--other-store", "nowhere")
    assert "--other-stor" in refused("old", "new", "--other-storr", "x")
    Path("there/sweeps/new-3.json").write_text("{")
    assert "new-3" in refused("old", "new", "--other-store", "there")


def test_damaged_stages_are_left_out_and_told(run: Run) -> None:
    plan = make_plan(("lamp",), (0.5,), SEEDS, 1)
    Path("there/stages", plan.trials[0].stages[-1], "record.json").write_text("{}")
    status, out, _ = run("old", "new", "--other-store", "there")

    assert status == 0
    assert f"In new-3 of {Path('there').absolute()} 1 of 3 trials did not finish" in out
    assert "Seeds only in old-1: 0, at 1 of 2 points." in out


def test_columns_of_the_file_are_in_the_figures_own_scales() -> None:
    found = compare_two(swept("old", (0.80, 0.85, 0.90)), swept("new", (0.83, 0.89, 0.95), "lamp"))
    row = list(csv.DictReader(io.StringIO(two_sweeps_csv(found).decode())))[1]

    assert float(row["change_low"]) == pytest.approx(0.015159, abs=1e-6)
    assert (row["margin"], row["verdict"], row["figure"]) == (str(ACCURACY.margin), "better", "test/accuracy")
