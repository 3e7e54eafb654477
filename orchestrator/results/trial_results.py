"""Results of one trial: its masks, curves, weights and networks, round by round, and errors for unknown names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orchestrator.compare.panels import SettingsOfEach
from orchestrator.compare.trial_rows import reason, status
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.plain_data import quoted
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import shown, shown_tree
from orchestrator.core.specs import TrialSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.planning.number_formats import first_few
from orchestrator.results import frames
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.store.store import Store

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import Tensor, nn

    from pruning import MaskSet

LISTED = 10
"""Maximum number of known names listed in a message."""


class ResultsError(OrchestratorError):
    """Requested result does not exist; the message lists what exists."""


def no_choice(argument: str, value: object, choices: Sequence[str]) -> ResultsError:
    """Return the error for a value that is not among the choices."""
    near = get_close_matches(str(value), choices, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    return ResultsError(f"`{argument}` (={quoted(value)}) must be one of {', '.join(choices)}{meant}")


def not_there(argument: str, value: object, known: Sequence[str], what: str) -> ResultsError:
    """Return the error for an unknown name.

    Args:
        argument: name of the argument
        value: unknown name
        known: known names
        what: subject and verb before the known names, for example `the sweep has`
    """
    near = get_close_matches(str(value), known, n=3)
    held = first_few([*map(repr, known)], LISTED, ", ") or "none"
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return ResultsError(shown(f"`{argument}` (={quoted(value)}) is not there; {meant}{what} {held}."))


class TrialResults:
    """Results of one trial. A `round` counts from 1; 0 is the dense network, None the last round of the trial."""

    def __init__(self, store: Store, saved: SavedSweep, spec: TrialSpec) -> None:
        self._store, self._saved, self._spec = store, saved, spec
        self.name = shown(spec.name)

    def __repr__(self) -> str:
        """Show the trial's name and status."""
        return f"<trial {self.name!r}: {self.status}>"

    @property
    def status(self) -> str:
        """`finished`, `failed`, `unfinished`, `unmeasured` (measurements are missing), or `stopped` (by a search)."""
        saved = self._saved
        stopped = saved.search is not None and self._spec.name in saved.search.stopped
        work = saved.plan.work_of(self._spec)
        return status(self._spec, work, saved.plan, saved.records, saved.failures, stopped=stopped)

    @property
    def failure(self) -> str | None:
        """Reason why the trial failed; None if it did not."""
        saved = self._saved
        return reason(self._spec, saved.plan.work_of(self._spec), saved.records, saved.failures)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of the trial, as typed on the command line."""
        return tuple(map(shown, self._spec.overrides))

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Dotted name -> value of every setting that defines the trial, for example `train.epochs`."""
        (found,) = SettingsOfEach([self._spec.config])
        return shown_tree(found)  # type: ignore[no-any-return]

    @property
    def rounds(self) -> tuple[int, ...]:
        """Finished rounds; 0 is the dense network."""
        return tuple(number for number, key in self._stages.items() if key in self._saved.records)

    def record(self, round: int | None = None) -> StageRecord:
        """Return the record of a round's stage: all figures, sparsities by tensor, the training curve, times.

        Raises:
            ResultsError: the trial does not have the round, or the round is not finished
        """
        stages = self._stages
        number = max(stages) if round is None else round
        if type(number) is not int or number not in stages:
            raise ResultsError(
                f"`round` (={number!r}) must be one of {', '.join(map(str, stages))}, the rounds of trial "
                f"{self.name!r}, or None for the last."
            )
        if stages[number] not in self._saved.records:
            done = ", ".join(map(str, self.rounds)) or "none"
            raise ResultsError(
                f"round {number} of trial {self.name!r} is not finished; pass a finished round ({done}), or run the "
                "sweep again."
            )
        return self._saved.records[stages[number]]

    def masks(self, round: int | None = None) -> MaskSet:
        """Return the masks of a round: 1 for kept entries; an empty set for the dense network.

        Raises:
            ResultsError: the trial does not have the round, or the round is not finished
            StoreError: the file is damaged, or does not hold masks of the trial's network
        """
        import torch

        from pruning import MaskSet

        record = self.record(round)
        found = self._store.stages.masks(record.key) if KINDS[record.kind].prunes else {}
        return MaskSet({name: torch.from_numpy(mask) for name, mask in found.items()})

    def history(self) -> DataFrame:
        """Return the training curves of finished stages, one row for each point, as `sweep.frame(by="step")`."""
        return frames.by_step([self._spec], self._saved.records, {}).drop(columns="trial")

    def weights(self, round: int | None = None) -> Mapping[str, Tensor]:
        """Return name -> parameter or buffer at the end of the round: pruned entries are zero.

        Raises:
            ResultsError: the trial does not have the round, the round is not finished, or its weights were dropped
            StoreError: the file is damaged
        """
        return self._store.stages.tensors(self._with_weights(round).key, WEIGHTS)

    def model(self, round: int | None = None, *, run_own_code: bool = False) -> nn.Module:
        """Return the trial's network with the weights of a round: pruned entries are zero.

        The network is on the CPU and in evaluation mode; `trial.masks(round).apply(model)` applies its masks.

        Args:
            round: counted from 1; 0 is the dense network, None the last round
            run_own_code: allow the sweep's `_target_` functions, which can be any code, to be imported and run

        Raises:
            ResultsError: as `weights`
            OrchestratorError: the network needs the user's own code without `run_own_code`, or the code or the data
                differ from those that the sweep was planned with
        """
        from orchestrator.export.stored_network import kept
        from orchestrator.export.trial_choice import ChosenTrial

        key = self._with_weights(round).key
        return kept(self._store, self._saved, ChosenTrial(key, self._spec), run_own_code=run_own_code).model

    def _with_weights(self, round: int | None) -> StageRecord:
        record = self.record(round)
        if WEIGHTS not in record.files:
            raise ResultsError(
                f"the store does not keep the weights of round {record.round} of trial {self.name!r}, because no stage "
                "starts from them; run the sweep with store.keep=all in a new `store.uri`."
            )
        return record

    @cached_property
    def _stages(self) -> Mapping[int, str]:
        """Round -> key of its stage."""
        stages = self._saved.plan.stages
        keys = [self._spec.dense, *self._spec.stages]
        return {stages[key].round: key for key in keys if KINDS[stages[key].kind].reads_test}
