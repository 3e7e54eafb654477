"""Peer: a Ray task for each trial, written by hand around `torch.nn.utils.prune`."""

from __future__ import annotations

import ray

from scripts.peers.peer_trial import SPARSITIES, create_experiment, database, lengths_given, log_trial


def main() -> None:
    """Run the trials, two at a time."""
    lengths = lengths_given()
    ray.init(num_cpus=2)
    create_experiment()
    task = ray.remote(num_cpus=1)(log_trial)
    ray.get([task.remote(sparsity, lengths, database()) for sparsity in SPARSITIES])


if __name__ == "__main__":
    main()
