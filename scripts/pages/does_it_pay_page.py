"""Text of docs/does-it-pay.md, from the measurements of scripts/does_it_pay. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.planning.number_formats import milliseconds, ratio
from scripts.pages.pay_cells import BEST, PYTORCH, SPARSE
from scripts.pages.pay_int8_page import INT8_HEAD, aims, int8_answers, int8_section, machine
from scripts.pages.pay_networks_page import network_sentences, networks_section, trained_section
from scripts.pages.pay_tables import (
    PAYS,
    Record,
    Recorded,
    chosen,
    geometric_mean,
    groups,
    names,
    pattern,
    pays,
    percent,
    speedup,
    table,
)

HEAD = """\
# Does it pay?

<!-- Made by `scripts/does_it_pay` from the records docs/does-it-pay*.json. -->

After this page you know which runtimes gain from zeros, on which layers and networks, and how to measure your own
machine:

    scripts/does_it_pay --anew

{int8}
Zeros make a network smaller on paper. Whether they make it faster depends on the runtime, the pattern and the layer.
These are the results of single machines. [Make a pruned network faster](how-to/sparse.md) shows how to use the sparse
kernels.

Each figure is a speed-up with its 95% interval. The pruned and the dense layer are timed in turns, in blocks that build
both again. A runtime for dense layers is compared with **itself** on the dense layer; CSR and the sparse kernels are
compared with PyTorch's dense layer. In PyTorch, `torch.compile` and the sparse kernels, the timed call is that of a
module under `torch.no_grad()`; the sparse kernel is chosen anew in each block, before the timing. *unstructured* is
magnitude pruning by entry, *2:4* keeps the two largest of four consecutive weights, and *channels* is a layer whose
pruned outputs are removed, as by `pruning.shrink`. A pattern **pays** if the interval lies above {pays}x.
"""
NOTES = """\
## Not measured

- 2:4 on GPUs: PyTorch's semi-structured kernels and those of TensorRT need a GPU. No dense runtime on this page has
  kernels for 2:4 on a CPU; the sparse kernels skip its zeros like any others.
- Zeros of int8 weights in OpenVINO. Its sparse weight decompression is made for these, on processors with AMX. It is
  requested for all weights with zeros (`CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE`); fp32 and bf16 show its effect
  elsewhere.
