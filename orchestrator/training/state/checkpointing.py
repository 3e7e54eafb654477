"""When a stage's state is kept, and whether it goes on from the one that was kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from orchestrator.core.errors import CheckpointDamaged, StoreError
from orchestrator.core.redact import logger
from orchestrator.core.work_order import States
from orchestrator.store.finished.stage_contents import tensors_in
from orchestrator.training.stage_environment import DECIDING
from orchestrator.training.state.train_state import NotPlain, TrainState
from orchestrator.workloads.weight_files import write_state

MOST_SHARE = 0.01
"""Of the time of a training that checkpoints may take: where they are slow, they become rarer."""

_log = logger(__name__)


class Checkpointing:
    """The checkpoints of one stage.

    Args:
        store: where they are kept
        key: of the stage
        started_from: digest of the weights that the stage goes on from; of others a checkpoint is none of this stage
        data: digest of the data set, if it is the user's own
        minutes: between two checkpoints, at least; 0 keeps none and goes on from none
        grace: seconds that remain to write one once the stage is asked to end
        environment: what results may depend on; a stage that goes on in another one says so
        clock: seconds, monotonic
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
        self.anew = False
        """Whether the stage is to start from its beginning, as what it might have gone on from did not fit."""
        self.seconds = 0.0
        """What earlier attempts took until the checkpoint that the stage went on from."""
        self._store, self._key, self._started_from, self._data = store, key, started_from, data
        self._environment = {name: (environment or {}).get(name, "") for name in DECIDING}
        self._interval, self._grace, self._clock = 60 * minutes, grace, clock
        self._begun = self._due = clock()
        self._due += self._interval
        self._cost = 0.0
        self._kept = bool(minutes)
        self._stage = TrainState()

    def latest(self) -> TrainState | None:
        """Return the state to go on from; one that is none of this stage is set aside, as one that is damaged."""
        try:
            found = self._store.latest(self._key) if self._kept else None
        except CheckpointDamaged as error:
            self.set_aside(str(error))
            return None
        if found is None:
            return None
        values = found.values
        if values.get("started_from") != self._started_from:
            self.set_aside("what the stage goes on from has other weights now")
            return None
        if values["environment"] == self._environment and values.get("data", self._data) != self._data:
            self.set_aside("it was trained on other data")
            return None
        try:
            state = TrainState(tensors_in(found.tensors), dict(values["state"]))
            self.seconds = float(values["seconds"])
            if values["environment"] != self._environment:
                self._warn(f"it went on from a checkpoint that was made with {values['environment']}")
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            self.set_aside(f"it cannot be read: {error}")
            return None
        return state

    def set_aside(self, reason: str) -> None:
        """Set the checkpoint aside: the stage starts anew."""
        self.seconds, self.anew = 0.0, True
        self.warnings.append(f"its checkpoint was set aside, and it started anew: {reason}")
        self._store.put_aside(self._key, reason)

    def holds(self, parts: Mapping[str, Any]) -> None:
        """Have these parts in every checkpoint from now on, too: what the stage did before it trained."""
        self._stage = TrainState.of(parts)

    def keep(self, current: Callable[[], TrainState], ending: bool) -> None:
        """Keep the state if it is time to, or if the stage is about to end and the grace allows for it."""
        if not self._kept or not (self._cost <= self._grace if ending else self._clock() >= self._due):
            return
        begun = self._clock()
        try:
            self._write(current())
        except StoreError as error:
            self._warn(f"a checkpoint could not be kept: {error}")
        except Exception as error:  # of `get_extra_state` or `state_dict` of the user's own, say
            self._kept = False
            said = str(error) if isinstance(error, NotPlain) else f"{type(error).__name__}: {error}"
            self._warn(f"no checkpoint is kept, as its state cannot be written: {said}")
        now = self._clock()
        self._cost = now - begun
        self._due = now + max(self._interval, self._cost * (1 / MOST_SHARE - 1))

    def _write(self, state: TrainState) -> None:
        step = state.values["step"]
        values = {
            "started_from": self._started_from,
            "data": self._data,
            "environment": self._environment,
            "seconds": self.seconds + self._clock() - self._begun,
            "curve": state.part("curve") if "curve" in state.values else [],  # plain, for those who watch
            "state": {**self._stage.values, **state.values},
        }
        tensors = {**self._stage.tensors, **state.tensors}
        self._store.save(self._key, step, values, partial(write_state, tensors))

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            _log.warning("stage %s: %s", self._key[:12], text)
