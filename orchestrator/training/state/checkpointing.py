"""Checkpoints of a stage: when to save its state, whether to resume from it, and the environment it was made in."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import torch

import orchestrator
from orchestrator.core.errors import CheckpointDamaged, StoreError
from orchestrator.core.redact import logger
from orchestrator.core.work_order import States
from orchestrator.planning.pace import processor_model
from orchestrator.store.finished_stages import tensors_in
from orchestrator.training.state.train_state import NotPlain, TrainState
from orchestrator.workloads.weight_files import write_state

DECIDING = ("processor", "torch", "numpy")
"""Environment entries that affect the bits of results."""


def environment(device: str = "cpu") -> dict[str, str]:
    """Return the versions and the hardware that results may depend on; for a GPU, its name."""
    return {
        "python": platform.python_version(),
        "processor": processor(),
        **_gpu(device),
        "torch": str(torch.__version__),  # a plain str: to read torch's own class, a driver would import torch
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "orchestrator": orchestrator.__version__,
    }


def deciding(device: str) -> dict[str, str]:
    """Return the environment entries on which the bits of a stage, and so its failure, depend besides its key."""
    found = {name: value for name, value in environment().items() if name in (*DECIDING, "orchestrator")}
    return found | _gpu(device)


def processor() -> str:
    """Return the processor's model and the instructions torch uses; results are bit-equal on processors of one kind."""
    return f"{processor_model()}, {torch.backends.cpu.get_cpu_capability()}"


def _gpu(device: str) -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}


MOST_SHARE = 0.01
"""Largest fraction of a training's time that checkpoints may take; slow checkpoints become rarer."""

_log = logger(__name__)


class Checkpointing:
    """Checkpoints of one stage.

    Args:
        store: where checkpoints are saved
        key: key of the stage
        started_from: digest of the weights that the stage starts from; a checkpoint with another digest is set aside
        data: digest of the data set if it is the user's own
        minutes: least time between two checkpoints; 0 saves none and resumes from none
        grace: seconds left to write a checkpoint once the stage is asked to end
        environment: entries that results may depend on; resuming in another environment adds a warning
        clock: monotonic clock, in seconds
    """

    def __init__(
        self,
        store: States,
        key: str,
        *,
        started_from: str = "",
        data: str = "",
        minutes: float = 0,
        grace: float = 0,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.warnings: list[str] = []
        self.starts_over = False
        """Whether the stage must start from its beginning, because a checkpoint did not fit."""
        self.seconds = 0.0
        """Seconds that earlier attempts took up to the checkpoint that the stage resumed from."""
        self._store, self._key, self._started_from, self._data = store, key, started_from, data
        self._environment = {name: (environment or {}).get(name, "") for name in DECIDING}
        self._interval, self._grace, self._clock = 60 * minutes, grace, clock
        self._begun = self._due = clock()
        self._due += self._interval
        self._cost = 0.0
        self._kept = bool(minutes)
        self._stage = TrainState()

    def latest(self) -> TrainState | None:
        """Return the state to resume from; None if there is none.

        A damaged checkpoint, or one made with other weights or data, is set aside.
        """
        try:
            found = self._store.latest(self._key) if self._kept else None
        except CheckpointDamaged as error:
            self.set_aside(str(error))
            return None
        if found is None:
            return None
        values = found.values
        if values.get("started_from") != self._started_from:
            self.set_aside("the stage starts from other weights now")
            return None
        if values["environment"] == self._environment and values.get("data", self._data) != self._data:
            self.set_aside("it was trained on other data")
            return None
        try:
            state = TrainState(tensors_in(found.tensors), dict(values["state"]))
            self.seconds = float(values["seconds"])
            if values["environment"] != self._environment:
                self._warn(f"it resumed from a checkpoint that was made with {values['environment']}")
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            self.set_aside(f"it cannot be read: {error}")
            return None
        return state

    def set_aside(self, reason: str) -> None:
        """Set the checkpoint aside, so that the stage starts from its beginning."""
        self.seconds, self.starts_over = 0.0, True
        self.warnings.append(f"its checkpoint was set aside, and it started from the beginning: {reason}")
        self._store.put_aside(self._key, reason)

    def holds(self, parts: Mapping[str, Any]) -> None:
        """Add these parts, which the stage computed before training, to every later checkpoint."""
        self._stage = TrainState.of(parts)

    def with_held(self, state: TrainState) -> TrainState:
        """Return a state with the parts that every checkpoint holds."""
        tensors, values = {**self._stage.tensors, **state.tensors}, {**self._stage.values, **state.values}
        return TrainState(tensors, values)

    def keep(self, current: Callable[[], TrainState], ending: bool) -> None:
        """Save the state if a checkpoint is due, or if the stage must end and the grace period is long enough."""
        if not self._kept or not (self._cost <= self._grace if ending else self._clock() >= self._due):
            return
        begun = self._clock()
        try:
            self._write(current())
        except StoreError as error:
            self._warn(f"a checkpoint could not be saved: {error}")
        except Exception as error:  # for example from the user's `get_extra_state` or `state_dict`
            self._kept = False
            said = str(error) if isinstance(error, NotPlain) else f"{type(error).__name__}: {error}"
            self._warn(f"no checkpoints are saved, because its state cannot be written: {said}")
        now = self._clock()
        self._cost = now - begun
        self._due = now + max(self._interval, self._cost * (1 / MOST_SHARE - 1))

    def _write(self, state: TrainState) -> None:
        step, state = state.values["step"], self.with_held(state)
        values = {
            "started_from": self._started_from,
            "data": self._data,
            "environment": self._environment,
            "seconds": self.seconds + self._clock() - self._begun,
            "curve": state.part("curve") if "curve" in state.values else [],  # a copy in plain JSON, for live displays
            "state": state.values,
        }
        self._store.save(self._key, step, values, partial(write_state, state.tensors))

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            _log.warning("stage %s: %s", self._key[:12], text)
