"""Checklist that a pruning comparison should pass, computed from the sweep itself. Pure.

The rules follow Blalock, Gonzalez Ortiz, Frankle and Guttag, "What is the State of Neural Network Pruning?", arXiv
2003.03033, and cover silent errors of such comparisons: sparsities that were not reached, dead layers, unpaired seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Literal

from orchestrator.compare.comparison import Comparison, LineKey, Point
from orchestrator.compare.panels import positions
from orchestrator.compare.round_columns import budget_of, dead_tensors, reached_of
from orchestrator.compare.statistics import has_spread, least_gain
from orchestrator.config.parts.method_choices import decides_itself, published_at_start
from orchestrator.config.parts.sparse_training import row_of
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import REWIND, Plan
from orchestrator.core.stage_fields import Restart, StageFields
from orchestrator.core.stage_kinds import KINDS, PART
from orchestrator.planning.number_formats import in_points, percent, ratio

Verdict = Literal["pass", "fail", "n/a"]
Answer = tuple[Verdict, str]

_EXAMPLES = 3
LEAST_POINTS, LEAST_SEEDS, LEAST_PANELS = 5, 3, 3
EQUAL_COST = 0.05
"""Largest relative difference in training cost between compared points; the examples of most scores cost less."""
MAGNITUDE = (("ln_structured",), "magnitude")
"""Methods and score that prune the smallest weights."""
CALIBRATED = ("wanda",)
"""Scores that read calibration data, besides the methods that prune layer by layer."""
STATIC = "static"
"""Dynamics whose masks stay: the control of masks that change within a training."""
PERPLEXITY = "perplexity"
"""Primary metric of language models."""
UNCALIBRATED = "no language model was pruned with calibration data"
TOLERANCE = 0.005
"""Largest distance between the achieved and the requested sparsity; rounding to whole channels may allow more."""


@dataclass(frozen=True)
class Finding:
    """One line of the checklist."""

    rule: str
    verdict: Verdict
    reason: str


def audit(plan: Plan, records: Mapping[str, StageRecord], comparison: Comparison) -> tuple[Finding, ...]:
    """Check a sweep against every rule: each passes, fails or does not apply, with a reason."""
    points, finished = comparison.operating_points, {key: records[key] for key in plan.stages if key in records}
    known = {key: each for key, each in finished.items() if KINDS[each.kind].trains and each.kind != PART}
    answers = {
        f"{LEAST_POINTS} or more operating points on every line": _operating_points(comparison),
        "compression and theoretical speed-up, both": _both_measures(
            points, deploys=any(trial.measured for trial in plan.trials)
        ),
        "a random control": _random_control(plan, comparison),
        "a magnitude baseline": _magnitude_baseline(plan, comparison),
        "a control of masks that are found before training, or trained from an earlier step": _mask_control(plan),
        f"{LEAST_SEEDS} or more seeds at every point": _seeds([*comparison.dense, *comparison.whole_points]),
        f"{LEAST_PANELS} or more pairs of data set and network": _panels(comparison),
        "the dense network's figures": _dense(comparison),
        "the same seeds for dense and pruned, and for every line": _paired(comparison),
        "the initialisation that was scored is the one that is trained": _same_initialisation(plan, known),
        "compared after equal training": _equally_trained(comparison),
        "gains over dense are gains over dense trained as long": _gained(comparison),
        "methods prune when their papers do": _when_published(plan),
        "matching is a test against a stated margin": _matching(comparison),
        "achieved sparsity is the requested one": _achieved(plan, known),
        "no dead layer": _dead(plan, known),
        "chosen on validation, test read once": _test_once(plan, known),
        "scores read no test data": _scored_apart(plan, known),
        "calibration of language models apart from the texts they are tested on": _calibrated_apart(plan, known),
        f"{LEAST_SEEDS} or more draws of the calibration of language models": _draws(points, known),
        "calibrated language models beside pruned smallest weights at each sparsity": _calibrated_baseline(
            plan, known, comparison
        ),
        "one kind of processor, one release of torch": _one_kind(finished),
        "every trial finished": _finished(comparison),
        **({"a search says what it has seen and left out": _searched(comparison)} if comparison.search else {}),
    }
    return tuple(Finding(rule, verdict, reason) for rule, (verdict, reason) in answers.items())


def _operating_points(comparison: Comparison) -> Answer:
    counts = {line: len({round(p.sparsity, 4) for p in points}) for (_, _, line), points in comparison.lines.items()}
    few = [f"{line} has {count}" for line, count in counts.items() if count < LEAST_POINTS]
    return _held(counts, few, f"every line has {min(counts.values(), default=0)} or more")


def _both_measures(points: Sequence[Point], deploys: bool) -> Answer:
    """Check every point for both measures; in a sweep that deploys, also each line's end for a measured speed-up."""
    lacking = [_at(point) for point in points if not (point.compression >= 1 and point.macs_left is not None)]
    if deploys:
        lacking += [f"{_at(point)} was not measured" for point in points if point.final and not point.deployed]
        return _held(points, lacking, "both are given for every point, and measured where a trial ends")
    return _held(
        points, lacking, "both are given for every point; the speed-up is theoretical, from multiply-accumulates"
    )


