"""Peer: a Ray Tune grid with Tune's own MLflow callback."""

from __future__ import annotations

from functools import partial
from typing import Any

import ray
from ray import tune
from ray.air.integrations.mlflow import MLflowLoggerCallback

from scripts.peers.peer_trial import SPARSITIES, Lengths, database, lengths_given, run_trial


def trainable(config: dict[str, Any], lengths: Lengths) -> None:
    """Run one trial, reporting to Tune."""

    def report(metrics: dict[str, float], step: int) -> None:
        tune.report({**metrics, "step": step})

    report(run_trial(config["sparsity"], lengths, report), lengths.dense_steps + lengths.finetune_steps)


def main() -> None:
    """Run the grid, two trials at a time."""
    lengths = lengths_given()
    ray.init(num_cpus=2)
    tuner = tune.Tuner(
        tune.with_resources(partial(trainable, lengths=lengths), {"cpu": 1}),
        param_space={"sparsity": tune.grid_search(list(SPARSITIES))},
        run_config=tune.RunConfig(
            callbacks=[MLflowLoggerCallback(tracking_uri=database(), experiment_name="pruning")],
        ),
    )
    if tuner.fit().num_errors:
        raise SystemExit("a trial failed")


if __name__ == "__main__":
    main()
