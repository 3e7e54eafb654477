"""Hydra's launcher and sweeper of the orchestrator: all jobs of a multirun are planned and run as one sweep.

Hydra imports this module at every start, so everything heavy is imported on use.
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

# Plain nodes: Hydra runs this file without registering the module, and dataclasses need it registered.
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
    """Hands the whole batch to the conductor; works under any sweeper that calls launchers batch by batch."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what composing needs."""
        self.loader = hydra_context.config_loader
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Plan and run all jobs as one sweep; each result is the job's objective."""
        from orchestrator.sweep.launch import launch

        return launch(self.loader, self.config, job_overrides)


class OrchestratorSweeper(BasicSweeper):
    """Hydra's basic sweeper, less its composing of every job only to validate it: the launcher composes them once."""

    def sweep(self, arguments: list[str]) -> Any:
        """Expand the axes into jobs and launch them as one batch; an argument replaces the preset's axis of its key."""
        from orchestrator.sweep.launch import raise_for, refuse_empty_axes

        assert self.hydra_context is not None
        assert self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        refuse_empty_axes(overrides)
        (jobs,) = self.split_arguments(overrides, None)
        results = self.launcher.launch(jobs, initial_job_idx=0)
        raise_for(results)
        return results
