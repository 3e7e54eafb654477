"""Differences paired by window of held-out text: by hand, over seeds, and only between prunings of one network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from factories import make_plan, make_records
from scipy import stats

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.comparison import Comparison
from orchestrator.compare.secondary_figures import WindowDifference
from orchestrator.compare.statistics import estimate, ratio_of_sums
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.views.report import tables

TOKENS = [10, 10, 20]
PLAN = make_plan(("l1_unstructured", "wanda"), (0.5, 0.75), seeds=(0, 1), rounds=1)


def with_windows(
    plan: Plan, losses: Mapping[str, Sequence[float]], tokens: Sequence[int] = TOKENS
) -> dict[str, StageRecord]:
    """Return records whose windows have the losses of a method, 0.1 higher for each seed; `dense` is a method, too."""
    found = make_records(plan)
    for key, record in found.items():
        spec = plan.stages[key]
        method = spec.fields["method"]["name"] if spec.kind == "round" else "dense"
        of_seed = [loss + 0.1 * spec.fields["seed"] * (method == "wanda") for loss in losses[method]]
        windows = {"loss": of_seed, "tokens": list(tokens)}
        found[key] = replace(record, details={"measured": {"test": {"windows": windows}, "test_kjv": {}}})
    return found


LOSSES = {"dense": [10.0, 11.0, 20.0], "l1_unstructured": [12.0, 12.0, 25.0], "wanda": [11.0, 12.5, 22.0]}


def differences(plan: Plan, records: Mapping[str, StageRecord]) -> dict[tuple[str, str, float], WindowDifference]:
    found = compare_trials(plan, records).windows
    assert len({(each.line, each.reference, each.sparsity) for each in found}) == len(found)
    return {(each.line, each.reference, each.sparsity): each for each in found}


def test_a_ratio_of_sums_is_the_mean_where_sizes_are_equal_and_weighs_them_where_they_are_not() -> None:
    values = [1.0, 2.5, 4.0, 0.5]
    equal, means = ratio_of_sums(values, [4] * 4), estimate([value / 4 for value in values])

    assert equal is not None
    assert means is not None
    assert (equal.n, equal.mean, equal.std, equal.low, equal.high) == pytest.approx(
        (means.n, means.mean, means.std, means.low, means.high)
    )
    found = ratio_of_sums([1.0, 2.0, 6.0], [10, 10, 20])  # 9 / 40 = 0.225; residuals -1.25, -0.25, 1.5
    assert found is not None
    assert found.mean == pytest.approx(0.225)
    half = stats.t.ppf(0.975, 2) * math.sqrt(3 * (1.25**2 + 0.25**2 + 1.5**2) / 2) / 40
    assert (found.low, found.high) == pytest.approx((0.225 - half, 0.225 + half))
    assert ratio_of_sums([], []) is None
    assert ratio_of_sums([math.nan, 1.0], [1, 1]) is None


def test_methods_are_compared_with_dense_and_with_each_other_at_each_sparsity() -> None:
    found = differences(PLAN, with_windows(PLAN, LOSSES))

    assert set(found) == {
        (line, reference, sparsity)
        for line, reference in (("l1_unstructured", "dense"), ("wanda", "dense"), ("wanda", "l1_unstructured"))
        for sparsity in (0.5, 0.75)
    }
    pair = found["wanda", "l1_unstructured", 0.5]
    by_seed = [(-1.0 + 0.5 - 3.0) / 40, (-0.9 + 0.6 - 2.9) / 40]  # seed 1 adds 0.1 to each window of wanda
    expected = ratio_of_sums([-0.95, 0.55, -2.95], TOKENS)
    assert expected is not None
    assert pair.seeds == (0, 1)
    assert (pair.text, pair.windows.n, pair.windows.mean) == ("test", 3, pytest.approx(sum(by_seed) / 2))
    assert (pair.windows.low, pair.windows.high) == pytest.approx((expected.low, expected.high))
    assert (pair.draws.n, pair.draws.mean) == (2, pytest.approx(sum(by_seed) / 2))
    assert pair.draws.std == pytest.approx(abs(by_seed[0] - by_seed[1]) / math.sqrt(2))
    assert found["l1_unstructured", "dense", 0.5].windows.mean == pytest.approx((2.0 + 1.0 + 5.0) / 40)


def test_other_networks_and_other_windows_are_not_paired() -> None:
    records = with_windows(PLAN, LOSSES)
    changed = {
        key: replace(record, details=with_windows(PLAN, LOSSES, [10, 20, 10])[key].details)
        if PLAN.stages[key].fields.get("method", {}).get("name") == "wanda" and record.spec["fields"]["seed"] == 0
        else record
        for key, record in records.items()
    }

    assert differences(PLAN, changed)["wanda", "l1_unstructured", 0.5].seeds == (1,)
    assert compare_trials(PLAN, make_records(PLAN)).windows == ()
    broken = {"measured": {"test": {"windows": {"loss": [1.0], "tokens": [1, 2]}}}}
    assert compare_trials(PLAN, {key: replace(r, details=broken) for key, r in records.items()}).windows == ()


def test_the_sparsity_is_the_achieved_one_as_in_the_main_table() -> None:
    found = compare_trials(PLAN, with_windows(PLAN, LOSSES))
    reached = replace(found, windows=tuple(replace(each, achieved=0.4321) for each in found.windows))

    assert {each.achieved for each in found.windows} == {point.sparsity for point in found.operating_points}
    assert any(line.startswith("     43.21 ") for line in tables.text_table(reached))


def test_the_terminal_shows_the_methods_against_each_other() -> None:
    lines = list(tables.text_table(compare_trials(PLAN, with_windows(PLAN, LOSSES))))
    start = lines.index("cnn on digits: cross-entropy by held-out window, nats per token")

    assert lines[start + 2] == "wanda - l1_unstructured"
    # residuals -0.1125, 1.3875, -1.275; t(0.975, 2) = 4.30265 times sqrt(3 * 3.56344 / 2) / 40 = 0.24869
    assert lines[start + 3].split() == [
        *("50.00", "-0.0837", "[-0.3324,", "+0.1649]", "0.92×", "3", "±", "0.0053", "(2)")
    ]
    assert len([line for line in lines[start:] if "wanda" in line]) == 1


def whole_experts(plan: Plan, achieved: float) -> Comparison:
    """Return the comparison of wanda with l1_unstructured, which removes experts here and `achieved` at the first."""
    spec_of = {
        key: replace(spec, fields={**spec.fields, "unit": {"kind": "expert"}})
        if spec.fields.get("method", {}).get("name") == "l1_unstructured"
        else spec
        for key, spec in plan.stages.items()
    }
    records = with_windows(plan, LOSSES)
    for key, spec in spec_of.items():
        details = {**records[key].details, "scoring": {"score": "reap", "removed": achieved}}
        if "unit" in spec.fields:
            sparsity = achieved if spec.fields["target"] == 0.5 else spec.fields["target"]
            records[key] = replace(records[key], details=details, sparsity=sparsity)
    return compare_trials(Plan(spec_of, plan.trials), records)


def test_whole_experts_are_compared_with_entries_where_they_are_equally_many_weights() -> None:
    equal, fewer = whole_experts(PLAN, 0.5), whole_experts(PLAN, 0.375)

    both, one = (
        [each.sparsity for each in found.windows if each.reference == "l1_unstructured"] for found in (equal, fewer)
    )
    assert (both, one) == ([0.5, 0.75], [0.75])
    assert [(pair.best.asked_sparsity, pair.best.compared_by) for pair in tables.method_pairs(equal)] == [
        (0.5, "weights"),
        (0.75, "weights"),
    ]
    assert [pair.best.asked_sparsity for pair in tables.method_pairs(fewer)] == [0.75]
    said = "another than asked: l1_unstructured at 50.00% removes 37.50%. They are not compared with pruned entries"
    assert said in "\n".join(tables.notes(fewer))
    assert "another than asked" not in "\n".join(tables.notes(equal))
