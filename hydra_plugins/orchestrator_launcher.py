"""Launcher and sweeper plugins for Hydra: all jobs of a multirun are planned and run as one sweep.

Hydra imports this module at every start, so large imports happen on use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

# Plain dicts: Hydra runs this file without registering the module, which dataclasses need.
_HERE = "hydra_plugins.orchestrator_launcher"
ConfigStore.instance().store(
    group="hydra/launcher",
    name="orchestrator",
    node={"_target_": f"{_HERE}.OrchestratorLauncher"},
    provider="orchestrator",
)
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="orchestrator",
    node={"_target_": f"{_HERE}.OrchestratorSweeper", "max_batch_size": None, "params": {}},
    provider="orchestrator",
)


class OrchestratorLauncher(Launcher):
    """Launcher that runs a whole batch as one sweep; works with every sweeper that launches batches."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the loader and the configuration for composition."""
        self.loader = hydra_context.config_loader
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Plan and run all jobs as one sweep; each result holds the job's objective."""
        from orchestrator.sweep.launch import launch

        return launch(self.loader, self.config, job_overrides)


class OrchestratorSweeper(BasicSweeper):
    """Basic sweeper of Hydra, but without composing every job for validation: the launcher composes jobs once."""

    def sweep(self, arguments: list[str]) -> Any:
        """Expand the axes into jobs and launch them as one batch; a typed axis replaces the preset's axis."""
        from orchestrator.sweep.launch import check_axes, raise_for

        assert self.hydra_context is not None
        assert self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        check_axes(overrides)
        (jobs,) = self.split_arguments(overrides, None)
        results = self.launcher.launch(jobs, initial_job_idx=0)
        raise_for(results)
        return results
