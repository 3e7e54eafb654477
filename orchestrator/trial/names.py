"""Names of methods in reports: the published name, or the choices that replace its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from orchestrator.trial.choices import RANKING, decides_itself
from pruning.catalogue.dynamics import DYNAMICS
from pruning.choices.combining import Choices
from pruning.choices.published import PUBLISHED, Method


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
