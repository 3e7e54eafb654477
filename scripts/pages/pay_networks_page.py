"""Sections of docs/does-it-pay.md on whole networks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.planning.number_formats import milliseconds
from orchestrator.planning.number_formats import percent as in_percent
from scripts.pages.pay_cells import BEST, PYTORCH
from scripts.pages.pay_tables import Recorded, chosen, groups, names, pays, percent, speedup, table

NETWORKS = """\
Each network is pruned as it is built, by `pruning.prune(network, "magnitude", sparsity=...)`: magnitude pruning,
the same sparsity in each layer. Only MiniLM has trained weights. These masks are for the speed alone; the next section
has accuracies. `pruning.to_sparse` chooses the kernels once for each network and sparsity, for both batch sizes. The
network of 0% shows what `to_sparse` does without zeros: it folds batch normalisations, or returns a copy.
"""
DENSE = """\
The speed-up of each dense runtime over PyTorch, without any pruning. ONNX Runtime and OpenVINO run the graphs of
`python -m orchestrator.export`, which take batches of any size.
"""
TRAINED = """\
A sweep trains each network on digits enlarged to its inputs, prunes it once by magnitude, and fine-tunes it as long as
it was trained; one seed. Accuracies are on the test split, speed-ups with 95% intervals.
"""


def network_sentences(cells: Sequence[Recorded]) -> Iterator[str]:
    """Yield how many networks gain at 90%, and the lowest speed-up at any sparsity, as sentences."""
    pruned = chosen(cells, pattern="unstructured")
    at_90 = [chosen(pruned, sparsity=0.9, against=against) for against in (PYTORCH, BEST)]
    if not all(at_90):
        return
    counts = [f"{sum(map(pays, found))} of {len(found)}" for found in at_90]
    yield (
        f"- Whole networks with 90% zeros: they pay in {counts[0]} cases (networks and batch sizes) over PyTorch, and "
        f"in {counts[1]} over {BEST}."
    )
    found = min(chosen(pruned, against=PYTORCH), key=lambda cell: float(cell["speedup"]))
    yield (
        f"- The lowest speed-up of a network over PyTorch, at any sparsity, is {speedup(found)}: {found['subject']}, "
        f"at {percent(found['sparsity'])}."
    )


def networks_section(cells: Sequence[Recorded]) -> Iterator[str]:
    """Yield the tables of whole networks: over PyTorch, over the best dense runtime, and the dense runtimes."""
    yield NETWORKS
    for against, title in ((PYTORCH, "Over PyTorch"), (BEST, f"Over {BEST}")):
        yield f"### {title}\n"
        yield from _by_sparsity(chosen(cells, pattern="unstructured", against=against))
    yield "### Dense runtimes\n"
    yield DENSE
    dense = chosen(cells, pattern="dense")
    runtimes, rows = names(dense, "runtime"), []
    for subject, found in groups(dense, "subject"):
        figures = {cell["runtime"]: cell for cell in found}
        rows.append([subject, *(speedup(figures[each]) if each in figures else "" for each in runtimes)])
    yield from table(["network", *runtimes], rows)


def _by_sparsity(cells: Sequence[Recorded]) -> Iterator[str]:
    levels = sorted({cell["sparsity"] for cell in cells})
    rows = []
    for subject, found in groups(cells, "subject"):
        figures = {cell["sparsity"]: speedup(cell) for cell in found}
        dense = sorted(1000 * cell["dense_seconds"] for cell in found)[len(found) // 2]
        first = [subject, found[0]["dense_runtime"], milliseconds(dense)]
        rows.append([*first, *(figures.get(level, "") for level in levels)])
    yield from table(["network", "dense runtime", "dense ms", *map(percent, levels)], rows)


def trained_section(cells: Sequence[Recorded]) -> Iterator[str]:
    """Yield the table of trained networks, and the commands that train them."""
    yield TRAINED
    rows = []
    pruned = chosen(cells, pattern="unstructured")
    for subject, found in groups(pruned, "subject"):
        over = {cell["against"]: cell for cell in found}
        one = over[PYTORCH]
        accuracies = [in_percent(one[f"accuracy_{name}"]) for name in ("dense", "pruned")]
        figures = [percent(one["sparsity"]), *accuracies, speedup(over[PYTORCH]), speedup(over[BEST])]
        rows.append([subject, *figures, over[BEST]["dense_runtime"]])
    head = ["network", "sparsity", "accuracy, dense", "accuracy, pruned", f"over {PYTORCH}", f"over {BEST}"]
    yield from table([*head, "best dense runtime"], rows)
    yield "The commands, in build/does_it_pay:\n"
    yield from (f"    {text}" for text in names(pruned, "command"))
    yield ""