def _random_control(plan: Plan, comparison: Comparison) -> Answer:
    """Look for a line whose method or score prunes at random."""
    return _control(plan, comparison, ("random_unstructured", "random_structured"), "random")


def _magnitude_baseline(plan: Plan, comparison: Comparison) -> Answer:
    """Look for a line whose method or score prunes the smallest weights."""
    return _control(plan, comparison, *MAGNITUDE)


def _control(plan: Plan, comparison: Comparison, methods: Sequence[str], score: str) -> Answer:
    """Look for a line by the method or score that ranks, not by its name; shuffled or inverted masks do not count."""
    choosing, search = _choosing(plan, methods, score), comparison.search
    pruned = [row for row in comparison.rows if row.round]
    found = "; ".join(dict.fromkeys(row.line for row in pruned if row.trial in choosing))
    among = "; ".join(dict.fromkeys(row.line for row in pruned))
    why = ": the search has stopped it" if search and not choosing.isdisjoint(search.stopped) else ""
    return _held(pruned, [] if found else [f"none among {among}{why}"], found)


def _choosing(plan: Plan, methods: Sequence[str], score: str) -> set[str]:
    """Return the trials that rank by a score, or prune by one of the methods."""
    return {
        trial.name
        for trial in plan.trials
        if (
            trial.config["method"].get("kind") in methods
            if decides_itself(trial.config["method"])
            else trial.config.get("score", {"kind": "magnitude"}).get("kind") == score
        )
        and trial.config.get("restart", {}).get("control", "none") not in ("invert", "shuffle")
        and (score != "random" or not _changes_masks(plan.stages[trial.stages[-1]].typed))
    }


def _seeds(points: Sequence[Point]) -> Answer:
    few = [f"{_at(point)} has {len(set(point.seeds))}" for point in points if len(set(point.seeds)) < LEAST_SEEDS]
    fewest = min((len(set(point.seeds)) for point in points), default=0)
    return _held(points, few, f"every point has {fewest} or more", "nothing has finished")


def _panels(comparison: Comparison) -> Answer:
    count = len(comparison.panels)
    if not count:
        return "n/a", "nothing has finished"
    listed = ", ".join(f"{model} on {data}" for model, data in comparison.panels)
    return ("pass" if count >= LEAST_PANELS else "fail"), f"{count}: {listed}"


def _dense(comparison: Comparison) -> Answer:
    found = [(point, point.test.mean) for point in comparison.dense if point.test]
    without = sorted(set(comparison.panels) - {(point.model, point.data) for point, _ in found})
    listed = _some(f"{point.model} on {point.data}: {point.metric.said(mean)}" for point, mean in found)
    return _held(comparison.points, (f"none for {model} on {data}" for model, data in without), listed)


