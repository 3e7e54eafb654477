"""Peer: Hydra's joblib launcher, `--multirun hydra/launcher=joblib hydra.launcher.n_jobs=2 sparsity=0.5,0.9 ...`."""

from __future__ import annotations

from dataclasses import dataclass

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from scripts.peers.peer_trial import Lengths, create_experiment, database, log_trial


@dataclass
class Config:
    """One trial."""

    sparsity: float = MISSING
    dense_steps: int = MISSING
    finetune_steps: int = MISSING
    eval_every: int = MISSING


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config: Config) -> None:
    """Run one trial."""
    log_trial(config.sparsity, Lengths(config.dense_steps, config.finetune_steps, config.eval_every), database())


if __name__ == "__main__":
    create_experiment()
    main()
