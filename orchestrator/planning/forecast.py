"""Forecast of the time, steps and bytes of a run, and the actual values after the run. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from orchestrator.core.events import Forecast, KnownAmount
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.planning.number_formats import at_least, byte_size, counted, duration, known_duration, whole_number
from orchestrator.planning.pace import Expected, Pace, places, wall
from orchestrator.store.retention import needed_weights


def forecast(
    plan: Plan,
    finished: Mapping[str, StageRecord],
    pace: Pace,
    *,
    made: float,
    slots: int | None,
    keep: str = "needed",
    basis: str = "",
) -> Forecast:
    """Estimate the time, steps and bytes of the unfinished stages of a plan.

    Args:
        plan: the whole sweep
        finished: records of the stages that need not run
        pace: pace of finished stages
        made: current time in Unix seconds
        slots: number of stages that run at once; None if unknown
        keep: `store.keep`
        basis: sentence with the source of the estimate
    """
    where = places(plan)
    each = {key: pace.expect(where[key], spec) for key, spec in plan.stages.items() if key not in finished}
    seconds, steps = _added(plan, finished, each)
    kept = set(plan.stages) if keep == "all" else needed_weights(plan.stages, [plan])
    done = plan.added({key: record.seconds for key, record in finished.items() if key in plan.stages})
    known, work = seconds | done, _sum(seconds.get(key) for key in each)
    return Forecast(
        made=made,
        stages=len(each),
        work=work,
        wall=KnownAmount(0.0, len(each)) if slots is None else KnownAmount(wall(plan, seconds, slots), work.unknown),
        slots=slots,
        steps=_sum(steps.get(key) for key in each),
        bytes=_sum(_bytes(found, key in kept) for key, found in each.items()),
        shared=sum(took * (len(plan.trials_of[key]) - 1) for key, took in known.items()),
        done=sum(done.values()),
        basis=basis,
    )


def _added(
    plan: Plan, finished: Mapping[str, StageRecord], each: Mapping[str, Expected]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds and the steps that each unfinished stage adds to its parts; nothing for unknown ones."""
    seconds = {key: record.seconds for key, record in finished.items() if key in plan.stages}
    steps: dict[str, float] = {key: record.steps for key, record in finished.items() if key in plan.stages}
    seconds |= {key: found.seconds for key, found in each.items() if found.seconds is not None}
    steps |= {key: found.steps for key, found in each.items() if found.steps is not None}
    added = [plan.added(amounts) for amounts in (seconds, steps)]
    return {k: v for k, v in added[0].items() if k in each}, {k: v for k, v in added[1].items() if k in each}


def taken(forecast: Forecast, plan: Plan, records: Mapping[str, StageRecord]) -> Forecast:
    """Return the actual values of the run of `forecast`, from the stages of its plan that ended during the run.

    As in the estimate, `wall` counts from the start of the first stage, without the start of Ray and torch.
    """
    until = math.inf if forecast.ended is None else forecast.ended
    found = {key: each for key, each in records.items() if key in plan.stages and forecast.made < each.ended <= until}
    began = min((record.started for record in found.values()), default=0.0)
    ended = max((record.ended for record in found.values()), default=0.0)
    wall = KnownAmount(0.0, len(found)) if forecast.ended is None else KnownAmount(max(0.0, ended - began))
    return Forecast(
        made=forecast.made,
        stages=len(found),
        work=KnownAmount(sum(plan.added({key: record.seconds for key, record in found.items()}).values())),
        wall=wall,
        slots=forecast.slots,
        steps=KnownAmount(sum(plan.added({key: record.steps for key, record in found.items()}).values())),
        bytes=KnownAmount(sum(each.text_bytes + sum(f.bytes for f in each.files.values()) for each in found.values())),
    )


def told(forecast: Forecast) -> Iterator[str]:
    """Yield the lines of a forecast; none if no stage is left to run."""
    if not forecast.stages:
        return
    figures = in_words(forecast)
    if forecast.work.unknown == forecast.stages:
        yield f"unknown: {forecast.basis}"
        if figures:
            yield f"known: {figures}"
        return
    if figures:
        yield figures
    saved = [f"sharing saves {duration(forecast.shared)}"] if round(forecast.shared) else []
    saved += [f"done already {duration(forecast.done)}"] if round(forecast.done) else []
    yield "; ".join([forecast.basis, *saved])
    if 0 < forecast.work.unknown < forecast.stages:
        yield f"no similar stage has finished for {forecast.work.unknown} of {counted(forecast.stages, 'stage')}"


def in_words(forecast: Forecast) -> str:
    """Return the known values of a forecast, or of a run: `1:20 of work, 0:40 with 2 at once, ...`."""
    stages, parts = forecast.stages, []
    if forecast.work.unknown < stages and (work := _seconds(forecast.work)):
        parts.append(f"{work} of work")
    if forecast.wall.unknown < stages and (wall := _seconds(forecast.wall)):
        how = "in all" if forecast.slots is None else _at_once(forecast.slots)
        parts.append(f"{wall} {how}")
    if forecast.steps.unknown < stages:
        parts.append(at_least(f"{whole_number(forecast.steps.known)} steps", bool(forecast.steps.unknown)))
    if forecast.bytes.unknown < stages:
        parts.append(at_least(byte_size(forecast.bytes.known), bool(forecast.bytes.unknown)))
    return ", ".join(parts)


def afterwards(forecast: Forecast, plan: Plan, records: Mapping[str, StageRecord]) -> str:
    """Return a sentence with the estimate for the last run, if there is one, and its actual values."""
    took = in_words(taken(forecast, plan, records)) or "nothing"
    since = "taken since" if forecast.ended is None else "taken"
    if forecast.work.unknown == forecast.stages:
        return f"{since.capitalize()}: {took}."
    return f"Estimated as it began: {in_words(forecast)}; {since}: {took}."


def _at_once(slots: int) -> str:
    return "one at a time" if slots == 1 else f"with {slots} at once"


def _seconds(amount: KnownAmount) -> str:
    return known_duration(amount.known, bool(amount.unknown))


def _sum(values: Iterable[float | None]) -> KnownAmount:
    found = list(values)
    known = [value for value in found if value is not None]
    return KnownAmount(sum(known), len(found) - len(known))


def _bytes(expected: Expected, kept: bool) -> float | None:
    if expected.bytes is None or (kept and expected.weights is None):
        return None
    return expected.bytes + (expected.weights or 0.0 if kept else 0.0)
