"""Text of an exported network's README, made from its records only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.harness_scores import HarnessScore, harness_scores
from orchestrator.compare.panels import positions
from orchestrator.compare.statistics import has_spread
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import markdown, shown
from orchestrator.core.stage_kinds import KINDS
from orchestrator.export.export_folder import size
from orchestrator.export.model_card import Card, Origin, origin
from orchestrator.export.stored_network import StoredNetwork, latencies
from orchestrator.export.trial_choice import ChosenTrial, metric_named
from orchestrator.planning.number_formats import byte_size, milliseconds, percent, ratio, ratio_interval, whole_number
from orchestrator.store.saved_sweep import SavedSweep


def readme(sweep: SavedSweep, choice: ChosenTrial, kept: StoredNetwork, smaller: nn.Module, given: Origin) -> Card:
    """Return the first parts of the README; the files and how to load them follow it.

    Args:
        sweep: the saved sweep.
        choice: the trial.
        kept: its masked network.
        smaller: the network to write.
        given: what the user says of the network that was pruned.
    """
    record, config = kept.record, choice.trial.config
    dense = sweep.records.get(choice.trial.dense)
    where = positions(sweep.plan)[sweep.plan.trials.index(choice.trial)]
    name, data, line = map(markdown, (*where.panel, where.line))
    source = Path(kept.spec.location.get("model", {}).get("path") or os.devnull)
    from_base = origin(config["model"], source, given)
    base = markdown(from_base.base_model)
    scores = [*_scores(sweep, choice)]
    title = f"{base.rpartition('/')[2] or name} pruned by {line} to {percent(record.sparsity)}"
    lines = [
        f"# {title}",
        "",
        f"{name} on {data}, pruned by {line} to a sparsity of {percent(record.sparsity)} of its prunable weights; "
        "layers, channels, units and heads that the masks emptied are removed.",
        "",
        *([f"- base model {base}"] if base else []),
        f"- sweep {markdown(sweep.info.name)}, trial {markdown(choice.trial.name)}, "
        f"seed {markdown(config.get('seed', 0))}, round {record.round}",
        f"- stage {choice.stage}, pruned from the dense network of stage {choice.trial.dense}"
        f"{_initial_weights(config['model'])}",
        f"- trained with torch {markdown(record.environment.get('torch', '?'))}",
        "",
        "The command:",
        "",
        f"    {_to_copy(sweep.info.command)}",
        "",
        "| | this network | dense |",
        "|---|---:|---:|",
        *_figures(record, dense),
        f"| parameters | {whole_number(_entries(smaller))} | {whole_number(_entries(kept.model))} |",
        f"| of these not zero | {whole_number(_alive(smaller))} | {whole_number(_entries(kept.model))} |",
        f"| bytes of parameters and buffers | {whole_number(size(smaller))} | {whole_number(size(kept.model))} |",
        *_latency(sweep, choice),
        *map(_harness, scores),
        "",
        "All figures are of this one network, and the test figures were read once; the sweep's report shows how they "
        "vary between seeds.",
        "",
        *_left(smaller),
    ]
    return Card("".join(f"{line}\n" for line in lines), from_base, where.line, title, scores)


def _initial_weights(model: Mapping[str, Any]) -> str:
    """Return which weights the dense network began with, if they came from a file."""
    place = model.get("weights")
    return f", which began with the weights {markdown(place)}" if isinstance(place, str) else ""


def _figures(record: StageRecord, dense: StageRecord | None) -> Iterator[str]:
    for split, title in (("val", "validation"), ("test", "test")):
        for name in (record.primary.name, "loss"):
            metric, figure = metric_named(name, record), f"{split}/{name}"
            if figure in record.after:
                other = dense.after.get(figure) if dense else None
                beside = "" if other is None else markdown(metric.said(other))
                yield f"| {metric.title} on {title} | {markdown(metric.said(record.after[figure]))} | {beside} |"


def _scores(sweep: SavedSweep, choice: ChosenTrial) -> Iterator[HarnessScore]:
    """Yield the figures of lm-evaluation-harness of this network alone, beside those of its dense one."""
    asked = any(KINDS[sweep.plan.stages[key].kind].answers for key in choice.trial.measured)
    for point in compare_trials(sweep.plan, sweep.records).points if asked else ():
        for seed in (seed for seed, stage in point.stage_of.items() if stage == choice.stage):
            yield from harness_scores(
                sweep.plan, sweep.records, [replace(point, seeds=(seed,), stages=(choice.stage,))]
            )


def _to_copy(command: str) -> str:
    """Return a command as it was typed; escaped if it holds a tag or a link, which no command needs."""
    plain = " ".join(shown(command).split())
    return markdown(command) if "<" in plain or "](" in plain else plain


def _harness(score: HarnessScore) -> str:
    """Return the row of a figure, with the difference by document, and its interval if documents differ."""
    found, name = score.documents, f"{score.name} {score.metric.title}"
    if found is not None:
        name += f", by document {score.metric.written(found.mean, '+')}"
        # Without spread no answer differs, which does not show a difference of exactly 0.
        if found.low is not None and found.high is not None and has_spread(found):
            name += f" [{', '.join(score.metric.written(each, '+') for each in (found.low, found.high))}]"
    values = " | ".join(markdown(score.metric.said(each)) for each in (score.score.mean, score.dense))
    return f"| {markdown(name)} | {values} |"


def _latency(sweep: SavedSweep, choice: ChosenTrial) -> Iterator[str]:
    """Yield the measured latency and memory of the deployed network and of the dense one."""
    for spec, record in latencies(sweep, choice):
        found: Mapping[str, float] = record.measurements
        measured = spec.typed
        form, place = markdown(measured.format), markdown(_place(record))
        for batch in sorted(measured.measure.batch_sizes):
            yield (
                f"| milliseconds at batch {batch} as {form}, on {place} | "
                f"{milliseconds(found[f'latency_ms/{batch}'])} | {milliseconds(found[f'dense_ms/{batch}'])} |"
            )
            if {f"memory/{batch}", f"dense_memory/{batch}"} <= found.keys():
                memory, beside = (byte_size(found[f"{name}/{batch}"]) for name in ("memory", "dense_memory"))
                yield f"| peak memory at batch {batch} as {form} | {memory} | {beside} |"
            speedup = _speedup(found, "speedup", batch)
            runtime = record.environment.get(f"dense_runtime/{batch}")
            over = f" over dense in {markdown(runtime)}" if runtime else ""
            yield f"| speed-up at batch {batch} as {form}{over} | {speedup} | {ratio(1.0)} |"
            if f"token_speedup/{batch}" in found:
                times = " | ".join(milliseconds(found[f"{name}/{batch}"]) for name in ("token_ms", "dense_token_ms"))
                yield f"| milliseconds of one more token at batch {batch} as {form} | {times} |"
                said = _speedup(found, "token_speedup", batch)
                yield f"| speed-up of a token at batch {batch} as {form} | {said} | {ratio(1.0)} |"


def _speedup(found: Mapping[str, float], name: str, batch: int) -> str:
    """Return a measured speed-up with its interval."""
    return ratio_interval(*(found[f"{name}{end}/{batch}"] for end in ("", "_low", "_high")))


def _place(record: StageRecord) -> str:
    return record.environment.get("processor", record.host)


def _left(smaller: nn.Module) -> Iterator[str]:
    """Yield the sizes of a smaller transformer, or the empty outputs that could not be removed, and why."""
    if resized := getattr(smaller, "resized", None):
        yield from (f"- {markdown(key)}: {_size(old)} -> {_size(new)}" for key, (old, new) in resized.config.items())
        for unit, count in resized.padding.items():
            yield f"- empty units of kind {unit} that stay, as the configuration has one size for all layers: {count}"
        yield from (f"- {each}" for each in resized.differs)
    report = getattr(smaller, "shrunk", None)
    if report is None:
        return
    if report.form == "unchanged":
        yield f"Nothing could be removed: {'; '.join(map(markdown, report.tried))}."
    for name, reasons in report.kept.items():
        counts = ", ".join(f"{count} ({markdown(reason)})" for reason, count in reasons.items())
        yield f"- empty outputs that {markdown(name.removeprefix('network.'))} keeps: {counts}"
    if report.form != "unchanged" and not report.kept:
        yield "All empty outputs were removed. Single zeros stay, and are stored like any other number."


def _size(value: object) -> str:
    """Return a size of a configuration; of a list, which has an entry for each layer, its length."""
    return f"{len(value)} entries" if isinstance(value, list) else markdown(value)


def _entries(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _alive(network: nn.Module) -> int:
    return sum(int(parameter.count_nonzero()) for parameter in network.parameters())
