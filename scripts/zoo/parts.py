"""Parts of the check of one network, in a process of its own: `python -m scripts.zoo.parts NAME FD PART...`.

Each part prints a JSON line to the file descriptor: its name, verdict, sentence, figures and seconds.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import linecache
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import pruning
from scripts.zoo.libraries import Built, build, called
from scripts.zoo.peer import by_torch_pruning

RIGHT, REFUSED, NOTHING, SLOW, LARGE = "right", "refused", "nothing to remove", "slow", "too large"
WHOLE, WRONG, TRACEBACK, ABSENT = "kept whole", "WRONG", "traceback", "not built"
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-7}
"""Largest difference of outputs from the masked network's, as a fraction of the largest output."""
SHARE = 0.9
"""Part of the matrix weights below which a call must say what stays dense."""
ASKED, MOST, GROUPS = 0.5, 0.95, 0.3
NO_MEMORY = "allocate memory"
"""Words of torch's error where memory ends."""
PACKAGE = Path(pruning.__file__).parent

Outcome = dict[str, Any]


def outcome(verdict: str, said: str = "", **figures: Any) -> Outcome:
    """Return the record of a part."""
    return {"verdict": verdict, "said": " ".join(said.split())[:400], **figures}


def groups_and_shrink(built: Built) -> Outcome:
    """Prune dependency groups, shrink, and compare on other inputs and other batch sizes."""
    model, example = copy.deepcopy(built.model), built.inputs(2, 0)
    plan = prune_groups(model, example, GROUPS, scope="layer", budget="channels")
    return shrunk(model, example, built, removed=plan.details["removed"])


def shrunk(
    model: nn.Module, example: Any, built: Built, calls: Iterable[tuple[str, Any]] | None = None, **figures: Any
) -> Outcome:
    """Shrink a masked network, and compare as `different` does."""
    smaller: Any = pruning.shrink(model, example)
    found = smaller.shrunk
    figures = {"before": found.before, "after": found.after, "form": found.form, **figures}
    if found.form == "unchanged":
        if any(NO_MEMORY in reason for reason in found.tried):
            raise MemoryError
        return outcome(WHOLE, "; ".join(found.tried), **figures)
    if wrong := different(model, smaller, built, calls):
        return outcome(*wrong, **figures)
    if found.after >= found.before:
        return outcome(WHOLE, f"nothing that was pruned could be removed: {dict(found.kept)}", **figures)
    if found.kept:
        figures["kept"] = sum(sum(reasons.values()) for reasons in found.kept.values())
    return outcome(RIGHT, **figures)


def prune_groups(model: nn.Module, example: Any, sparsity: float, **options: Any) -> Any:
    """Prune a fraction of all dependency groups, or half of what can be removed if that is less."""
    options |= {"unit": "group", "example": example}
    try:
        return pruning.prune(model, "magnitude", sparsity=sparsity, **options)
    except ValueError as error:
        _, found, rest = str(error).partition("it must be at most ")
        if not found:
            raise
    return pruning.prune(model, "magnitude", sparsity=float(rest.split()[0]) / 2, **options)


def entries(built: Built) -> Outcome:
    """Prune half of the entries, and compare the zeros of all matrices with what was asked."""
    model = copy.deepcopy(built.model)
    with told() as said:
        pruning.prune(model, "magnitude", sparsity=ASKED)
    pruning.remove_all(model)
    return _considered(built.model, model, said)


def layer_by_layer(built: Built) -> Outcome:
    """Prune by Wanda with calibration data, and compare the zeros of all matrices with what was asked."""
    model, batches = copy.deepcopy(built.model), [built.inputs(2, seed) for seed in (1, 2)]
    given = [each if isinstance(each, tuple | dict) else (each,) for each in batches]
    with told() as said:
        pruning.layerwise(model, "wanda", given, sparsity=ASKED)
    return _considered(built.model, model, said)


def sparse(built: Built) -> Outcome:
    """Prune 95% of the entries, run on the rest, and compare on other inputs and other batch sizes."""
    model, example = copy.deepcopy(built.model), built.inputs(2, 0)
    with told():
        pruning.prune(model, "magnitude", sparsity=MOST)
    faster: Any = pruning.to_sparse(model, example)
    found = faster.sparse
    chosen = sum(any(choice.kernel != "dense" for choice in layer.choices) for layer in found.layers)
    if wrong := different(model, faster, built):
        return outcome(*wrong)
    return outcome(RIGHT, found.reason, layers=len(found.layers), sparse=chosen)


def structural_peer(built: Built) -> Outcome:
    """Prune channels by Torch-Pruning."""
    return outcome(*by_torch_pruning(built))


PARTS: dict[str, Callable[[Built], Outcome]] = {
    "groups": groups_and_shrink,
    "entries": entries,
    "layerwise": layer_by_layer,
    "sparse": sparse,
    "torch-pruning": structural_peer,
}


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """Collect the warnings of a call."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


def _considered(whole: nn.Module, pruned: nn.Module, said: list[str]) -> Outcome:
    """Judge which part of the matrices a call considered, by their zeros, and what it said about the rest."""
    before, total, zeros = matrices(whole), 0, 0
    for name, tensor in matrices(pruned).items():
        if name in before:
            total += tensor.numel()
            zeros += int((tensor == 0).sum())
    share = zeros / max(1, total) / ASKED
    dense = [text for text in said if "dense" in text or "%" in text]
    if share >= SHARE or not total:
        return outcome(RIGHT, share=round(share, 4))
    if dense:
        return outcome(RIGHT, dense[0], share=round(share, 4))
    return outcome(
        WRONG, f"{100 - 100 * share:.0f}% of the matrices stay dense, and nothing says so", share=round(share, 4)
    )


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> each matrix, under the first name of a tied one; no embeddings, positions, scales and tokens."""
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    return {
        name: each
        for name, each in model.named_parameters()
        if each.ndim > 1 and max(each.shape) < each.numel() and each.shape[0] > 1 and id(each) not in tables
    }


