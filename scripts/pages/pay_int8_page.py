"""Sections of docs/does-it-pay.md on 8 bits. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from orchestrator.planning.number_formats import milliseconds, ratio
from orchestrator.planning.number_formats import percent as in_percent
from scripts.pages.pay_cells import (
    BEST_INT8,
    OPENVINO_VNNI,
    PYTORCH,
    SPARSE_INT8,
)
from scripts.pages.pay_tables import (
    PAYS,
    Record,
    Recorded,
    chosen,
    geometric_mean,
    groups,
    names,
    pattern,
    speedup,
    table,
)

AIMS: Mapping[str, float] = {
    "1x4 blocks 90%": 3.0,
    "1x4 blocks 80%": 2.0,
    "1x4 blocks 70%": 1.4,
    "16x4 blocks 90%": 3.0,
    "16x4 blocks 80%": 2.0,
    "16x4 blocks 70%": 1.4,
    "unstructured 90%": 1.2,
}
"""Pattern -> the speed-up over the best dense int8 runtime that the kernels are built for."""
TILES = "16x4 blocks"
NETWORK_AIM, PYTORCH_AIM, POINT = 1.8, 5.0, 0.01
"""The same for whole networks at 90% in blocks, over PyTorch, and the largest loss of accuracy by rounding."""
OFF = 0.2
"""Difference of outputs, relative to the largest, from which on a network's outputs are said to be off."""
UNMEASURED = """\
**Why not int8?** Dense int8 is not in the record of this page; `scripts/does_it_pay --int8` measures it.
"""
INT8_HEAD = """\
All of this section is in 8 bits, with inputs and outputs in float32, measured in turns on each machine.

- **Dense int8** is the format `onnx_int8` of the deployment: static quantisation by ONNX Runtime, weights with a scale
  for each channel, activations as unsigned bytes whose ranges are the smallest and the largest value on random inputs:
  32 of them, or those that are timed if they are more. OpenVINO reads the same graph, compiled for the size of its
  inputs; what stays in float it computes as it chooses, in bfloat16 on processors with AMX.
- **Sparse int8** is `pruning.to_sparse(model, x, int8=True, batches=...)`, calibrated on the same inputs. It takes
  the fastest kernel of each layer, in float32 or in 8 bits. It is made once for each pattern, and copied in each block.
- **1x4 blocks** are four consecutive inputs of an output (`unit="block"`), pruned by magnitude.
- **16x4 blocks** are four consecutive inputs of 16 outputs (`unit.outputs=16`), for processors with AMX.
"""
AMX = """\
**AMX** multiplies tiles of bytes. This processor has it, and OpenVINO uses it. ONNX Runtime has code for AMX, too, and
asks Linux for the tiles when it is imported; no setting keeps it from them.
{kernels}
`{runtime}` is OpenVINO in a process with ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI, which stands for servers with AVX-512 and
without AMX.
"""
WITHOUT_TILES = "The sparse kernels did without AMX when these figures were measured."
WITH_TILES = "The sparse kernels `columns_amx` and `pixels_amx` use it, where they are the fastest of a layer."
NO_AMX = "This processor has no AMX (`amx_int8`), which multiplies tiles of bytes and makes dense int8 faster.\n"
NETWORKS = """\
Networks as they are built, with their smallest blocks zero, without training: for the speed alone. Only MiniLM
has trained weights. The second table has how far rounding moves outputs: the largest difference, in percent of the
largest output, on the inputs that are timed. Dense int8 is compared with the dense network in PyTorch, and sparse int8
with the masked one. Where it is tens of percent, as for MiniLM in the static quantisation of all its operations, dense
int8 has the speed shown, and outputs that are of no use.
"""
TRAINED = """\
A sweep trains each network on enlarged digits, prunes 90% of its blocks once by magnitude, and fine-tunes it; one seed.
Accuracies are on the test split: of the dense network, of the masked one, and of both in 8 bits as the sweep's
deployments `onnx_int8` and `sparse_int8` measure them.
"""


