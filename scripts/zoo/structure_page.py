"""Results of `structure_runs`, and the text of docs/reference/transformers-by-structure.md. Pure.

python -m scripts.zoo.structure_page
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pruning.choices.axes import FamilyUnit

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "transformers-by-structure.md"
UNITS: tuple[FamilyUnit, ...] = ("layer", "mlp", "heads")
TASKS = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Encoder-decoders of text",
    "image": "Image classifiers",
    "ctc": "Speech with CTC",
    "audio": "Audio classifiers",
    "speech": "Speech to text",
    "vision": "Vision-language models",
}
"""Task -> its heading."""
HEAD = """\
# Transformers made smaller, one by one

<!-- Made by `python -m scripts.zoo.structure_page` from transformers-by-structure.jsonl. -->

After this page you know for each model type of transformers which of `layer`, `mlp` and `heads` can be removed, and
what is said where one cannot. `python -m scripts.zoo.structure_runs TASKS FILE` builds a small network of each stock
class, with random weights, removes 40% of a unit by magnitude, and calls `pruning.smaller_transformer`, saves the
smaller network and loads it by the stock class.

**right**: the network is smaller, no tensor is missing or left over in the file, and masked, smaller and loaded
networks compute the same, within 1e-4 of the largest output. **right\\***: the same for smaller and loaded; the masked
network keeps norms of removed layers, and the report says so. A letter in brackets is the sentence of a refusal, below.
**WRONG** is anything else. A network of two layers of different kinds may refuse `layer`, because one of each has to
stay; larger ones of its type have more.
"""


def read_runs(file: Path) -> dict[str, Any]:
    """Read a file of results: name -> the last one."""
    lines = file.read_text().splitlines() if file.exists() else ()
    return {row["name"]: row for row in map(json.loads, lines)}


def page(rows: Mapping[str, Any]) -> str:
    """Return the page."""
    built = {name: row for name, row in rows.items() if "error" not in row}
    releases = ", ".join(sorted({row["transformers"] for row in built.values()}))
    letters = _letters(built)
    commits = {row["commit"] for row in built.values()}
    states = "" if len(commits) < 2 else f", by {len(commits)} states of the engine, {', '.join(sorted(commits))}"
    states += "; what was right, or had no key, by an earlier one was not run again" if states else ""
    parts = [HEAD, f"Made with transformers {releases}{states}.\n", *_in_short(rows), ""]
    for task, title in TASKS.items():
        own = {name: row for name, row in built.items() if name.startswith(f"{task}-")}
        if own:
            parts += [f"## {title}\n", *_table(own, letters), ""]
    parts += ["## Refusals\n"]
    for kind, letter in letters.items():
        parts.append(f"- ({letter}) {kind}")
    parts += ["", "## Not built\n", "The script found no small network of these, or no inputs for it:\n"]
    parts += [f"- `{name}`: `{_first_line(row['error'])}`" for name, row in rows.items() if "error" in row]
    return "\n".join(parts) + "\n"


def _in_short(rows: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table: for each task how many networks were built, and were right, refused and wrong."""
    yield "| networks | types | built | " + " | ".join(f"`{unit}` right" for unit in UNITS) + " | WRONG |"
    yield "|---|---:|---:|" + "---:|" * (len(UNITS) + 1)
    for task, title in TASKS.items():
        own = [row for name, row in rows.items() if name.startswith(f"{task}-")]
        built = [row for row in own if "error" not in row]
        if not built:
            continue
        right = [sum(row[unit]["right"] for row in built) for unit in UNITS]
        wrong = sum(_is_wrong(row[unit]) for row in built for unit in UNITS)
        cells = [f"{each} ({100 * each / len(built):.0f}%)" for each in right]
        yield f"| {title} | {len(own)} | {len(built)} | " + " | ".join(cells) + f" | {wrong or ''} |"


def _table(rows: Mapping[str, Any], letters: Mapping[str, str]) -> Iterator[str]:
    yield "| type | class | " + " | ".join(f"`{unit}`" for unit in UNITS) + " |"
    yield "|---|---|" + "---|" * len(UNITS)
    for name, row in sorted(rows.items()):
        cells = " | ".join(_cell(row[unit], letters) for unit in UNITS)
        yield f"| `{name.partition('-')[2]}` | {row['class']} | {cells} |"


def _cell(outcome: Mapping[str, Any], letters: Mapping[str, str]) -> str:
    if outcome["right"]:
        return "right\\*" if outcome["differs"] else "right"
    if _is_wrong(outcome):
        return f"**WRONG** {outcome.get('crash', '')}"
    return f"({letters[_kind(outcome['refused'])]})"


def _is_wrong(outcome: Mapping[str, Any]) -> bool:
    return not outcome["right"] and "refused" not in outcome


def _letters(rows: Mapping[str, Any]) -> dict[str, str]:
    """Return the letter of each kind of refusal, the most frequent first."""
    counts: dict[str, int] = defaultdict(int)
    for row in rows.values():
        for unit in UNITS:
            if "refused" in row[unit]:
                counts[_kind(row[unit]["refused"])] += 1
    kinds = sorted(counts, key=lambda kind: (-counts[kind], kind))
    return {kind: _letter(number) for number, kind in enumerate(kinds)}


def _letter(number: int) -> str:
    return (chr(96 + number // 26) if number >= 26 else "") + chr(97 + number % 26)


def _kind(sentence: str) -> str:
    """Return the reason in a refusal, without figures and names of classes and weights."""
    found = re.search(r"(?:is not proven|\w+ with [^:]*|cannot be pruned in an? \w+): (.*?)(?:; prune|$)", sentence)
    reason = " ".join((found[1] if found else sentence).split())
    reason = re.sub(r"\d\.\d+e[-+]\d+", "...", reason)
    reason = re.sub(r"\(an? \w+", "(a network", reason)
    return re.sub(r"'[\w.]+\.conv', a \S+", "'...conv', a parametrised layer", reason)


def _first_line(error: str) -> str:
    return " ".join(error.split()).replace("|", "/").replace("`", "'")[:160]


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(read_runs(PAGE.with_suffix(".jsonl"))))


if __name__ == "__main__":
    main()
