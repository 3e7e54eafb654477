"""Text and figure of docs/does-it-pay.md, from the measurements of scripts/does_it_pay. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from orchestrator.planning.number_formats import milliseconds, ratio, ratio_interval
from orchestrator.views.report.figures.drawing import render
from orchestrator.views.report.figures.plot_axes import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
Cell = Mapping[str, Any]
PAYS = 1.05
"""A speed-up counts if its interval lies above this: some of hundreds of intervals lie above 1 by chance."""
HEAD = """\
# Does it pay?

<!-- Made by `scripts/does_it_pay` from docs/does-it-pay.json. -->

After this page you know which runtimes gain from zeros, on which layers, and how to measure your own machine:

    scripts/does_it_pay --anew

Zeros make a network smaller on paper. Whether they make it faster depends on the runtime, the pattern and the layer.
These are the results of one machine.

Each figure is the speed-up of the pruned layer over the dense one **on the same runtime**, with its 95% interval. Both
are timed in turns, in blocks that build both again. CSR is compared with PyTorch's dense layer. *unstructured* is
magnitude pruning by entry, *2:4* keeps the two largest of four consecutive weights, and *channels* is a layer whose
pruned outputs are removed, as by `pruning.shrink`. A pattern **pays** if the interval lies above {pays}x.
"""
NOTES = """\
## Not measured

- 2:4 on GPUs: PyTorch's semi-structured kernels and those of TensorRT need a GPU. No runtime on this page has kernels
  for 2:4 on a CPU.
- Layers quantised to int8. OpenVINO's sparse weight decompression is made for these, on processors with AMX. It is
  requested for all weights with zeros (`CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE`); fp32 and bf16 show its effect
  elsewhere.
- Whole networks: the figures are of single layers, without the operations between layers.
"""


def page(record: Record) -> str:
    """Return the page of a record."""
    cells = record["cells"]
    parts = [HEAD.format(pays=PAYS), "\n".join(_circumstances(record)), "## In short\n", "\n".join(_summary(cells))]
    parts += ["![Speed-up against weights removed, by runtime](does-it-pay.svg)\n"]
    parts += ["## Break-even by layer\n", "\n".join(_break_even(cells))]
    parts += ["## All figures\n", *("\n".join(_table(cells, runtime)) for runtime in _names(cells, "runtime"))]
    parts += ["## The runtime alone\n", "\n".join(_alone(cells)), NOTES]
    return "\n".join(parts)


def break_even(cells: Sequence[Cell]) -> float | None:
    """Return the smallest unstructured sparsity of a layer from which on every cell pays; None if there is none."""
    found = None
    for cell in sorted(cells, key=lambda cell: -float(cell["sparsity"])):
        if not pays(cell):
            break
        found = float(cell["sparsity"])
    return found


def pays(cell: Cell) -> bool:
    """Whether the interval of a speed-up lies above `PAYS`."""
    return bool(cell["low"] is not None and cell["low"] > PAYS)


def _circumstances(record: Record) -> Iterator[str]:
    known, loads = record["circumstances"], [cell["load"] for cell in record["cells"]]
    versions = ", ".join(f"{name} {release}" for name, release in known["versions"].items())
    yield (
        f"Measured on {record['date']} on {known['processor']}; {known['threads']} "
        f"thread{'s'[: known['threads'] > 1]}; {versions}; {known['blocks']} blocks in {known['seconds']:g} s or more "
        f"each; load average {min(loads):.1f} to {max(loads):.1f}."
    )
    if max(loads) > known["threads"] + 1:
        yield (
            "\n**The machine was not quiet**: other processes ran on it. They widen intervals, and change the ratios "
            "of layers that wait for memory or for a thread."
        )
    yield from (f"\n{runtime} was not measured: {reason}." for runtime, reason in known["absent"].items())
    yield ""


def _summary(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a table of runtimes by patterns: the layers on which it pays, and the geometric mean over layers."""
    shown = ("unstructured 50%", "unstructured 90%", "unstructured 95%", "2:4 50%", "channels 50%", "channels 75%")
    yield f"| runtime | {' | '.join(shown)} |"
    yield "|---" * (1 + len(shown)) + "|"
    for runtime, of_runtime in _groups(cells, "runtime"):
        row = []
        for pattern in shown:
            found = [cell for cell in of_runtime if _pattern(cell) == pattern]
            mean = math.exp(fmean(math.log(cell["speedup"]) for cell in found)) if found else 0.0
            row.append(f"{sum(map(pays, found))} of {len(found)}, {ratio(mean)}" if found else "")
        yield f"| {runtime} | {' | '.join(row)} |"
    yield "\nThe number of layers on which it pays, and the geometric mean of the speed-ups; empty: not measured.\n"