def int8_answers(records: Sequence[Record]) -> Iterator[str]:
    """Yield the answer to the question why one should not take dense int8 instead of zeros, for each machine."""
    yield from map(int8_answer, records)
    if not records:
        yield UNMEASURED


def int8_answer(record: Record) -> str:
    """Return the answer on one machine."""
    wide = _wide(record["int8_layers"])
    dense = [max(_dense(wide, subject), key=lambda cell: float(cell["speedup"])) for subject in names(wide, "subject")]
    both = {
        against: geometric_mean(chosen(wide, pattern="1x4 blocks", sparsity=0.9, against=against))
        for against in (PYTORCH, BEST_INT8)
    }
    layers, networks = _means(wide), _means(record["int8_networks"])
    if max(layers.values()) <= PAYS:
        answer = "take dense int8."
    elif networks and max(networks.values()) <= PAYS:
        answer = "zeros in 8 bits are the fastest for single layers, and dense int8 for whole networks."
    else:
        answer = "take both."
    slower = _slower(chosen(record["int8_networks"], against=BEST_INT8))
    said = f" Dense int8 is faster than both for {' and '.join(slower)}." if slower else ""
    return (
        f"**Why not int8?** On a processor {machine(record)}, {answer} Dense int8 in the faster of ONNX Runtime and "
        f"OpenVINO runs layers of 64 channels or examples and more {ratio(geometric_mean(dense))} as fast as PyTorch "
        f"in float32, without training. With 90% zeros in blocks of four inputs, `pruning.to_sparse(..., int8=True)` "
        f"runs them {ratio(both[PYTORCH])} as fast as PyTorch, and {ratio(both[BEST_INT8])} as fast as dense int8 "
        f"(geometric means over {len(dense)} layers).{_in_tiles(layers)} The zeros need fine-tuning.{said} "
        "[Zeros and 8 bits](#zeros-and-8-bits) has all figures.\n" + _held_to_vnni(record)
    )


def machine(record: Record) -> str:
    """Return whether a record is of a machine with AMX, in words."""
    return "with AMX" if record["circumstances"]["amx"] else "without AMX"


def _means(cells: Sequence[Recorded]) -> dict[str, float]:
    """Return pattern -> the geometric mean of sparse int8 over the best dense int8 runtime."""
    sparse = [cell for cell in chosen(cells, against=BEST_INT8) if cell["pattern"] != "dense"]
    return {
        shown: geometric_mean([cell for cell in sparse if pattern(cell) == shown]) for shown in map(pattern, sparse)
    }


def _in_tiles(means: Mapping[str, float]) -> str:
    """Return the sentence on blocks of 16 outputs; empty if they were not measured."""
    found = [f"{ratio(mean)} at {shown.removeprefix(TILES).strip()}" for shown, mean in means.items() if TILES in shown]
    return f" With blocks of 16 outputs and four inputs it is {', '.join(found)} zeros." if found else ""


def _held_to_vnni(record: Record) -> str:
    """Return the sentences on OpenVINO without AMX; empty if it was not held to do without."""
    limited = record.get("vnni_networks", ())
    means = [
        ratio(geometric_mean(chosen(cells, pattern="1x4 blocks", against=against)))
        for cells, against in ((record["int8_networks"], BEST_INT8), (limited, OPENVINO_VNNI))
        if chosen(cells, pattern="1x4 blocks", against=against)
    ]
    if len(means) < 2:
        return ""
    return (
        f"AMX multiplies tiles of bytes, and OpenVINO uses it. Over whole networks, sparse int8 is {means[0]} as fast "
        f"as the best dense int8 runtime there, and {means[1]} as fast as OpenVINO held to the instructions of servers "
        "without AMX.\n"
    )