def different(
    one: nn.Module, other: nn.Module, built: Built, calls: Iterable[tuple[str, Any]] | None = None
) -> tuple[str, str] | None:
    """Return a verdict and a sentence if two networks differ on other inputs; else None.

    A difference counts before a refusal.

    Args:
        one, other: the networks.
        built: the network that they come from.
        calls: (words, inputs) of each comparison; None: three batches of its inputs.
    """
    refused = None
    if calls is None:
        calls = ((f"a batch of {batch}", built.inputs(batch, seed)) for batch, seed in ((2, 5), (3, 6), (1, 7)))
    for words, given in calls:
        try:
            expected = outputs(one, given)
        except Exception:  # the network itself may take no such batch
            continue
        try:
            errors = [_difference(expected, outputs(other, given))]
            if errors[0] > TOLERANCE[torch.float32]:  # an order of close scores may change by rounding
                errors += _in_float64(one, other, given)
        except Exception as error:
            verdict, said = judged(error)
            if verdict != REFUSED:
                return WRONG, f"with {words}: {said}"
            refused = refused or (REFUSED, f"with {words}: {said}")
            continue
        if errors[-1] > TOLERANCE[torch.float64 if len(errors) > 1 else torch.float32]:
            shown = " and ".join(f"{error:.1e}" for error in errors)
            return WRONG, f"with {words}, outputs differ by {shown} of the largest"
    return refused


def _in_float64(one: nn.Module, other: nn.Module, given: Any) -> list[float]:
    """Return the difference in float64, if both networks run in it."""
    wide = tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, given
    )
    try:
        expected = outputs(copy.deepcopy(one).double(), wide)
        return [_difference(expected, outputs(copy.deepcopy(other).double(), wide))]
    except Exception:  # a forward may insist on float32
        return []


def outputs(model: nn.Module, given: Any) -> list[Tensor]:
    """Return all tensors that a network puts out."""
    torch.manual_seed(3)
    with torch.no_grad():
        found = called(model.eval(), copy.deepcopy(given))
    return [leaf.clone() for leaf in tree_leaves(_plain(found)) if isinstance(leaf, Tensor)]


def _plain(found: Any) -> Any:
    """Return outputs as containers that are known to pytree; caches of keys, or of states as in RWKV, are left out."""
    if isinstance(found, Mapping):
        cached = [name for name in found if "past_key" in name or "cache" in name or name == "state"]
        return [_plain(value) for name, value in found.items() if name not in cached]
    if isinstance(found, list | tuple):
        return [_plain(value) for value in found]
    return found


def _difference(expected: list[Tensor], given: list[Tensor]) -> float:
    """Return the largest difference, as a fraction of the largest value of the same output."""
    if [each.shape for each in expected] != [each.shape for each in given]:
        return float("inf")
    worst = 0.0
    for one, other in zip(expected, given, strict=True):
        if not one.numel():
            continue
        one, other = one.double(), other.double()
        finite = one.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return float("inf")
        scale = float(one[finite].abs().max()) if bool(finite.any()) else 0.0
        gap = float((one[finite] - other[finite]).abs().max()) if bool(finite.any()) else 0.0
        worst = max(worst, gap / (scale or 1.0))
    return worst


def judged(error: BaseException) -> tuple[str, str]:
    """Return the verdict and the sentence of an exception: a refusal is raised on purpose, by a line of the engine."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or NO_MEMORY in text:
        return LARGE, "needs more memory than the limit"
    if "no channels that can be removed" in text:
        return NOTHING, text
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    if PACKAGE in Path(last.filename).parents and line.startswith("raise"):
        return REFUSED, str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if PACKAGE in Path(frame.filename).parents]
    at = f" at {Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return TRACEBACK, f"{text.splitlines()[0][:300]}{at}"


def run(part: str, built: Built) -> Outcome:
    """Run a part, whatever it raises."""
    begin = time.perf_counter()
    try:
        found = PARTS[part](built)
    except Exception as error:
        found = outcome(*judged(error))
    gc.collect()
    return found | {"seconds": round(time.perf_counter() - begin, 1)}


def main(name: str, descriptor: str, *parts: str) -> None:
    """Build the network and run the parts, each written as a line when it ends."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with os.fdopen(int(descriptor), "w") as lines:

        def write(part: str, found: Outcome) -> None:
            print(json.dumps({"part": part, **found}), file=lines, flush=True)

        begin = time.perf_counter()
        try:
            built = build(name)
        except Exception as error:
            verdict, said = judged(error)
            write("build", outcome(LARGE if verdict == LARGE else ABSENT, said))
            return
        size = sum(each.numel() for each in built.model.parameters())
        seconds = round(time.perf_counter() - begin, 1)
        write("build", outcome(RIGHT, parameters=size, inputs=built.size, seconds=seconds))
        for part in parts:
            write(part, run(part, built))


if __name__ == "__main__":
    main(*sys.argv[1:])
