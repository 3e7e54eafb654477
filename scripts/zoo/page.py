"""Results of the zoo, and the text of docs/reference/architectures.md. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = ("groups", "entries", "layerwise", "sparse", "torch-pruning")
"""Parts in the order in which they run."""
VERDICTS = (
    *("right", "refused", "kept whole", "nothing to remove", "slow", "too large", "WRONG", "traceback"),
    "not built",
)
HEAD = """\
# Stock architectures

<!-- Made by `python -m scripts.zoo` from architectures.jsonl. -->

After this page you know which stock networks the engine prunes, and what it answers where it cannot. All weights are
random. Each network is built in the smallest size of its kind and goes through five parts, each in a process of its own
with a limit of time and memory. torchvision's detectors scale their images to 64 pixels in place of 800 (those of
`ssd` to their own size), two-stage ones keep 100 proposals, and RetinaNet and FCOS put out boxes with scores from
0.001, because those of random weights are low. The parts:

- **groups**: `prune` removes 30% of the channels of all dependency groups (`unit="group"`), or half of what can be
  removed if that is less, and `shrink` builds the smaller network. It must be smaller, and compute the outputs of the
  masked one, on other inputs and for batches of 1, 2 and 3: within 1e-4 of the largest output in float32, or, where an
  order of close scores changes by rounding, 1e-7 in float64.
- **entries**: `prune` removes half of all entries by magnitude. The figure is the share of the matrices' entries that
  the call considered; embeddings, positions and scales are no matrices. Below 90% the call must say what stays dense.
- **layerwise**: the same for `layerwise` with Wanda, which leaves the output head dense.
- **sparse**: `to_sparse` after `prune` has removed 95% of the entries, compared as in *groups*. The figure is the
  number of layers that run on a sparse kernel.
- **Torch-Pruning** removes 30% of the channels of its groups. It is told which layers make the outputs and how many
  heads a layer has; forwards are not rewritten for it, as some of its examples do. It is right if its network is
  smaller and its first output has the same shape for batches of 2 and 3. Its outputs are not compared, so the same word
  asks less of it than of *groups*.

The verdicts: **right**; **refused**, by a sentence; **kept whole**, when `shrink` returns the network unchanged and
says why; **nothing to remove**; **slow** or **too large** for the limits; **WRONG**, which is also a network that stays
dense in silence; **traceback**, an error that the engine did not raise on purpose; **not built**, when the script found
no small network or no inputs for it, which says nothing about the engine.
"""
RANDOM_PARTS = ("shrink", "graph", "sparse")
"""Parts of random networks."""
RANDOM_SEEDS = 300
"""Seeds of a whole run."""
RANDOM_HEAD = """\
## Random networks

Each seed of `python -m scripts.zoo.random_runs` draws a network of 3 to 10 layers that people write: convolutions,
norms, gates, slices, shuffles, windows, attention, recurrent layers, experts, branches on sizes and dtypes, tensors
made in the forward, shared and tied weights, several inputs and outputs. It goes through three parts:

- **shrink**: `prune` removes 20 to 60% of channels, parameters or multiply-accumulates in dependency groups, and
  `shrink` gets an example of one item.
- **graph**: the same, where the smaller network must be the traced graph.
- **sparse**: `prune` removes 80 to 95% of the entries, or 2 of 4, or blocks of 4, and `to_sparse` gets an example of
  one item, with a sparse kernel drawn for each layer; another process loads what `torch.save` wrote.