def aims(records: Sequence[Record]) -> Iterator[str]:
    """Yield tables of the speed over the best dense int8 runtime beside the aims, of layers and of networks."""
    if not records:
        return
    head = [f"{each['circumstances']['processor']}, {machine(each)}" for each in records]
    yield (
        f"In 8 bits, over {BEST_INT8}, the geometric mean over layers of 64 channels or examples and more, and whole "
        f"networks, which also aim at {PYTORCH_AIM:g}× the speed of PyTorch in float32:\n"
    )
    rows = [[shown, f"{aim:g}×", *(_layers_aim(each, shown, aim) for each in records)] for shown, aim in AIMS.items()]
    found = [_networks_aims(each) for each in records]
    rows += [
        [shown, f"{NETWORK_AIM}×, {PYTORCH_AIM:g}×", *(each.get(shown, "") for each in found)]
        for shown in dict.fromkeys(name for each in found for name in each)
    ]
    yield from table(["", "aim", *head], rows)


def _layers_aim(record: Record, shown: str, aim: float) -> str:
    """Return a pattern's mean over layers, and whether it reaches its aim; empty if it was not measured."""
    found = [cell for cell in chosen(_wide(record["int8_layers"]), against=BEST_INT8) if pattern(cell) == shown]
    if not found:
        return ""
    mean, slower = geometric_mean(found), _slower(found)
    held = [cell for cell in record.get("vnni_layers", ()) if cell["pattern"] != "dense" and pattern(cell) == shown]
    said = [
        f"{ratio(mean)}: {_met(mean >= aim)}",
        *([f"slower on {' and '.join(slower)}"] if slower else []),
        *([f"over OpenVINO without AMX {ratio(geometric_mean(held))}"] if held else []),
    ]
    return "; ".join(said)


def _networks_aims(record: Record) -> dict[str, str]:
    """Return network and pattern -> the speeds over the best dense int8 runtime and PyTorch, and whether both do."""
    said = {}
    for subject, cells in groups(record["int8_networks"], "subject"):
        for shown in dict.fromkeys(pattern(cell) for cell in cells if cell["sparsity"] == 0.9):
            over = {cell["against"]: cell for cell in cells if pattern(cell) == shown}
            if set(over) != {PYTORCH, BEST_INT8}:
                continue
            speeds = {against: float(cell["speedup"]) for against, cell in over.items()}
            met = speeds[BEST_INT8] >= NETWORK_AIM and speeds[PYTORCH] >= PYTORCH_AIM
            (dense,) = chosen(cells, pattern="dense", runtime=over[BEST_INT8]["dense_runtime"])
            off = f"; dense int8 is off by {_rounded_percent(dense['off'])}" if dense["off"] > OFF else ""
            figures = f"{ratio(speeds[BEST_INT8])}, {ratio(speeds[PYTORCH])}"
            said[f"{subject}, {shown}"] = f"{figures}: {_met(met)}{off}"
    return said


def _rounded_percent(fraction: float) -> str:
    return f"{100 * fraction:.2g}%"


def _met(met: bool) -> str:
    return "reached" if met else "**missed**"


def int8_section(record: Record) -> Iterator[str]:
    """Yield the tables of layers, of networks, and of networks that a sweep trains."""
    kernels = WITH_TILES if any(TILES in shown for shown in _means(record["int8_layers"])) else WITHOUT_TILES
    yield AMX.format(runtime=OPENVINO_VNNI, kernels=kernels) if record["circumstances"]["amx"] else NO_AMX
    limited_layers, limited_networks = record.get("vnni_layers", ()), record.get("vnni_networks", ())
    yield f"### Layers in 8 bits {machine(record)}\n"
    yield from _dense_table("layer", [*record["int8_layers"], *limited_layers])
    yield from _over("layer", record["int8_layers"], limited_layers)
    yield f"### Networks in 8 bits {machine(record)}\n"
    yield NETWORKS
    yield from _dense_table("network", [*record["int8_networks"], *limited_networks])
    yield from _differences(record["int8_networks"])
    yield from _over("network", record["int8_networks"], limited_networks)
    yield f"### Networks trained by a sweep, in 8 bits {machine(record)}\n"
    yield TRAINED
    yield from _trained(record["int8_trained"])


