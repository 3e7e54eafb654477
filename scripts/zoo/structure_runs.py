"""Smaller transformers by structure: small random networks of all model types, pruned, made smaller, saved and loaded.

    python -m scripts.zoo.structure_runs causal,masked results.jsonl
    python -m scripts.zoo.structure_runs causal results.jsonl 'causal-gemma*'      # these again

writes a line for each network that is not in the file yet; the last one of a name counts. It says for `layer`, `mlp`
and `heads` whether masked, smaller and loaded networks compute the same to 1e-4, or why the unit is refused. Networks
that normalise after additions are right where loaded and smaller ones are equal, and their reports say that the masked
one differs.
"""

from __future__ import annotations

import copy
import json
import signal
import sys
import tempfile
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import pruning
from pruning.choices.axes import FamilyUnit
from pruning.dependencies.families.resizing import difference
from pruning.graph.tracing import quiet
from scripts.zoo import plain_operators as plain_operators  # before torchvision
from scripts.zoo.__main__ import current_commit
from scripts.zoo.small_transformers import build_small, names
from scripts.zoo.structure_page import UNITS, read_runs

SPARSITY, TOLERANCE, SECONDS = 0.4, 1e-4, 150


def run_one(name: str) -> dict[str, Any]:
    """Return what came of each unit of a network."""
    try:
        model, inputs, _ = build_small(name)
    except RuntimeError as error:
        return {"name": name, "error": str(error)[:200]}
    generator = torch.Generator().manual_seed(5)
    computed = tuple(getattr(model, "_keys_to_ignore_on_save", None) or ())
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if own.endswith(computed) and computed:  # which the class sets when it loads
                continue
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    if lost := lost_by_stock(model):
        return {"name": name, "error": f"{type(model).__name__} does not load what it saves: {lost}"}
    known = {"name": name, "class": type(model).__name__, "transformers": transformers.__version__}
    known["commit"] = current_commit()
    return known | {unit: run_unit(copy.deepcopy(model), inputs(2, 1), unit) for unit in UNITS}


def lost_by_stock(model: Any) -> str:
    """Return a tensor that the stock class saves and does not load, whatever was pruned; empty: it loads them all."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        told = type(model).from_pretrained(folder, output_loading_info=True)[1]
    return next(iter(sorted(told["missing_keys"])), "")


def run_unit(model: nn.Module, example: Any, unit: FamilyUnit) -> dict[str, Any]:
    """Return whether a unit is right, or the sentence that refuses it."""
    try:
        pruning.prune(model, "magnitude", unit=unit, sparsity=SPARSITY, example=example)
        smaller: Any = pruning.smaller_transformer(model, example)
    except ValueError as error:
        return {"right": False, "refused": str(error)[:400]}
    except Exception as error:  # a mistake of ours, which the table counts
        return {"right": False, "crash": repr(error)[:400]}
    said = smaller.resized
    with tempfile.TemporaryDirectory() as folder:
        smaller.save_pretrained(folder)
        loaded, told = type(smaller).from_pretrained(folder, output_loading_info=True)
    differences = [difference(loaded.eval(), smaller, ((), example))]
    differences += [] if said.differs else [said.difference]
    right = (
        said.after < said.before
        and not any(told.values())
        and all(each is not None and each < TOLERANCE for each in differences)
    )
    return {"right": right, "differences": differences, "differs": said.differs, "sizes": [said.before, said.after]}


def main(tasks: str, results: str, *again: str) -> None:
    """Run the networks of some tasks that are not in the file yet, or match a pattern of `again`."""
    file = Path(results)
    done = read_runs(file)
    for name in names(tasks.split(",")):
        if name in done and not any(fnmatch(name, pattern) for pattern in again):
            continue
        signal.signal(signal.SIGPROF, _late)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            with quiet(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = run_one(name)
        except Exception as error:  # a class may fail in any way, also when it is built
            row = {"name": name, "error": repr(error)[:200]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        with file.open("a") as opened:
            opened.write(json.dumps(row) + "\n")


def _late(*_: object) -> None:
    raise RuntimeError(f"it takes more than {SECONDS} s of processor time")


if __name__ == "__main__":
    main(*sys.argv[1:])