def _paired(comparison: Comparison) -> Answer:
    points = comparison.whole_points
    odd = []
    for panel in comparison.panels:
        here = [point for point in points if (point.model, point.data) == panel]
        usual = Counter(point.seeds for point in here).most_common(1)
        odd += [f"{_at(point)} has seeds {list(point.seeds)}" for point in here if point.seeds != usual[0][0]]
    return _held(points, odd, "each pruned network is compared with the dense network of its own seed")


def _equally_trained(comparison: Comparison) -> Answer:
    """Compare each point's cost with the cheapest point at its sparsity; report the largest excess of each line."""
    levels = Counter(point.level for point in comparison.operating_points)
    compared = [point for point in comparison.operating_points if levels[point.level] > 1]
    excess: dict[LineKey, tuple[float, str]] = {}
    for point, other in comparison.costlier:
        times = point.total_cost / max(other.total_cost, 1.0)
        if times > max(1 + EQUAL_COST, excess.get(point.line_key, (0.0, ""))[0]):
            excess[point.line_key] = times, f"{_at(point)} cost {ratio(times)} as much as {other.line}"
    reason = (
        f"at each sparsity, costs (steps from initialisation, and scoring) differ by {percent(EQUAL_COST, 0)} at most"
    )
    return _held(compared, (said for _, said in excess.values()), reason, "no two lines have a point at one sparsity")


def _gained(comparison: Comparison) -> Answer:
    """Check gains over dense of points that train on from it against the longest trained unpruned network."""
    longest: dict[tuple[str, str], float] = {}
    for point in (*comparison.dense, *(point for point in comparison.points if not point.sparsity)):
        panel = point.model, point.data
        longest[panel] = max(longest.get(panel, 0.0), point.total_cost)
    restarted = {
        row.stage for row in comparison.rows if row.chosen.restart.startswith(("weights=step", "weights=reinit"))
    }
    pairs = ((point, point.difference) for point in comparison.operating_points if point.sparsity)
    gained = [
        p for p, d in pairs if d and has_spread(d) and least_gain(d, p.metric) > 0 and not restarted & {*p.stages}
    ]
    costs = ((point, point.total_cost / max(longest[point.model, point.data], 1.0)) for point in gained)
    faults = (
        f"{_at(p)} trained {ratio(cost)} as long as dense; add +control=longer"
        for p, cost in costs
        if cost > 1 + EQUAL_COST
    )
    return _held(gained, faults, "dense trained as long", "no network that trained on from dense is shown to be better")


def _matching(comparison: Comparison) -> Answer:
    points = comparison.operating_points
    untested = (f"{_at(point)} has no spread to test with" for point in points if point.matching == "untested")
    losses = " or ".join(metric.loss for metric in comparison.metrics)
    reason = f"{losses} is called a match in at most 2.5% of lines, paired by seed"
    return _held(points, untested, reason)


def _finished(comparison: Comparison) -> Answer:
    missing = _some(name for name, status in comparison.trials.items() if status not in ("finished", "stopped"))
    stopped = sum(status == "stopped" for status in comparison.trials.values())
    apart = f", except {stopped} that the search stopped" if stopped else ""
    return ("fail", missing) if missing else ("pass", f"all {len(comparison.trials)}{apart}")


def _searched(comparison: Comparison) -> Answer:
    """Check that a search has ended; report the number of its looks at validation figures and of its tests."""
    if (search := comparison.search) is None:
        return "n/a", "every trial was to be run"
    reason = f"{search.looks} looks at validation figures, {search.tests} of them tests; stopped trials are not tested"
    return _held([search], [] if search.ended else [f"the search has not ended: {reason}"], reason)


def _at(point: Point) -> str:
    return f"{point.line} at {percent(point.sparsity)}" if point.round else point.line


