"""Rules about language models that are pruned with calibration data."""

from __future__ import annotations

from orchestrator.catalogue.data import DATA
from orchestrator.catalogue.tasks import TASKS
from orchestrator.compare.audit.controls import trials_by
from orchestrator.compare.audit.rule import LEAST_SEEDS, Audited, AuditRule, RuleAnswer, at, enough_seeds, held
from orchestrator.compare.comparison import Point
from orchestrator.core.specs import Plan
from pruning.catalogue.scores import SCORES

UNCALIBRATED = "no language model was pruned with calibration data"


def _calibrated(sweep: Audited) -> list[str]:
    """Return the rounds that pruned a language model layer by layer, or by a score, with calibration data."""
    found = []
    for key, record in sweep.trained.items():
        scoring = record.details.get("scoring", {})
        row = SCORES.get(scoring.get("score", ""))
        reads = record.layers or (row is not None and row.calibrated)
        if scoring.get("examples") and reads and _is_of_text(sweep.plan, key):
            found.append(key)
    return found


def _is_of_text(plan: Plan, key: str) -> bool:
    """Whether a round's network is a language model, by its task or its data."""
    dense = plan.stages[plan.trials[plan.trials_of[key][0]].dense].typed
    task, data = TASKS.get(str(dense.task.get("kind"))), DATA.get(str(dense.data.get("kind")))
    return (task is not None and task.of_text) or (data is not None and data.of_text)


def _calibrated_points(sweep: Audited) -> list[Point]:
    keys = {*_calibrated(sweep)}
    return [point for point in sweep.comparison.operating_points if keys & {*point.stages}]


def _calibrated_apart(sweep: Audited) -> RuleAnswer:
    """Check that no text of a test is the text that calibration reads; splits of one text are apart."""
    plan, known, keys = sweep.plan, sweep.trained, _calibrated(sweep)
    faults, texts = [], {"test"}
    for key in keys:
        data = plan.stages[plan.trials[plan.trials_of[key][0]].dense].typed.data
        texts |= {*data.get("tests", {})}
        same = [name for name, content in data.get("tests", {}).items() if content == data.get("root")]
        faults += [f"{sweep.name(key)} is tested on {', '.join(same)}, the text of its calibration"] if same else []
        if (split := known[key].details["scoring"].get("split")) != "train":
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
    AuditRule("calibration of language models apart from the texts they are tested on", _calibrated_apart),
    AuditRule(f"{LEAST_SEEDS} or more draws of the calibration of language models", _draws, of_many=True),
    AuditRule(
        "calibrated language models beside pruned smallest weights at each sparsity", _calibrated_baseline, of_many=True
    ),
)