def _dense_table(title: str, cells: Sequence[Recorded]) -> Iterator[str]:
    """Yield a table of dense int8 runtimes over PyTorch in float32."""
    dense = chosen(cells, pattern="dense")
    runtimes, rows = names(dense, "runtime"), []
    yield f"The speed-up of dense int8 over PyTorch in float32, without any pruning, for each {title}.\n"
    for subject, found in groups(dense, "subject"):
        figures = {cell["runtime"]: cell for cell in found}
        times = milliseconds(1000 * found[0]["dense_seconds"])
        rows.append([subject, times, *(speedup(figures[each]) if each in figures else "" for each in runtimes)])
    yield from table([title, "PyTorch ms", *runtimes], rows)


def _differences(cells: Sequence[Recorded]) -> Iterator[str]:
    """Yield a table of the largest differences of outputs, by runtime."""
    runtimes, rows = names(cells, "runtime"), []
    for subject, found in groups(cells, "subject"):
        figures = {cell["runtime"]: _rounded_percent(cell["off"]) for cell in found}
        rows.append([subject, *(figures.get(each, "") for each in runtimes)])
    yield from table(["network", *runtimes], rows)


def _over(title: str, cells: Sequence[Recorded], limited: Sequence[Recorded]) -> Iterator[str]:
    """Yield tables of sparse int8 over the best dense int8 runtime, over OpenVINO without AMX, and over PyTorch."""
    for against, found in ((BEST_INT8, cells), (OPENVINO_VNNI, limited), (PYTORCH, cells)):
        sparse = [cell for cell in chosen(found, against=against) if cell["pattern"] != "dense"]
        if not sparse:
            continue
        yield f"The speed-up of {SPARSE_INT8} over {against}.\n"
        patterns, rows = sorted(set(map(pattern, sparse))), []
        for subject, of_subject in groups(sparse, "subject"):
            figures = {pattern(cell): speedup(cell) for cell in of_subject}
            times = milliseconds(1000 * of_subject[0]["dense_seconds"])
            first = [subject, of_subject[0]["dense_runtime"], times]
            rows.append([*first, *(figures.get(each, "") for each in patterns)])
        yield from table([title, "dense runtime", "dense ms", *patterns], rows)


def _trained(cells: Sequence[Recorded]) -> Iterator[str]:
    """Yield the table of trained networks with their accuracies, and the commands that train them."""
    rows = []
    for subject, found in groups(chosen(cells, runtime=SPARSE_INT8), "subject"):
        over = {cell["against"]: cell for cell in found}
        one = over[PYTORCH]
        shown = [in_percent(one[f"accuracy_{name}"]) for name in ("dense", "dense_int8", "pruned", "sparse_int8")]
        loss = round(one["accuracy_pruned"] - one["accuracy_sparse_int8"], 6)
        figures = [_met(loss <= POINT), speedup(one), speedup(over[BEST_INT8]), over[BEST_INT8]["dense_runtime"]]
        rows.append([subject, *shown, *figures])
    accuracies = ["dense", "dense int8", "masked", "sparse int8", "within a point"]
    yield from table(["network", *accuracies, f"over {PYTORCH}", f"over {BEST_INT8}", "best dense int8 runtime"], rows)
    yield "The commands, in build/does_it_pay:\n"
    yield from (f"    {text}" for text in names(cells, "command"))
    yield ""


def _wide(cells: Sequence[Recorded]) -> list[Recorded]:
    return chosen(cells, wide=True)


def _dense(cells: Sequence[Recorded], subject: str) -> list[Recorded]:
    return chosen(cells, subject=subject, pattern="dense")


def _slower(cells: Sequence[Recorded]) -> list[str]:
    """Return the layers or networks on which the pruned one is slower in all patterns, with 95% confidence."""
    by_subject = groups([cell for cell in cells if cell["pattern"] != "dense"], "subject")
    return [subject for subject, found in by_subject if all(float(cell["high"]) < 1 for cell in found)]
