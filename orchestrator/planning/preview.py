"""Preview of a sweep for `dry_run=true`: trials, unique and shared stages, resources."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.config.parallel import processes
from orchestrator.config.training import row_of
from orchestrator.core.events import Forecast
from orchestrator.core.plain_data import canonical_json
from orchestrator.core.specs import Plan, TrialSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.planning.expert_counts import experts_told
from orchestrator.planning.forecast import told
from orchestrator.planning.layerwise_costs import layerwise_costs
from orchestrator.planning.number_formats import counted, percent, whole_number
from orchestrator.planning.pace import gpu_models
from orchestrator.planning.pinned_content import text_size
from orchestrator.planning.plan import device_kind, round_targets, threads
from orchestrator.trial.names import published_at_start

SHOWN = 40
"""Maximum number of trials in the table; a longer sweep shows the first trials and the last one."""


def preview(
    name: str,
    plan: Plan,
    finished: Collection[str],
    failed: Collection[str] = (),
    forecast: Forecast | None = None,
    search: Sequence[str] = (),
    edited: Sequence[str] = (),
    dense: Sequence[str] = (),
) -> str:
    """Return the preview of a sweep as text.

    Args:
        name: name of the sweep
        plan: plan of the sweep
        finished: keys of the stages that the store holds
        failed: keys of the stages with a remembered failure
        forecast: forecast of the unfinished stages
        search: lines about the search; empty without a search
        edited: lines about own files that were edited since the last run
        dense: lines about weights that rounds leave dense, of networks that were tried
    """
    asked = sum(map(len, plan.work))
    first, unique = plan.trials[0].config, sum(not KINDS[spec.kind].part for spec in plan.stages.values())
    lines = [
        f"sweep     {name}",
        f"trials    {len(plan.trials)}",
        f"stages    {unique} unique of {asked} asked for, {asked - unique} shared; {by_kind(plan)}",
        f"to run    {len(plan.stages) - sum(key in finished for key in plan.stages)}; "
        f"{sum(key in finished for key in plan.stages)} already in the store at {first['store']['uri']}",
        *_block("edited", edited),
        *_failed(plan, set(failed) - set(finished)),
        *_forecast(forecast),
        *_block("by layer", layerwise_costs(plan, finished, rough=forecast is None or forecast.work.unknown > 0)),
        *_block("search", search),
        *_when(plan),
        *_block("experts", experts_told(plan)),
        *_block("dense", dense),
        *_block("scores", _few_examples(plan)),
        f"each      {_resources(first)}",
        f"tracking  {_tracking(first)}",
        "",
        *_table(plan, finished),
        "",
        "Nothing was run, because of dry_run=true. A real run first tries whether built-in parts fit each other and "
        "names under `prune` fit the network, and says which large weights stay dense.",
    ]
    return "\n".join(lines)


def by_kind(plan: Plan) -> str:
    """Count a plan's stages by their kind: `1 dense training, 8 rounds`."""
    kinds = Counter(spec.kind for spec in plan.stages.values())
    return ", ".join(counted(kinds[kind], row.noun) for kind, row in KINDS.items() if kinds[kind])


def _forecast(forecast: Forecast | None) -> Iterator[str]:
    yield from _block("estimate", told(forecast) if forecast is not None else ())


