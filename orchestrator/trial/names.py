"""Names of trials, and of methods in reports; and the normal form of a configuration, in which each part has a name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from orchestrator.catalogue.models import MODELS
from orchestrator.config import round_schema
from orchestrator.config.config_groups import OPEN
from orchestrator.config.well_formed import with_written_infinities
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.redact import redact_argument
from orchestrator.core.specs import Job
from orchestrator.trial.choices import RANKING, decides_itself, order_of
from pruning.catalogue.dynamics import DYNAMICS, DynamicsRow
from pruning.choices.combining import Choices
from pruning.choices.published import PUBLISHED, Method

NAMED_BY_VALUE = ("model", "data", "task", "method", "score", "schedule", "sweep")
"""Groups whose choice stands alone in a trial's name, as in the tables."""


def normal(job: Job) -> Job:
    """Return a job in its normal form, which defaults that depend on other settings and names of parts complete."""
    if job.config is None:
        return job
    try:
        job = replace(job, config=round_schema.with_densities(job.config))
    except OrchestratorError as error:
        return replace(job, config=None, error=str(error))
    assert job.config is not None
    parts = {name: dict(part) for name in OPEN if isinstance(part := job.config.get(name), Mapping)}
    for group, part in parts.items():
        for key in ("kind", "_target_"):
            if part.get(key, "") is None:
                del part[key]
        if part.get("kind") and part.get("name", "") is None:
            row = MODELS.get(part["kind"]) if group == "model" else None
            part["name"] = row.named(part) if row else part["kind"]
    if "method" in parts:
        parts["method"] = dict(with_written_infinities(parts["method"], "n"))
    schedule = job.config.get("schedule")
    if "score" in parts and isinstance(schedule, Mapping) and parts["score"].get("batch_norm", "") is None:
        kind = parts.get("dynamics", {}).get("kind")
        parts["score"]["batch_norm"] = _batch_norm(str(schedule.get("at")), DYNAMICS.get(str(kind)))
    if {"method", "score"} <= parts.keys():
        parts["method"]["name"] = called({**job.config, **parts})
    return replace(job, config={**job.config, **parts})


def _batch_norm(at: str, dynamics: DynamicsRow | None) -> str:
    """Return the default of a score's `batch_norm`: `train` before the training, else `eval`."""
    before = at == "start" or (at == "during" and dynamics is not None and dynamics.keeps_counts)
    return "train" if before else "eval"


def names_of_trials(jobs: Sequence[Job]) -> list[str]:
    """Name each trial by the overrides that differ: `l1_unstructured scope=row sparsity=0.9 seed=0`."""
    common = set.intersection(*(set(job.overrides) for job in jobs))
    names: list[str] = []
    taken: dict[str, int] = {}
    for job in jobs:
        words = [_word(redact_argument(override)) for override in job.overrides if override not in common]
        name = " ".join(words) or "trial"
        taken[name] = taken.get(name, 0) + 1
        names.append(name if taken[name] == 1 else f"{name} #{taken[name]}")
    return names


def _word(override: str) -> str:
    key, _, value = override.lstrip("+").partition("=")
    return value if key in NAMED_BY_VALUE else f"{key.removesuffix('.kind').rpartition('.')[2]}={value}"


def called(config: Mapping[str, Any]) -> str | None:
    """Return a method's name in reports. The name tells a score, a dynamics, or the units that replace its own."""
    method, dynamics = config["method"], config.get("dynamics", {})
    name, own = _ranked_by(config), dynamics.get("name") or dynamics.get("kind")
    if (target := dynamics.get("_target_")) is not None:
        own = dynamics.get("name") or str(target).rpartition(".")[2]
    elif (row := DYNAMICS.get(str(own))) is None or not row.in_training:
        return name
    published = PUBLISHED.get(str(method.get("name")))
    if published is not None and published.choices.dynamics.kind == own:
        return name
    return str(own) if name in (RANKING, "magnitude") else f"{name}, dynamics={own}"


def _ranked_by(config: Mapping[str, Any]) -> str | None:
    """Return a method's name; if another score replaces the method's own, the name tells that score."""
    method, score = config["method"], config["score"]
    name: str | None = method.get("name")
    kind = score.get("kind")
    published = PUBLISHED.get(str(name))
    if decides_itself(method) or (published is None and method.get("kind") != RANKING):
        return name
    usual = published.choices.score.kind if published else "magnitude"
    if kind == usual and published and published.choices.schedule.order != (order := order_of(config)):
        return f"{name}, order={order}"
    if kind == usual:
        units = [] if published or name not in (None, RANKING) else [*_other_units(config)]
        return ", ".join(["magnitude", *units]) if units else name
    instead = score.get("name") or str(score.get("_target_")).rpartition(".")[2]
    if method.get("kind") == RANKING or (published and _chooses_a_score_alone(published)):
        return instead
    return f"{name}, score={instead}"


def _other_units(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the choices by which a ranking by magnitude is not that of the class `RANKING`, entries of each tensor."""
    for part, field, own in (("unit", "kind", "entry"), ("scope", "kind", "layer"), ("scope", "allocation", "each")):
        if (found := config.get(part, {}).get(field, own)) != own:
            yield f"{part if field == 'kind' else field}={found}"


def _chooses_a_score_alone(published: Method) -> bool:
    """Whether a method differs from pruning by magnitude by nothing but its score."""
    others = [each.name for each in fields(Choices) if each.name != "score"]
    return not published.restart and all(
        getattr(published.choices, each) == getattr(Choices(), each) for each in others
    )


def published_at_start(config: Mapping[str, Any]) -> bool:
    """Whether the paper of a trial's method prunes the initialised network, before its training."""
    published = PUBLISHED.get(str(config["method"].get("name")))
    return published is not None and published.at == "start"
