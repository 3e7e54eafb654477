"""Rules about data: which examples networks learn from, are chosen by, and are tested on."""

from __future__ import annotations

import math

from orchestrator.compare.audit.rule import NOTHING_FINISHED, Audited, AuditRule, RuleAnswer, held
from orchestrator.planning.number_formats import counted


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
    scoring = {key: record.details.get("scoring", {}) for key, record in sweep.trained.items()}
    reading = {key: each.get("split") for key, each in scoring.items() if each.get("examples")}
    faults = (
        f"{sweep.name(key)} scored {f'the {split} split' if split else 'examples of a split that is not recorded'}"
        for key, split in reading.items()
        if split not in ("train", "val")
    )
    own = sorted({scoring[key]["score"] for key in reading if "." in scoring[key].get("score", "")})
    reason = (
        f"{len(reading)} rounds scored examples of the {' or '.join(sorted({str(s) for s in reading.values()}))} split"
    )
    given = f"; other data that {', '.join(own)} reads is not recorded" if own else ""
    return held(reading, faults, reason + given, "no score read examples")


def _tested_apart(sweep: Audited) -> RuleAnswer:
    """Read the number of test examples that each dense training found among those that it learns from."""
    shared = {key: record.details.get("shared_examples") for key, record in sweep.trained.items()}
    known = {key: count for key, count in shared.items() if count is not None}
    faults = (f"{sweep.name(key)} shares {counted(count, 'example')}" for key, count in known.items() if count)
    return held(known, faults, "no test example is one", "built-in data sets, or data that cannot be compared")


RULES = (
    AuditRule("test examples are no training or validation examples", _tested_apart),
    AuditRule("chosen on validation, test read once", _test_once),
    AuditRule("scores read no test data", _scored_apart),
)
