"""One trial around `torch.nn.utils.prune`, and its MLflow run without artifacts, as a careful user writes them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import mlflow
import torch
from torch import nn
from torch.nn.utils import prune

from scripts.peers.digits import Report, evaluate, fit, load_splits, mlp

SPARSITIES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.875, 0.9, 0.95)


@dataclass(frozen=True)
class Lengths:
    """Lengths of a trial and its evaluation interval, in optimizer steps."""

    dense_steps: int
    finetune_steps: int
    eval_every: int


def run_trial(sparsity: float, lengths: Lengths, report: Report) -> dict[str, float]:
    """Train a network densely, prune it by magnitude, fine-tune it; return the final metrics."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, val, test = load_splits()
    model = mlp()
    fit(model, train, val, lengths.dense_steps, lengths.eval_every, report)
    dense = evaluate(model, val, "val") | evaluate(model, test, "test")
    report({f"dense/{name}": value for name, value in dense.items()}, lengths.dense_steps)
    layers = [module for module in model if isinstance(module, nn.Linear)]
    for layer in layers:
        prune.l1_unstructured(layer, "weight", amount=sparsity)  # type: ignore[no-untyped-call]
    before = evaluate(model, val, "val")
    fit(model, train, val, lengths.finetune_steps, lengths.eval_every, report, offset=lengths.dense_steps)
    for layer in layers:
        prune.remove(layer, "weight")  # type: ignore[no-untyped-call]
    weights = torch.cat([layer.weight.detach().flatten() for layer in layers])
    return {
        **{f"{name}_before": value for name, value in before.items()},
        **evaluate(model, val, "val"),
        **evaluate(model, test, "test"),
        "sparsity/overall": (weights == 0).float().mean().item(),
    }


def log_trial(sparsity: float, lengths: Lengths, uri: str) -> None:
    """Run a trial as a run of the existing MLflow experiment `pruning`."""
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("pruning")
    with mlflow.start_run(run_name=f"sparsity={sparsity}"):
        mlflow.log_params({"sparsity": sparsity, **vars(lengths)})
        mlflow.log_metrics(run_trial(sparsity, lengths, mlflow.log_metrics))


def database() -> str:
    """Return the URI of an SQLite database in the working directory."""
    return f"sqlite:///{Path('mlflow.db').absolute()}"


def create_experiment() -> None:
    """Create the database, before several trials try to at the same time."""
    mlflow.set_tracking_uri(database())
    mlflow.create_experiment("pruning")


def lengths_given() -> Lengths:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    for name in ("dense_steps", "finetune_steps", "eval_every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return Lengths(**vars(parser.parse_args()))