def _mask_control(plan: Plan) -> Answer:
    """Look for a control by `restart`; masks that change within a training are controlled by static ones.

    Rounds whose masks change refuse `restart.control`, so a line with dynamics=static on their panel is their control.
    Static masks that are drawn at random need no control.
    """
    rounds = [spec.typed for spec in plan.stages.values() if KINDS[spec.kind].prunes]
    controls = {each.restart.control for each in rounds} - {"none"}
    controls |= {"reinit" for each in rounds if each.restart.weights == "reinit" and each.restart.control != "small"}
    restarted = [each for each in rounds if each.restart != Restart()]
    fixed = [each for each in restarted if not _changes_masks(each) and not _is_drawn(each)]
    faults = ["none of restart.control=shuffle, reinit, invert, small"] if fixed and not controls else []
    changing = _sparse_trainings(plan) if any(map(_changes_masks, restarted)) else {}
    faults += [
        f"{model} on {data} has no line with dynamics={STATIC}, the control of dynamics={', '.join(sorted(kinds))}"
        for (model, data), kinds in changing.items()
        if STATIC not in kinds
    ]
    found = [*sorted(controls), *([f"dynamics={STATIC}"] if changing else [])]
    none = "masks are drawn at random and stay" if restarted else "every network is trained, pruned and fine-tuned"
    return _held([*fixed, *changing], faults, ", ".join(found), none)


def _changes_masks(fields: StageFields) -> bool:
    """Whether a round's masks change within its training."""
    return _is_in_training(fields) and fields.dynamics.named != STATIC


def _is_drawn(fields: StageFields) -> bool:
    """Whether a round draws its masks at random and keeps them."""
    return fields.dynamics.named == STATIC and fields.score.kind == "random"


def _is_in_training(fields: StageFields) -> bool:
    """Whether a round's dynamics belongs to its training, as `static` and `rigl` do."""
    row = row_of(vars(fields.dynamics))
    return row is not None and row.in_training


def _sparse_trainings(plan: Plan) -> dict[tuple[str, str], set[str]]:
    """Return panel -> names of the dynamics of its trainings from a step, for panels on which masks change in one."""
    found: dict[tuple[str, str], set[str]] = {}
    for trial, position in zip(plan.trials, positions(plan), strict=True):
        for fields in (plan.stages[key].typed for key in trial.stages):
            if fields.restart != Restart() and _is_in_training(fields):
                found.setdefault(position.panel, set()).add(fields.dynamics.named)
    return {panel: kinds for panel, kinds in found.items() if kinds != {STATIC}}


def _same_initialisation(plan: Plan, known: Mapping[str, StageRecord]) -> Answer:
    """Check that rounds that prune before training use one initialisation; rounds with new weights are left out.

    The initialisation must be the one that the start stage recorded and that the round scored and went back to. It
    must also be the dense network's, by settings and seed.
    """
    early: dict[str, str] = {}
    for trial in plan.trials:
        start, dense = plan.stages[trial.stages[0]], plan.stages[trial.dense]
        settings = {name: value for name, value in start.fields.items() if name != "until"}
        for key in trial.stages[1:] if start.kind == "start" else ():
            spec, found = plan.stages[key], known.get(start.key)
            if key not in known or spec.typed.restart.weights == "reinit":
                continue
            if found is None or known[key].started_from != found.weights_digest:
                early[key] = "did not score the weights that its start recorded"
            elif spec.inputs.get(REWIND, start.key) != start.key:
                early[key] = "did not train the weights that it scored"
            else:
                early[key] = "" if settings == dense.fields else "differs from its dense network in seed or settings"
    faults = [f"{_name(plan, key)} {fault}" for key, fault in early.items() if fault]
    reason = (
        f"{len(early)} rounds scored and trained the weights of their start, with the dense network's settings and seed"
    )
    return _held(early, faults, reason, "nothing was pruned before training")


