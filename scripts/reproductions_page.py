"""docs/reproductions.md as text: what was published, what came of it here, and whether the two agree. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HEAD = """\
# Reproductions

<!-- Made by `scripts/reproduce --page` from docs/reproductions; edit the protocols and readings there. -->

Published numbers, and what this project measures. Each has a protocol that was committed before its first run:
settings, seeds, what it deviates by, and the tolerance within which a figure agrees. Ours are means over seeds with 95%
t intervals. `full` has the lengths of the paper, where these are known, `default` ends within 40 minutes on two cores.

    scripts/reproduce all                              # scale default; goes on where it was interrupted
    scripts/reproduce lottery_ticket --scale full --data ROOT

"""

Protocol = Mapping[str, Any]
Record = Mapping[str, Any]


def page(protocols: Sequence[Protocol], records: Mapping[tuple[str, str], Record], readings: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        protocols: fields of each protocol, in the order of the page.
        records: name and scale -> record, of those that were run.
        readings: name -> what there is to say of its outcome.
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
        yield "\nUnlike the paper:\n"
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
    cells = [
        f"{published['what']} ({unit})",
        f"{bound}{published['value']:g}",
        f"{published['tolerance']:g}",
        shown,
        str(ours.get("n", 0)),
        verdict,
    ]
    return f"| {' | '.join(cells)} |"


def _circumstances(record: Record) -> str:
    known = record["environment"]
    return (
        f"{record['work_seconds'] / 60:,.0f} minutes of work on {known['processor']} with torch {known['torch']}, "
        f"{record['date']}, commit {record['commit'][:8]}"
    )
