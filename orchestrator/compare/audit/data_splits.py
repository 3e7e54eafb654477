"""Rules about data: which examples networks learn from, are chosen by, calibrated with and tested on."""

from __future__ import annotations

import math

from orchestrator.catalogue.data import DATA
from orchestrator.catalogue.tasks import TASKS
from orchestrator.compare.audit.controls import trials_by
from orchestrator.compare.audit.rule import (
    LEAST_SEEDS,
    NOTHING_FINISHED,
    Audited,
    AuditRule,
    RuleAnswer,
    at,
    enough_seeds,
    held,
)
from orchestrator.compare.comparison import Point
from orchestrator.core.specs import Plan, StageFields
from orchestrator.planning.number_formats import counted
from pruning.catalogue.scores import SCORES


def _test_once(sweep: Audited) -> RuleAnswer:
    faults = []
    for key, record in sweep.trained.items():
        trained_by = set(record.before).union(*(point.metrics for point in record.curve))
        if any(name.startswith("test") for name in trained_by):
            faults.append(f"{sweep.name(key)} evaluates on test while it trains")
        elif not math.isfinite(record.figure("val")):
            faults.append(f"{sweep.name(key)} has no validation {record.primary.title}")
    reason = "curves and selection use the validation split; each stage has one test figure"
    return held(sweep.trained, faults, reason, NOTHING_FINISHED)


def _scored_apart(sweep: Audited) -> RuleAnswer:
    scoring = {key: record.typed.scoring for key, record in sweep.trained.items()}
    reading = {key: each.split for key, each in scoring.items() if each.examples}
    faults = (
        f"{sweep.name(key)} scored {f'the {split} split' if split else 'examples of a split that is not recorded'}"
        for key, split in reading.items()
        if split not in ("train", "val")
    )
    own = sorted({scoring[key].score for key in reading if "." in scoring[key].score})
    reason = f"{len(reading)} rounds scored examples of the {' or '.join(sorted({*reading.values()}))} split"
    given = f"; other data that {', '.join(own)} reads is not recorded" if own else ""
    return held(reading, faults, reason + given, "no score read examples")


def _tested_apart(sweep: Audited) -> RuleAnswer:
    """Read the number of test examples that each dense training found among those that it learns from."""
    shared = {key: record.typed.shared_examples for key, record in sweep.trained.items()}
    known = {key: count for key, count in shared.items() if count is not None}
    faults = (f"{sweep.name(key)} shares {counted(count, 'example')}" for key, count in known.items() if count)
    return held(known, faults, "no test example is one", "built-in data sets, or data that cannot be compared")


UNCALIBRATED = "no language model was pruned with calibration data"


def _calibrated(sweep: Audited) -> list[str]:
    """Return the rounds that pruned a language model layer by layer, or by a score, with calibration data."""
    found = []
    for key, record in sweep.trained.items():
        scoring = record.typed.scoring
        row = SCORES.get(scoring.score)
        reads = scoring.layers or (row is not None and row.calibrated)
        if scoring.examples and reads and _is_of_text(sweep.plan, key):
            found.append(key)
    return found


def _dense(plan: Plan, key: str) -> StageFields:
    """Return the fields of the dense training of a round's first trial."""
    return plan.stages[plan.trials[plan.trials_of[key][0]].dense].typed


def _is_of_text(plan: Plan, key: str) -> bool:
    """Whether a round's network is a language model, by its task or its data."""
    dense = _dense(plan, key)
    task, data = TASKS.get(str(dense.task.get("kind"))), DATA.get(str(dense.data.get("kind")))
    return (task is not None and task.of_text) or (data is not None and data.of_text)


def _calibrated_points(sweep: Audited) -> list[Point]:
    keys = {*_calibrated(sweep)}
    return [point for point in sweep.comparison.operating_points if keys & {*point.stages}]


def _calibrated_apart(sweep: Audited) -> RuleAnswer:
    """Check that no text of a test is the text that calibration reads; splits of one text are apart."""
    known, keys = sweep.trained, _calibrated(sweep)
    faults, texts = [], {"test"}
    for key in keys:
        data = _dense(sweep.plan, key).data
        texts |= {*data.get("tests", {})}
        same = [name for name, content in data.get("tests", {}).items() if content == data.get("root")]
        faults += [f"{sweep.name(key)} is tested on {', '.join(same)}, the text of its calibration"] if same else []
        if (split := known[key].typed.scoring.split) != "train":
            faults.append(f"{sweep.name(key)} is calibrated with the {split or 'unrecorded'} split")
    reason = f"rounds that read the train split: {len(keys)}; tested on {', '.join(sorted(texts))}"
    return held(keys, faults, reason, UNCALIBRATED)


def _draws(sweep: Audited) -> RuleAnswer:
    """Count the seeds of each calibrated point: each draws other calibration data."""
    return enough_seeds(_calibrated_points(sweep), UNCALIBRATED)


def _calibrated_baseline(sweep: Audited) -> RuleAnswer:
    """Look for a point by magnitude at the level of each calibrated point."""
    choosing = trials_by(sweep.plan, "magnitude")
    stages = {row.stage for row in sweep.comparison.rows if row.round and row.trial in choosing}
    points = sweep.comparison.operating_points
    levels = {point.level for point in points if stages & {*point.stages}}
    found = _calibrated_points(sweep)
    faults = [f"none beside {at(point)}" for point in found if point.level not in levels]
    return held(found, faults, f"beside all {len(found)} points", UNCALIBRATED)


RULES = (
    AuditRule("test examples are no training or validation examples", _tested_apart),
    AuditRule("chosen on validation, test read once", _test_once),
    AuditRule("scores read no test data", _scored_apart),
    AuditRule("calibration of language models apart from the texts they are tested on", _calibrated_apart),
    AuditRule(f"{LEAST_SEEDS} or more draws of the calibration of language models", _draws, of_many=True),
    AuditRule(
        "calibrated language models beside pruned smallest weights at each sparsity", _calibrated_baseline, of_many=True
    ),
)