def _when_published(plan: Plan) -> Answer:
    """Check that methods that are published for pruning at initialisation prune before training."""
    early = [trial.config for trial in plan.trials if published_at_start(trial.config)]
    names = dict.fromkeys(config["method"]["name"] for config in early)
    late = dict.fromkeys(config["method"]["name"] for config in early if config["schedule"].get("at") == "trained")
    faults = (f"{name} ranks the trained network (schedule.at=trained), but its paper the initial one" for name in late)
    none = "no method here is published for pruning before training"
    return _held(names, faults, f"{', '.join(names)} before training (schedule.at=start)", none)


def _achieved(plan: Plan, known: Mapping[str, StageRecord]) -> Answer:
    """Compare each round's achieved and requested sparsity of its budget, with a tolerance for whole units."""
    asked = {key: record.requested_sparsity for key, record in known.items() if record.requested_sparsity is not None}
    budgets = {key: budget_of(plan.stages[key].typed) for key in asked}
    found = {key: reached_of(budget, known[key]) for key, budget in budgets.items()}
    reached = {key: share for key, share in found.items() if share is not None}
    due = {key: max(TOLERANCE, known[key].details.get("rounding", 0.0)) for key in reached}
    gaps = {key: abs(share - asked[key]) for key, share in reached.items()}
    wrong = (
        f"{_name(plan, key)}: {percent(asked[key])} of {budgets[key]} requested, {percent(reached[key])} achieved"
        for key, gap in gaps.items()
        if gap > due[key]
    )
    said = []
    for budget in dict.fromkeys(budgets[key] for key in reached):
        of = [key for key in reached if budgets[key] == budget]
        gap, most = (max(values[key] for key in of) for values in (gaps, due))
        allowed = f", where whole channels allow {in_points(most)}" if most > TOLERANCE else ""
        said.append(f"{in_points(gap)} of the {budget}{allowed}")
    none = "amounts were given, no sparsity was requested"
    if asked:
        none = f"the removed fraction of the {_some(dict.fromkeys(budgets.values()))} is not recorded"
    return _held(gaps, wrong, f"largest difference in points: {'; '.join(said)}", none)


def _dead(plan: Plan, known: Mapping[str, StageRecord]) -> Answer:
    pruned = {key: dead_tensors(plan.stages[key].typed, each) for key, each in known.items() if KINDS[each.kind].prunes}
    dead = (f"{_name(plan, key)}: {name}" for key, each in pruned.items() for name in each)
    return _held(pruned, dead, f"every tensor keeps entries in all {len(pruned)} rounds")


def _test_once(plan: Plan, known: Mapping[str, StageRecord]) -> Answer:
    faults = []
    for key, record in known.items():
        trained_by = set(record.before).union(*(point.metrics for point in record.curve))
        if any(name.startswith("test") for name in trained_by):
            faults.append(f"{_name(plan, key)} evaluates on test while it trains")
        elif not math.isfinite(record.figure("val")):
            faults.append(f"{_name(plan, key)} has no validation {record.primary.title}")
    reason = "curves and selection use the validation split; each stage has one test figure"
    return _held(known, faults, reason, "nothing has finished")


def _scored_apart(plan: Plan, known: Mapping[str, StageRecord]) -> Answer:
    scoring = {key: record.details.get("scoring", {}) for key, record in known.items()}
    reading = {key: each.get("split") for key, each in scoring.items() if each.get("examples")}
    faults = (
        f"{_name(plan, key)} scored {f'the {split} split' if split else 'examples of a split that is not recorded'}"
        for key, split in reading.items()
        if split not in ("train", "val")
    )
    own = sorted({scoring[key]["score"] for key in reading if "." in scoring[key].get("score", "")})
    reason = (
        f"{len(reading)} rounds scored examples of the {' or '.join(sorted({str(s) for s in reading.values()}))} split"
    )
    given = f"; other data that {', '.join(own)} reads is not recorded" if own else ""
    return _held(reading, faults, reason + given, "no score read examples")