- The accuracy of MiniLM in 8 bits: its networks here are for the speed alone. Another page has [how far its embeddings
  move](how-to/sparse.md#ranges-and-accuracy).
"""
SHOWN = (
    *(f"unstructured {level}%" for level in (50, 70, 80, 90, 95)),
    *("2:4 50%", "channels 50%", "channels 75%"),
)


PARTS, INT8_PARTS = ("layers", "networks", "trained"), ("int8_layers", "int8_networks", "int8_trained")


def page(record: Record, int8: Sequence[Record]) -> str:
    """Return the page of the record in float32, and of those in 8 bits."""
    cells, networks = record["layers"], record["networks"]
    own = [cell for cell in cells if cell["against"] != BEST]
    answer = "\n".join(int8_answers(int8))
    parts = [HEAD.format(pays=PAYS, int8=answer), "\n".join(_circumstances(record, PARTS)), "## In short\n"]
    parts += [*_bars(cells, networks), "", *aims(int8)]
    parts += ["\n".join(_summary(own)), "![Speed-up against weights removed, by runtime](does-it-pay.svg)\n"]
    parts += ["## Break-even by layer\n", "\n".join(_break_even(own))]
    parts += ["## Against the best dense runtime\n", "\n".join(_against_best(cells))]
    parts += ["## Whole networks\n", "\n".join(networks_section(networks))]
    parts += ["## Networks trained by a sweep\n", "\n".join(trained_section(record["trained"]))]
    parts += ["## Zeros and 8 bits\n", INT8_HEAD] if int8 else []
    for each in int8:
        parts += [f"## In 8 bits {machine(each)}\n", "\n".join(_circumstances(each, INT8_PARTS))]
        parts += ["\n".join(int8_section(each))]
    parts += [
        "## All figures of layers\n",
        *("\n".join(_of_runtime(own, runtime)) for runtime in names(own, "runtime")),
    ]
    parts += ["## The runtime alone\n", "\n".join(_alone(own)), NOTES]
    return "\n".join(parts)


def break_even(cells: Sequence[Recorded]) -> float | None:
    """Return the smallest unstructured sparsity of a layer from which on every cell pays; None if there is none."""
    found = None
    for cell in sorted(cells, key=lambda cell: -float(cell["sparsity"])):
        if not pays(cell):
            break
        found = float(cell["sparsity"])
    return found


def _circumstances(record: Record, parts: Sequence[str]) -> Iterator[str]:
    known = record["circumstances"]
    loads = [cell["load"] for part in parts for cell in record[part]]
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
    if "compiles" in known:
        yield f"\ntorch.compile compiles {known['compiles']}; other runtimes build layers again in each block."
    yield from (f"\n{name} was not measured: {reason}." for name, reason in known["absent"].items())
    yield ""


def _bars(cells: Sequence[Recorded], networks: Sequence[Recorded]) -> Iterator[str]:
    """Yield the figures of the sparse kernels over all layers, and the slowest network, as sentences."""
    kernels = chosen(cells, runtime=SPARSE, pattern="unstructured")
    if not kernels:
        return
    means = {
        (level, against): ratio(geometric_mean(chosen(kernels, sparsity=level, against=against)))
        for level in (0.7, 0.9)
        for against in (PYTORCH, BEST)
    }
    layers = len(names(kernels, "subject"))
    yield (
        f"- The sparse kernels run unstructured layers with 90% zeros {means[0.9, PYTORCH]} as fast as PyTorch runs "
        f"the dense ones, and {means[0.9, BEST]} as fast as {BEST} of each layer (geometric means over {layers} "
        f"layers). With 70% zeros these are {means[0.7, PYTORCH]} and {means[0.7, BEST]}."
    )
    counts = [sum(map(pays, chosen(kernels, sparsity=0.8, against=against))) for against in (PYTORCH, BEST)]
    yield (
        f"- With 80% zeros they pay on {counts[0]} of {layers} layers over PyTorch, and on {counts[1]} of {layers} "
        f"over {BEST}."
    )
    yield from network_sentences(networks)


def _summary(cells: Sequence[Recorded]) -> Iterator[str]:
    """Yield a table of runtimes by patterns: the layers on which it pays, and the geometric mean over layers."""
    rows = []
    for runtime, of_runtime in groups(cells, "runtime"):
        row = [runtime]
        for shown in SHOWN:
            found = [cell for cell in of_runtime if pattern(cell) == shown]
            row.append(f"{sum(map(pays, found))} of {len(found)}, {ratio(geometric_mean(found))}" if found else "")
        rows.append(row)
    yield from table(["runtime", *SHOWN], rows)
    yield "The number of layers on which it pays, and the geometric mean of the speed-ups; empty: not measured.\n"


def _break_even(cells: Sequence[Recorded]) -> Iterator[str]:
    """Yield a table of layers by runtimes: the smallest unstructured sparsity from which on it pays."""
    runtimes, rows = names(cells, "runtime"), []
    for layer, of_layer in groups(cells, "subject"):
        row = [layer]
        for runtime in runtimes:
            found = chosen(of_layer, runtime=runtime, pattern="unstructured")
            level = break_even(found)
            tried = max((float(cell["sparsity"]) for cell in found), default=0.0)
            row.append(f"not up to {percent(tried)}" if level is None else f"**{percent(level)}**")
        rows.append(row)
    yield from table(["layer", *runtimes], rows)
    yield "Each cell has the smallest tried sparsity from which on unstructured pruning pays.\n"


def _against_best(cells: Sequence[Recorded]) -> Iterator[str]:
    """Yield a table of the sparse kernels against the fastest dense runtime of each layer."""
    yield (
        "The speed-up of the sparse kernels over the fastest of PyTorch, torch.compile, ONNX Runtime and OpenVINO fp32 "
        "on the dense layer, timed in turns with that runtime.\n"
    )
    yield from _layers(chosen(cells, against=BEST), "best dense runtime")


def _of_runtime(cells: Sequence[Recorded], runtime: str) -> Iterator[str]:
    """Yield the table of one runtime: layers by patterns."""
    yield f"### {runtime}\n"
    yield from _layers([cell for cell in chosen(cells, runtime=runtime) if cell["pattern"] != "dense"])


def _layers(cells: Sequence[Recorded], runtime: str = "") -> Iterator[str]:
    """Yield a table of layers by patterns; `runtime` is the title of a column with the dense runtime."""
    patterns = list(dict.fromkeys(map(pattern, cells)))
    rows = []
    for layer, of_layer in groups(cells, "subject"):
        figures = {pattern(cell): cell for cell in of_layer}
        dense = sorted(1000 * cell["dense_seconds"] for cell in of_layer)[len(of_layer) // 2]
        first = [layer, *[of_layer[0]["dense_runtime"]][: bool(runtime)], milliseconds(dense)]
        rows.append([*first, *(speedup(figures[each]) if each in figures else "" for each in patterns)])
    yield from table(["layer", *[runtime][: bool(runtime)], "dense ms", *patterns], rows)


def _alone(cells: Sequence[Recorded]) -> Iterator[str]:
    """Yield a table of each runtime's speed-up over PyTorch on dense layers."""
    found = chosen(cells, pattern="dense")
    runtimes, rows = names(found, "runtime"), []
    yield "The speed-up of each runtime over PyTorch on the dense layer, without any pruning.\n"
    for layer, of_layer in groups(found, "subject"):
        figures = {cell["runtime"]: cell for cell in of_layer}
        rows.append([layer, *(speedup(figures[each]) if each in figures else "" for each in runtimes)])
    yield from table(["layer", *runtimes], rows)