def _break_even(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a table of layers by runtimes: the smallest unstructured sparsity from which on it pays."""
    runtimes = _names(cells, "runtime")
    yield f"| layer | {' | '.join(runtimes)} |"
    yield "|---" * (1 + len(runtimes)) + "|"
    for layer, of_layer in _groups(cells, "layer"):
        row = []
        for runtime in runtimes:
            found = [cell for cell in of_layer if (cell["runtime"], cell["pattern"]) == (runtime, "unstructured")]
            level = break_even(found)
            tried = max((float(cell["sparsity"]) for cell in found), default=0.0)
            row.append(f"not up to {_percent(tried)}" if level is None else f"**{_percent(level)}**")
        yield f"| {layer} | {' | '.join(row)} |"
    yield "\nEach cell has the smallest tried sparsity from which on unstructured pruning pays.\n"


def _table(cells: Sequence[Cell], runtime: str) -> Iterator[str]:
    """Yield the table of one runtime: layers by patterns."""
    found = [cell for cell in cells if cell["runtime"] == runtime and cell["pattern"] != "dense"]
    patterns = list(dict.fromkeys(map(_pattern, found)))
    yield f"### {runtime}\n"
    yield f"| layer | dense ms | {' | '.join(patterns)} |"
    yield "|---" * (2 + len(patterns)) + "|"
    for layer, of_layer in _groups(found, "layer"):
        figures = {_pattern(cell): cell for cell in of_layer}
        dense = sorted(1000 * cell["dense_seconds"] for cell in of_layer)[len(of_layer) // 2]
        row = [_speedup(figures[pattern]) if pattern in figures else "" for pattern in patterns]
        yield f"| {layer} | {milliseconds(dense)} | {' | '.join(row)} |"
    yield ""


def _alone(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a table of each runtime's speed-up over PyTorch on dense layers."""
    found = [cell for cell in cells if cell["pattern"] == "dense"]
    runtimes = _names(found, "runtime")
    yield "The speed-up of each runtime over PyTorch on the dense layer, without any pruning.\n"
    yield f"| layer | {' | '.join(runtimes)} |"
    yield "|---" * (1 + len(runtimes)) + "|"
    for layer, of_layer in _groups(found, "layer"):
        figures = {cell["runtime"]: cell for cell in of_layer}
        row = [_speedup(figures[runtime]) if runtime in figures else "" for runtime in runtimes]
        yield f"| {layer} | {' | '.join(row)} |"
    yield ""


def _speedup(cell: Cell) -> str:
    text = ratio_interval(cell["speedup"], cell["low"], cell["high"])
    return f"**{text}**" if pays(cell) else text


def _pattern(cell: Cell) -> str:
    return f"{cell['pattern']} {_percent(cell['sparsity'])}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:g}%"


def _names(cells: Sequence[Cell], key: str) -> list[str]:
    return list(dict.fromkeys(str(cell[key]) for cell in cells))


def _groups(cells: Sequence[Cell], key: str) -> Iterator[tuple[str, list[Cell]]]:
    for name in _names(cells, key):
        yield name, [cell for cell in cells if cell[key] == name]


def figure(record: Record) -> bytes:
    """Return the figure as SVG: speed-up against weights / weights left, one panel for each runtime."""
    return render(lambda: _drawn(record["cells"]))["svg"]


def _drawn(cells: Sequence[Cell]) -> Figure:
    from matplotlib.figure import Figure

    runtimes = _names(cells, "runtime")
    across = 3
    down = -(-len(runtimes) // across)
    drawn = Figure(figsize=(3.1 * across, 2.6 * down + 1.0), layout="constrained")
    axes = drawn.subplots(down, across, sharex=True, sharey=True, squeeze=False).flatten()
    for axis, (runtime, of_runtime) in zip(axes, _groups(cells, "runtime"), strict=False):
        _panel(axis, runtime, of_runtime)
    for axis in axes[len(runtimes) :]:
        axis.set_visible(False)
    drawn.supxlabel("weights / weights left; solid: unstructured, dashed: channels, dotted: their ratio", fontsize=9)
    drawn.supylabel("speed-up over dense", fontsize=9)
    lines, names = axes[0].get_legend_handles_labels()
    drawn.legend(lines, names, loc="outside upper center", ncols=3, fontsize=7)
    return drawn


def _panel(axis: Axes, title: str, cells: Sequence[Cell]) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    for of in (axis.xaxis, axis.yaxis):
        of.set_major_formatter(lambda value, _: f"{value:g}")
    axis.plot([1, 32], [1, 32], color="grey", linewidth=0.8, linestyle=":")
    axis.axhline(1, color="grey", linewidth=0.8)
    for place, (layer, of_layer) in enumerate(_groups(cells, "layer")):
        for pattern, style in (("unstructured", "-"), ("channels", "--")):
            found = [cell for cell in of_layer if cell["pattern"] == pattern]
            axis.plot(
                [1 / (1 - cell["sparsity"]) for cell in found],
                [cell["speedup"] for cell in found],
                linestyle=style,
                color=COLOURS[place % len(COLOURS)],
                marker=MARKERS[place % len(MARKERS)],
                markersize=3,
                linewidth=1,
                label=layer if style == "-" else None,
            )