Each is compared with the masked network as above, for batches of 1, 2, 3 and 5, and on other sizes and dtypes that the
masked network takes. A network that refuses one of them by a sentence counts as refused.
"""


@dataclass
class Results:
    """Results of a file: name of a network -> its parts with their outcomes; library -> number of its networks."""

    networks: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)


def read(file: Path) -> Results:
    """Read a file of results, in which the last outcome of a part counts; a line that a kill cut off is left out."""
    found = Results()
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if "library" in result:
            found.lengths[result["library"]] = result["networks"]
            continue
        earlier = found.networks.get(result["name"], {"parts": {}})["parts"]
        found.networks[result["name"]] = result | {"parts": earlier | result["parts"]}
    return found


def read_random(file: Path) -> dict[int, Any]:
    """Read a file of records of random networks: seed -> its last record."""
    lines = file.read_text().splitlines() if file.exists() else ()
    return {record["seed"]: record for record in map(json.loads, lines)}


def page(results: Results, random: Mapping[int, Any] | None = None) -> str:
    """Return the page.

    Args:
        results: results of stock networks.
        random: seed -> record of each random network.
    """
    libraries: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, result in sorted(results.networks.items()):
        libraries[name.partition("/")[0]][name.partition("/")[2]] = result
    parts = [HEAD, *_circumstances(results), "## In short\n", "\n".join(_summary(libraries, results.lengths)), ""]
    for library, networks in libraries.items():
        parts += [f"## {library}\n", "\n".join(_table(networks)), ""]
    parts += ["## What was said\n", *_sentences(results.networks, ("build", *PARTS))]
    return "\n".join([*parts, *_random(random or {})]).rstrip() + "\n"


def _random(records: Mapping[int, Any]) -> Iterator[str]:
    """Yield the section on random networks."""
    if not records:
        return
    yield RANDOM_HEAD
    releases = ", ".join(sorted({record["torch"] for record in records.values()}))
    commits = {record["commit"] for record in records.values()}
    states = ", by several states of the engine" if len(commits) > 1 else ""
    others = "" if len(records) >= RANDOM_SEEDS else f" of {RANDOM_SEEDS}; the others have no result yet"
    yield f"{len(records)} seeds{others}, with torch {releases}{states}.\n"
    yield _row("part", "networks", *VERDICTS[:-1])
    yield _row("---", *["---:"] * len(VERDICTS))
    for part in RANDOM_PARTS:
        found = Counter(record["parts"][part]["verdict"] for record in records.values() if part in record["parts"])
        yield _row(part, sum(found.values()), *(found[each] or "" for each in VERDICTS[:-1]))
    yield ""
    yield from _sentences({str(seed): records[seed] for seed in sorted(records)}, RANDOM_PARTS)


def _circumstances(results: Results) -> Iterator[str]:
    """Yield the releases and dates of the results, and what has no result."""
    dates = sorted({result["date"] for result in results.networks.values()})
    releases = {name: each for result in results.networks.values() for name, each in result["versions"].items()}
    if dates:
        yield (
            f"Made {dates[0] if len(dates) == 1 else f'from {dates[0]} to {dates[-1]}'} with "
            f"{', '.join(f'{name} {release}' for name, release in releases.items())}.\n"
        )
    outcomes = [outcome for result in results.networks.values() for outcome in result["parts"].values()]
    commits = {outcome.get("commit", "") for outcome in outcomes}
    if len(commits) != 1 or "" in commits:
        yield (
            "The engine changed between the runs, and other programs ran on the machine: an outcome may be that of an "
            "earlier engine, and a slow part may be fast elsewhere.\n"
        )
    total = sum(results.lengths.values())
    whole = sum(set(PARTS) <= set(each["parts"]) or not _is_built(each) for each in results.networks.values())
    if whole < total:
        yield (
            f"**This is a partial run**: {whole} of {total} networks have gone through all parts; the others have no "
            "result yet, or only one of some parts. Counts are of the networks that have a result.\n"
        )


def _is_built(result: Mapping[str, Any]) -> bool:
    return bool(result["parts"]["build"]["verdict"] == "right")


def _summary(libraries: Mapping[str, Mapping[str, Any]], lengths: Mapping[str, int]) -> Iterator[str]:
    """Yield a table: of each library and part, the number of networks with each verdict."""
    yield _row("library", "part", "networks", "run", *VERDICTS)
    yield _row("---", "---", *["---:"] * (2 + len(VERDICTS)))
    for library, networks in libraries.items():
        for part in ("build", *PARTS):
            found = Counter(each["parts"][part]["verdict"] for each in networks.values() if part in each["parts"])
            if part == "build" and set(found) <= {"right"}:
                continue
            whole = lengths.get(library, len(networks))
            yield _row(library, part, whole, sum(found.values()), *(found[each] or "" for each in VERDICTS))


def _table(networks: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of one library."""
    yield _row("network", "parameters", *PARTS)
    yield _row("---", "---:", *["---"] * len(PARTS))
    for name, result in networks.items():
        parts = result["parts"]
        if not _is_built(result):
            yield _row(name, "", parts["build"]["verdict"], *[""] * (len(PARTS) - 1))
            continue
        cells = (_cell(parts[part]) if part in parts else "" for part in PARTS)
        yield _row(name, f"{parts['build']['parameters']:,}", *cells)


def _cell(outcome: Mapping[str, Any]) -> str:
    """Return a verdict with its figure."""
    verdict = str(outcome["verdict"])
    if "share" in outcome:
        said = " said" if verdict == "right" and outcome["said"] else ""
        return f"{verdict}, {100 * min(1, outcome['share']):.0f}%{said}"
    if "sparse" in outcome:
        return f"{verdict}, {outcome['sparse']} of {outcome['layers']}"
    if verdict == "right" and "after" in outcome:
        form = "" if outcome["form"] == "module" else ", graph"
        return f"{verdict}, {100 * (1 - outcome['after'] / outcome['before']):.0f}% fewer{form}"
    return verdict


def _sentences(networks: Mapping[str, Any], parts: Sequence[str]) -> Iterator[str]:
    """Yield a sentence of each kind, with the networks about which such a one was said."""
    for part in parts:
        said: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
        for name, result in sorted(networks.items()):
            outcome = result["parts"].get(part, {"said": ""})
            if outcome["said"] and (part, outcome["verdict"]) != ("torch-pruning", "right"):
                said[outcome["verdict"], _kind(outcome["said"])].append((name, outcome["said"]))
        if said:
            yield f"### {part}\n"
        for (verdict, _), found in sorted(said.items(), key=lambda item: (item[0][0], -len(item[1]))):
            yield f"- {verdict}: {', '.join(name for name, _ in found)}\n\n        {found[0][1]}\n"


def _kind(sentence: str) -> str:
    """Return what sentences about several networks share: no numbers, no names of classes and weights."""
    return re.sub(r"\b[A-Z]\w*[a-z]\w*[A-Z]\w*|'[^']*'|\S*\.\S+|[\d.e+-]+", "", sentence)[:120]


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"