def _is_calibrated(record: StageRecord) -> bool:
    """Whether a round pruned a language model layer by layer, or by a score, with calibration data."""
    scoring = record.details.get("scoring", {})
    reads = record.layers or scoring.get("score") in CALIBRATED
    return bool(record.primary.name == PERPLEXITY and scoring.get("examples") and reads)


def _calibrated_apart(plan: Plan, known: Mapping[str, StageRecord]) -> Answer:
    """Check that no text of a test is the text that calibration reads; splits of one text are apart."""
    keys = [key for key, record in known.items() if _is_calibrated(record)]
    faults, texts = [], {"test"}
    for key in keys:
        data = plan.stages[plan.trials[plan.trials_of[key][0]].dense].typed.data
        texts |= {*data.get("tests", {})}
        same = [name for name, content in data.get("tests", {}).items() if content == data.get("root")]
        faults += [f"{_name(plan, key)} is tested on {', '.join(same)}, the text of its calibration"] if same else []
        if (split := known[key].details["scoring"].get("split")) != "train":
            faults.append(f"{_name(plan, key)} is calibrated with the {split or 'unrecorded'} split")
    reason = f"rounds that read the train split: {len(keys)}; tested on {', '.join(sorted(texts))}"
    return _held(keys, faults, reason, UNCALIBRATED)


def _draws(points: Sequence[Point], known: Mapping[str, StageRecord]) -> Answer:
    """Count the seeds of each calibrated point: each draws other calibration data."""
    found = [point for point in points if any(_is_calibrated(known[key]) for key in point.stages)]
    few = [f"{_at(point)} has {len(set(point.seeds))}" for point in found if len(set(point.seeds)) < LEAST_SEEDS]
    fewest = min((len(set(point.seeds)) for point in found), default=0)
    return _held(found, few, f"every point has {fewest} or more", UNCALIBRATED)


def _calibrated_baseline(plan: Plan, known: Mapping[str, StageRecord], comparison: Comparison) -> Answer:
    """Look for a point by magnitude at the level of each calibrated point."""
    choosing = _choosing(plan, *MAGNITUDE)
    stages = {row.stage for row in comparison.rows if row.round and row.trial in choosing}
    points = comparison.operating_points
    levels = {point.level for point in points if stages & {*point.stages}}
    found = [point for point in points if any(_is_calibrated(known[key]) for key in point.stages)]
    faults = [f"none beside {_at(point)}" for point in found if point.level not in levels]
    return _held(found, faults, f"beside all {len(found)} points", UNCALIBRATED)


def _one_kind(known: Mapping[str, StageRecord]) -> Answer:
    environments = [record.environment for record in known.values()]
    kinds = {name: sorted({each.get(name, "not recorded") for each in environments}) for name in ("processor", "torch")}
    mixed = _some(f"{name}: {' and '.join(found)}" for name, found in kinds.items() if len(found) > 1)
    faults = [f"one stage may have different bits on each: {mixed}"] if mixed else []
    return _held(known, faults, ", ".join(found for kind in kinds.values() for found in kind), "nothing has finished")


def _name(plan: Plan, key: str) -> str:
    indices = plan.trials_of.get(key, ())
    trial = plan.trials[indices[0]].name if indices else key[:12]
    return f"{trial}, round {plan.stages[key].round}"


def _held(subjects: Sized, faults: Iterable[str], reason: str, none: str = "nothing was pruned") -> Answer:
    """Return a rule's answer: its faults, or the reason why it passes; n/a with `none` if there are no `subjects`."""
    if not subjects:
        return "n/a", none
    return ("fail", listed) if (listed := _some(faults)) else ("pass", reason)


def _some(texts: Iterable[str]) -> str:
    listed = list(texts)
    more = f" and {len(listed) - _EXAMPLES} more" if len(listed) > _EXAMPLES else ""
    return "; ".join(listed[:_EXAMPLES]) + more