def _block(head: str, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"{head:<8}  {line}"
        head = ""


def _failed(plan: Plan, failed: Collection[str]) -> Iterator[str]:
    count = len(plan.stages.keys() & set(failed))
    if count and plan.trials[0].config["retry_failed"]:
        yield f"failed    {count} before, to be run again"
    elif count:
        yield f"failed    {count} before, skipped on an equal worker; pass retry_failed=true to run them again"


def _when(plan: Plan) -> Iterator[str]:
    """Yield a line if a method prunes the trained network, but its paper prunes the initialised network."""
    each = [(trial.config["schedule"]["at"], trial.config) for trial in plan.trials]
    late = dict.fromkeys(c["method"]["name"] for at, c in each if at == "trained" and published_at_start(c))
    if late:
        yield (
            f"prunes    the trained network by {', '.join(late)} (schedule.at=trained), published for the initialised "
            "network; pass schedule.at=start schedule.rounds=1 for that"
        )


def _few_examples(plan: Plan) -> Iterator[str]:
    """Yield a line for each text that has fewer blocks than a trial asks for scoring examples."""
    asked: dict[str, tuple[Mapping[str, Any], int]] = {}
    for trial in plan.trials:
        data, examples = trial.config["data"], trial.config["score"].get("examples")
        if examples is not None and data.get("kind") == "text":
            asked.setdefault(canonical_json([data, examples]), (data, examples))
    tokens = {root: text_size(root) for root in dict.fromkeys(data["root"] for data, _ in asked.values())}
    yield from (line for data, examples in asked.values() for line in _few_blocks(data, examples, tokens[data["root"]]))


def _few_blocks(data: Mapping[str, Any], examples: int, tokens: int) -> Iterator[str]:
    """Yield a line if a text of at most `tokens` tokens has fewer blocks to train on than scoring examples."""
    block = int(data["block"])
    held = round(tokens * data["test_fraction"]) if data["test_size"] is None else data["test_size"] * block + 1
    blocks = max(0, tokens - held - 1) // block
    most = blocks - (round(blocks * (data["val_fraction"] or 0)) if data["val_size"] is None else data["val_size"])
    if examples > most:
        yield (
            f"read all training examples, fewer than score.examples={examples}: {whole_number(tokens)} bytes of text, "
            f"with one token a byte or fewer, have at most {max(0, most)} blocks of {block} tokens to train on"
        )


def _at_once(cluster: Mapping[str, Any]) -> str:
    """Return how many trials of several processes this machine runs at once; empty if the sweep joins a cluster."""
    if cluster["kind"] == "inline" or cluster["address"]:
        return ""
    here = {"cpus": cluster["num_cpus"] or os.cpu_count() or 1, "gpus": len(gpu_models())}
    asked = {name: cluster[f"{name}_per_trial"] for name in here}
    fitting = min(int(here[name] / amount + 1e-9) for name, amount in asked.items() if amount)
    return f"; {counted(min(fitting, cluster['max_concurrent'] or fitting), 'trial')} at once on this machine"


def _resources(config: Mapping[str, Any]) -> str:
    cluster = config["cluster"]
    where = (
        "in this process"
        if cluster["kind"] == "inline"
        else f"on Ray ({cluster['address'] or 'started for the sweep'})"
    )
    gpus = f", {cluster['gpus_per_trial']:g} GPU" if cluster["gpus_per_trial"] else ""
    gpus += f" for {count} processes" if (count := processes(config)) > 1 else ""
    memory = f", {cluster['memory_per_trial']} memory" if cluster["memory_per_trial"] else ""
    at_once = _at_once(cluster) if count > 1 else ""
    said = (
        f"{cluster['cpus_per_trial']:g} CPU{gpus}{memory}, threads: {threads(config)}, {device_kind(config)}, {where}"
    )
    return said + at_once


def _tracking(config: Mapping[str, Any]) -> str:
    tracking = config["tracking"]
    if tracking["kind"] == "none":
        return "none"
    return f"MLflow, experiment {tracking['experiment']!r}"


def _table(plan: Plan, finished: Collection[str]) -> Iterator[str]:
    shown = plan.trials if len(plan.trials) <= SHOWN else (*plan.trials[: SHOWN - 1], plan.trials[-1])
    width = max(len("trial"), *(len(trial.name) for trial in shown))
    yield f"{'trial':<{width}}  {'dense':<10}  sparsity after each round ({'*'} shared, + already done)"
    for trial in shown:
        if trial is shown[-1] and len(shown) < len(plan.trials):
            yield f"... and {len(plan.trials) - SHOWN} more ..."
        dense = f"{trial.dense[:8]}{_marks(plan, trial.dense, finished)}"
        yield f"{trial.name:<{width}}  {dense:<10}  {'  '.join(_rounds(plan, trial, finished))}"


def _rounds(plan: Plan, trial: TrialSpec, finished: Collection[str]) -> Iterator[str]:
    for key, asked in zip(trial.stages[1:], round_targets(trial.config), strict=True):
        yield f"{_asked(asked, trial.config)}{_marks(plan, key, finished)}"


def _asked(asked: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the request of a round; `as trained` if the training of a dynamics without a target decides."""
    if asked.get("target", 0) is None:
        row = row_of(config["dynamics"])
        return "as given" if row is None or row.has_target else "as trained"
    return percent(asked["target"]) if "target" in asked else f"amount {asked['amount']}"


def _marks(plan: Plan, key: str, finished: Collection[str]) -> str:
    return ("*" if len(plan.trials_of[key]) > 1 else "") + ("+" if key in finished else "")
