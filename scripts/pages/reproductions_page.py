"""Text of docs/reproductions.md: published figures, our figures, and whether they agree. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

HEAD = """\
# Reproductions

<!-- Made by `scripts/reproduce --page` from docs/reproductions; edit the protocols and readings there. -->

After this page you can compare published numbers with ours, and run the experiments again. Each experiment has a
protocol that was committed before its first run: settings, seeds, deviations from the paper, and the tolerance within
which a figure agrees. Our figures are means over seeds with 95% t intervals. `full` has the lengths of the paper, if
they are known; `default` ends within an hour on two cores.

    scripts/reproduce all                              # scale default; continues after an interruption
    scripts/reproduce lottery_ticket --scale full --data ROOT

"""

Protocol = Mapping[str, Any]
Record = Mapping[str, Any]


def page(protocols: Sequence[Protocol], records: Mapping[tuple[str, str], Record], readings: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        protocols: fields of each protocol, in the order of the page.
        records: name and scale -> record, for the experiments that were run.
        readings: name -> text about the outcome.
    """
    summary = ["| reproduction | scale | figures that agree |", "|---|---|---|"]
    for protocol in protocols:
        for scale in protocol["scales"]:
            outcome = _outcome(records.get((protocol["name"], scale)))
            summary.append(f"| [{protocol['title']}](#{protocol['name'].replace('_', '-')}) | {scale} | {outcome} |")
    sections = ["\n".join(_section(protocol, records, readings.get(protocol["name"], ""))) for protocol in protocols]
    return HEAD + "\n".join(summary) + "\n\n" + "\n".join(sections)


def _outcome(record: Record | None) -> str:
    if record is None:
        return "not run"
    known = [figure["agrees"] for figure in record["figures"] if figure["agrees"] is not None]
    missing = len(record["figures"]) - len(known)
    return f"{sum(known)} of {len(known)}" + (f"; {missing} not run" if missing else "")


def _section(protocol: Protocol, records: Mapping[tuple[str, str], Record], reading: str) -> Iterator[str]:
    """Yield the lines of one reproduction."""
    name, paper = protocol["name"], protocol["paper"]
    yield f"## {name.replace('_', ' ')}\n"
    yield f"{protocol['title']}, arXiv [{paper}](https://arxiv.org/abs/{paper})."
    yield f"{protocol['claim']} [Protocol](reproductions/{name}/protocol.yaml).\n"
    if checks := protocol.get("checks"):
        yield "Checks, named in the protocol, if an expected figure or order is not found:\n"
        yield from (f"- {check}" for check in checks)
        yield ""
    for scale, settings in protocol["scales"].items():
        record = records.get((name, scale))
        if record is None:
            yield f"**{scale}**: not run.\n"
            continue
        yield f"**{scale}**: `{record['command']}`; {_circumstances(record)}.\n"
        yield "| figure | published | tolerance | ours | seeds | |"
        yield "|---|---|---|---|---|---|"
        ours = {figure["id"]: figure for figure in record["figures"]}
        yield from (_row(each, ours[each["id"]]) for each in protocol["published"])
        yield from _levels(record["trials"])
        yield from _windows(record.get("windows", ()))
        yield "\nDeviations from the paper:\n"
        yield from (f"- {deviation}" for deviation in settings["deviations"])
        yield ""
    if reading:
        yield reading


def _row(published: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    unit = published["unit"]
    bound = {"least": "≥ ", "most": "≤ "}.get(published.get("direction", ""), "")
    shown = "not run" if ours["agrees"] is None else f"{ours['mean']:.4g}"
    if ours.get("low") is not None:
        shown += f" [{ours['low']:.4g}, {ours['high']:.4g}]"
    off = "" if ours["agrees"] in (None, True) else f"{ours['mean'] - published['value']:+.3g}"
    verdict = {None: "", True: "agrees", False: f"**does not**, off by {off}"}[ours["agrees"]]
    if ours.get("n") == 1:
        verdict += ", by one seed"
    cells = [
        f"{published['what']} ({unit})",
        f"{bound}{published['value']:g}",
        f"{published['tolerance']:g}",
        shown,
        str(ours.get("n", 0)),
        verdict,
    ]
    return f"| {' | '.join(cells)} |"


def _levels(trials: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of all measurements: one line for trials that differ only in their seed."""
    groups: dict[tuple[str, str, str, int, str, int], dict[int, Mapping[str, Any]]] = {}
    for row in trials:
        restart = "" if row["restart"] in (None, "keep") else row["restart"]
        place = (
            row["model"],
            f"{row['line']}{_scored(row['rescorings'])}" if row["round"] else "dense",
            restart,
            row["round"],
            f"{row['sparsity']:.6f}",
            row["steps"],
        )
        groups.setdefault(place, {})[row["seed"]] = row
    yield "\n<details><summary>All measurements, means over seeds</summary>\n"
    yield "| network | trials | round | left % | test | validation | at early stopping | after steps | seeds |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for place, rows in sorted(groups.items()):
        model, line, restart, number, *_ = place
        kept = f"{100 * (1 - _mean(rows, 'sparsity')):.2f}"
        figures = [_known(_mean(rows, name), ".4f") for name in ("test", "val", "early_val")]
        steps = f"{_known(_mean(rows, 'early_step'), ',.0f')} of {_mean(rows, 'steps'):,.0f}"
        cells = [model, f"{line} {restart}".strip(), str(number), kept, *figures, steps, str(len(rows))]
        yield f"| {' | '.join(cells)} |"
    yield "\n</details>"


def _windows(pairs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of differences paired by window of held-out text."""
    if not pairs:
        return
    yield "\n<details><summary>Cross-entropy by held-out window, differences in nats per token</summary>\n"
    yield "| text | sparsity | difference | mean over draws [95% over windows] | windows | spread over draws (number) |"
    yield "|---|---|---|---|---|---|"
    for pair in sorted(pairs, key=lambda pair: (pair["text"], pair["sparsity"], pair["line"], pair["reference"])):
        interval = f"{pair['difference']:+.4f} [{pair['windows_low']:+.4f}, {pair['windows_high']:+.4f}]"
        spread = "–" if pair["draws_std"] is None else f"± {pair['draws_std']:.4f}"
        place = f"| {pair['text']} | {100 * pair['sparsity']:.2f}% | {pair['line']} - {pair['reference']} "
        yield f"{place}| {interval} | {pair['windows']} | {spread} ({len(pair['seeds'].split())}) |"
    yield "\n</details>"


def _scored(times: float | None) -> str:
    return f", scored {times:g} times" if times and times > 1 else ""


def _mean(rows: Mapping[int, Mapping[str, Any]], column: str) -> float:
    """Mean over seeds; NaN if a seed lacks the figure."""
    values = [row[column] for row in rows.values()]
    return math.nan if None in values else fmean(values)


def _known(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def _circumstances(record: Record) -> str:
    known = record["environment"]
    return (
        f"{record['work_seconds'] / 60:,.0f} minutes of work on {known['processor']} with torch {known['torch']}, "
        f"{record['date']}, protocol of commit {record['protocol'][:8]}"
    )
