"""The checklist that a pruning comparison should pass, computed from the sweep itself. Pure.

After Blalock, Gonzalez Ortiz, Frankle and Guttag, "What is the State of Neural Network Pruning?", arXiv 2003.03033, and
the ways in which such comparisons go wrong silently: sparsities that were not reached, dead layers, unpaired seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.compare.comparison import Comparison
from orchestrator.core.metrics import ACCURACY
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.core.stage_kinds import KINDS

Verdict = Literal["pass", "fail", "n/a"]

LEAST_POINTS, LEAST_SEEDS, LEAST_PANELS = 5, 3, 3
TOLERANCE = 0.005
"""Largest distance of achieved from requested sparsity: what rounding to whole channels may cost."""

_EXAMPLES = 3


@dataclass(frozen=True)
class Finding:
    """One line of the checklist."""

    rule: str
    verdict: Verdict
    reason: str


def audit(plan: Plan, records: Mapping[str, StageRecord], comparison: Comparison) -> tuple[Finding, ...]:
    """Hold a sweep to the checklist: each rule passes, fails or does not apply, with its reason."""
    return tuple(
        Finding(rule, verdict, reason)
        for rule, (verdict, reason) in {
            f"{LEAST_POINTS} or more operating points on every line": _operating_points(comparison),
            "compression and theoretical speed-up, both": _both_measures(comparison),
            "a random control": _control(comparison, "random"),
            "a magnitude baseline": _control(comparison, "magnitude"),
            f"{LEAST_SEEDS} or more seeds at every point": _seeds(comparison),
            f"{LEAST_PANELS} or more pairs of data set and network": _panels(comparison),
            "the dense network's figures": _dense(comparison),
            "the same seeds for dense and pruned, and for every line": _paired(comparison),
            "matching is a test against a stated margin": _matching(comparison),
            "achieved sparsity is the requested one": _achieved(plan, records),
            "no dead layer": _dead(plan, records),
            "chosen on validation, test read once": _test_once(plan, records),
            "one kind of processor, one release of torch": _one_kind(plan, records),
            "every trial finished": _finished(comparison),
        }.items()
    )


Answer = tuple[Verdict, str]


def _operating_points(comparison: Comparison) -> Answer:
    counts = {line: len({round(p.sparsity, 4) for p in points}) for (_, _, line), points in comparison.lines.items()}
    if not counts:
        return "n/a", "nothing was pruned"
    fewest = min(counts.values())
    listed = _some(f"{line} has {count}" for line, count in counts.items() if count < LEAST_POINTS)
    return ("pass", f"every line has {fewest} or more") if fewest >= LEAST_POINTS else ("fail", listed)


def _both_measures(comparison: Comparison) -> Answer:
    points = comparison.operating_points
    if not points:
        return "n/a", "nothing was pruned"
    lacking = [point for point in points if not (point.compression >= 1 and point.speedup > 0)]
    if lacking:
        return "fail", _some(f"{point.line} at {point.sparsity:.1%}" for point in lacking)
    return "pass", "both are given for every point; the speed-up is theoretical, from multiply-accumulates"


def _control(comparison: Comparison, kind: str) -> Answer:
    words = {"random": ("random",), "magnitude": ("l1", "magnitude", "ln_", "lnstructured")}[kind]
    methods = {point.method for point in comparison.points}
    if not methods:
        return "n/a", "nothing was pruned"
    controls = sorted(method for method in methods if any(word in method.lower() for word in words))
    return ("pass", ", ".join(controls)) if controls else ("fail", f"none among {', '.join(sorted(methods))}")


def _seeds(comparison: Comparison) -> Answer:
    points = [*comparison.dense, *comparison.operating_points]
    if not points:
        return "n/a", "nothing has finished"
    few = [point for point in points if len(set(point.seeds)) < LEAST_SEEDS]
    if few:
        return "fail", _some(f"{point.line} at {point.sparsity:.1%} has {len(set(point.seeds))}" for point in few)
    return "pass", f"every point has {min(len(set(point.seeds)) for point in points)} or more"


def _panels(comparison: Comparison) -> Answer:
    count = len(comparison.panels)
    listed = ", ".join(f"{model} on {data}" for model, data in comparison.panels)
    return ("pass" if count >= LEAST_PANELS else "fail"), f"{count}: {listed}"


def _dense(comparison: Comparison) -> Answer:
    if not comparison.points:
        return "n/a", "nothing was pruned"
    without = set(comparison.panels) - {(point.model, point.data) for point in comparison.dense if point.accuracy}
    if without:
        return "fail", _some(f"none for {model} on {data}" for model, data in sorted(without))
    return "pass", _some(
        f"{point.model} on {point.data}: {point.accuracy.mean:.2%}" for point in comparison.dense if point.accuracy
    )


def _paired(comparison: Comparison) -> Answer:
    points = comparison.operating_points
    if not points:
        return "n/a", "nothing was pruned"
    odd = []
    for panel in comparison.panels:
        here = [point for point in points if (point.model, point.data) == panel]
        usual = Counter(point.seeds for point in here).most_common(1)[0][0] if here else ()
        odd += [point for point in here if point.seeds != usual]
    if odd:
        return "fail", _some(f"{point.line} at {point.sparsity:.1%} has seeds {list(point.seeds)}" for point in odd)
    return "pass", "each pruned network starts from the dense network of its own seed"


def _matching(comparison: Comparison) -> Answer:
    points = comparison.operating_points
    if not points:
        return "n/a", "nothing was pruned"
    untested = [point for point in points if point.matching == "untested"]
    if untested:
        return "fail", _some(f"{point.line} at {point.sparsity:.1%} has no spread to test with" for point in untested)
    margin = ACCURACY.written(comparison.margin)
    return "pass", f"a loss of {margin} points or more is called a match in at most 2.5% of lines, paired by seed"


def _achieved(plan: Plan, records: Mapping[str, StageRecord]) -> Answer:
    gaps = {
        key: abs(record.sparsity - record.requested_sparsity)
        for key, record in records.items()
        if key in plan.stages and record.requested_sparsity is not None
    }
    if not gaps:
        return "n/a", "amounts were given, no sparsity was requested"
    wrong = [key for key, gap in gaps.items() if gap > TOLERANCE]
    if wrong:
        return "fail", _some(
            f"{_name(plan, key)}: {records[key].requested_sparsity:.2%} requested, {records[key].sparsity:.2%} achieved"
            for key in wrong
        )
    return "pass", f"largest difference {max(gaps.values()):.3%}"


def _dead(plan: Plan, records: Mapping[str, StageRecord]) -> Answer:
    pruned = {key: record for key, record in records.items() if key in plan.stages and KINDS[record.kind].prunes}
    if not pruned:
        return "n/a", "nothing was pruned"
    dead = [
        f"{_name(plan, key)}: {name}"
        for key, record in pruned.items()
        for name, sparsity in record.tensor_sparsity.items()
        if sparsity >= 1.0
    ]
    return ("fail", _some(dead)) if dead else ("pass", f"every tensor keeps entries in all {len(pruned)} rounds")


def _test_once(plan: Plan, records: Mapping[str, StageRecord]) -> Answer:
    known = {key: record for key, record in records.items() if key in plan.stages}
    if not known:
        return "n/a", "nothing has finished"
    peeked = [
        key
        for key, record in known.items()
        if any(name.startswith("test/") for point in record.curve for name in point.metrics)
        or any(name.startswith("test/") for name in record.before)
    ]
    if peeked:
        return "fail", _some(f"{_name(plan, key)} evaluates on test while it trains" for key in peeked)
    blind = [key for key, record in known.items() if not math.isfinite(record.after.get("val/accuracy", math.nan))]
    if blind:
        return "fail", _some(f"{_name(plan, key)} has no validation accuracy" for key in blind)
    return "pass", "curves and selection use the validation split; each stage has one test figure"


def _one_kind(plan: Plan, records: Mapping[str, StageRecord]) -> Answer:
    known = [record.environment for key, record in records.items() if key in plan.stages]
    if not known:
        return "n/a", "nothing has finished"
    kinds = {name: sorted({each.get(name, "not recorded") for each in known}) for name in ("processor", "torch")}
    mixed = [f"{name}: {' and '.join(found)}" for name, found in kinds.items() if len(found) > 1]
    if mixed:
        return "fail", f"the same stage may have other bits on each: {_some(mixed)}"
    return "pass", ", ".join(found[0] for found in kinds.values())


def _finished(comparison: Comparison) -> Answer:
    missing = [name for name, status in comparison.trials.items() if status != "finished"]
    return ("fail", _some(missing)) if missing else ("pass", f"all {len(comparison.trials)}")


def _name(plan: Plan, key: str) -> str:
    indices = plan.trials_of.get(key, ())
    trial = plan.trials[indices[0]].name if indices else key[:12]
    return f"{trial}, round {plan.stages[key].round}"


def _some(texts: Iterator[str] | Sequence[str]) -> str:
    listed = list(texts)
    more = f" and {len(listed) - _EXAMPLES} more" if len(listed) > _EXAMPLES else ""
    return "; ".join(listed[:_EXAMPLES]) + more
