"""The store of a sweep: finished stages, addressed by their keys, each committed whole or not at all.

    ROOT/store.json                     number of the layout
    ROOT/stages/KEY/record.json         the commit of a stage, sealed with its own digest
    ROOT/stages/KEY/[ATTEMPT/]NAME      the stage's files, whose digests the record holds
    ROOT/checkpoints/KEY/               checkpoint of an unfinished stage
    ROOT/failures/KEY                   failure of a stage that would fail the same way again
    ROOT/sweeps/NAME.json               command, configuration and plan of a sweep, to rebuild its comparison
    ROOT/preflights/KEY                 successful preflight checks, which need not be repeated; safe to delete
    ROOT/quarantine/KEY-*/              damaged stages, each with a reason.txt
    ROOT/leases/, probes/, tmp/         work files of running drivers; never results

Nothing is ever unpickled, and no name from a plan or a record leads out of the root.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

from orchestrator.core.errors import StoreError
from orchestrator.core.file_names import WEIGHTS, component, is_component
from orchestrator.core.plain_data import MOST_BYTES, OF_SWEEPS, canonical_json, parse_json, read_as
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact
from orchestrator.core.specs import NETWORK, Key, Plan
from orchestrator.core.work_order import FileWriter
from orchestrator.store.backends import Backend, seal, unseal
from orchestrator.store.finished_stages import Stages, folder_of
from orchestrator.store.leases import LEASE_SECONDS, Leases
from orchestrator.store.local_backend import LocalBackend
from orchestrator.store.object_backend import ObjectBackend, absolute
from orchestrator.store.unfinished_stages import Checkpoints, Failures

FORMAT = 1
"""Number of the layout, raised with every change; stores with another number are refused, never misread."""

Keep = Literal["needed", "all"]
"""Whose weights stay. `needed`: dense stages, branch points, ends of trials, and starting points of resumed sweeps."""


@dataclass(frozen=True)
class Store:
    """Store of finished stages at `uri`; a small value that pickles, without its connection.

    Args:
        uri: a directory (made absolute here), or any fsspec URI such as `s3://bucket/prefix`
        keep: whose weights `retention.prune` keeps, see `Keep`
        options: arguments of the fsspec file system, such as `endpoint_url`
        max_bytes: size limit that `retention.limit` applies, as a number of bytes or as text such as `50GB`
        read_only: leave damaged stages where they are

    Raises:
        StoreError: an unknown protocol, or one whose package is not installed
    """

    uri: str
    keep: Keep = "needed"
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    max_bytes: int | str | None = None
    read_only: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.keep not in get_args(Keep):
            raise StoreError(f"`store.keep` (={self.keep!r}) must be one of {', '.join(get_args(Keep))}")
        object.__setattr__(self, "uri", absolute(self.uri))

    def __reduce__(self) -> tuple[type[Store], tuple[Any, ...]]:
        return type(self), (self.uri, self.keep, self.options, self.max_bytes, self.read_only)

    def __str__(self) -> str:
        return redact(self.uri)

    def __repr__(self) -> str:
        return f"Store({redact(self.uri)!r}, keep={self.keep!r})"

    @cached_property
    def backend(self) -> Backend:
        """The backend for `uri`, after checking that this release can read the store's layout."""
        backend: Backend = ObjectBackend(self.uri, self.options) if "://" in self.uri else LocalBackend(self.uri)
        try:
            found = read_as(_Layout, parse_json(backend.read("store.json")))
        except FileNotFoundError:
            return backend
        except ValueError as error:
            raise StoreError(
                f"{self._name}: store.json is damaged: {error}. The file holds only the number of the layout: if this "
                f"release wrote the store, write {_LAYOUT} to it; `python -m orchestrator.store verify` checks the rest"
            ) from None
        if found.format != FORMAT:
            raise StoreError(
                f"{self._name}: store.json has format {found.format}, and this release reads {FORMAT}; use the "
                "release that wrote it, or another `store.uri`"
            )
        return backend

    def opened(self, exists: bool = False) -> Self:
        """Return the store itself, after checking that this release can read its layout.

        Args:
            exists: also refuse a place that is missing or empty, or that holds other files and no store

        Raises:
            StoreError: the store is damaged, has another layout, cannot be read, or does not exist
        """
        found = self.backend.names("")
        if exists and not {"store.json", "sweeps", "stages"}.intersection(found):
            what = "holds other files and no store" if found else "does not exist or is empty"
            raise StoreError(f"{self._name} {what}; pass the store of your sweeps")
        return self

    @cached_property
    def stages(self) -> Stages:
        """The finished stages: their commits and the contents of their files."""
        return Stages(self.backend, self._name, self.read_only)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of unfinished stages."""
        return Checkpoints(self.backend, self._name)

    @cached_property
    def failures(self) -> Failures:
        """The failures of stages that would fail the same way again."""
        return Failures(self.backend)

    def finished(self, keys: Iterable[str]) -> dict[str, StageRecord]:
        """Return the records of those `keys` that are finished.

        A stage counts as unfinished if its parent's weights are no longer those it started from, for example because
        the parent was damaged and repeated with another result.

        A damaged stage is set aside, named in a warning and left out. In a directory the sizes of files are checked
        here, as that costs no request; digests are checked by `read`.

        Raises:
            StoreError: a record has another version
        """
        records = {key: commit.record for key, commit in self.stages.all_standing(keys).items()}
        parents = {record.inputs[NETWORK] for record in records.values() if NETWORK in record.inputs} - records.keys()
        above = {key: commit.record for key, commit in self.stages.all_standing(parents).items()} | records
        return {key: record for key, record in records.items() if _follows(record, above)}

    def resumable(self, plan: Plan) -> dict[str, StageRecord]:
        """Return the finished stages of a plan that need not run again.

        Two kinds of finished stages are left out:

        - Stages below an unfinished stage. The worker skips such a stage if its parent ends with the same weights as
          before.
        - Stages whose weights an unfinished stage needs but `retention.prune` has dropped, for example if a later
          sweep branches there. When the stage is repeated, its commit puts the weights back.
        """
        done = {key: record.sharing(plan.stages[key]) for key, record in self.finished(plan.stages).items()}
        for key, spec in plan.stages.items():
            if any(needed not in done for needed in spec.inputs.values()):
                done.pop(key, None)
        for key, spec in reversed(list(plan.stages.items())):
            for needed in spec.inputs.values() if key not in done else ():
                if needed in done and WEIGHTS not in done[needed].files:
                    del done[needed]
        return done

    def commit(self, record: StageRecord, files: Mapping[str, FileWriter]) -> StageRecord:
        """Commit a stage and its files, all or nothing, and return the record that stands.

        Files are hashed as they are written and never held in memory as a whole. On the way to an object store they lie
        on this node's disk, under $TMPDIR.

        If several processes commit a stage, one wins. The others' work is dropped, and they get the winner's record.

        Args:
            record: the stage's record; its `files` are filled in here
            files: relative name -> function that writes the content; called again if another process interferes

        Raises:
            StoreError: the store is full, read-only or unreachable, or a name leaves the stage's folder; nothing is
                committed then
        """
        self.mark()
        return self.stages.commit(record, files)

    def read(self, key: str, name: str) -> bytes:
        """Return the content of a small file of a finished stage, with its digest checked.

        Raises:
            StageDamaged: the file is missing, truncated or altered; the stage has been set aside
            StoreError: the stage is not finished, has no such file, or its weights were dropped
        """
        return self.stages.read(key, name)

    def fetch(self, key: str, name: str) -> Path:
        """Return the path on this node of a file of a finished stage, with its digest checked; raise as `read` does.

        For a local store, the path lies in the store. For an object store, the file is kept under $TMPDIR until later
        files displace it: open it at once (an open or mapped file stays whole), and never write to it.
        """
        return self.stages.fetch(key, name)

    def drop_weights(self, keys: Iterable[str]) -> None:
        """Delete the weights and training states of finished stages, and remove them from the records."""
        self.stages.drop_weights(keys)

    def discard(self, key: str) -> None:
        """Remove a stage with its checkpoint and failure, so that the next run repeats it from its start."""
        self.backend.remove_folder(folder_of(key))
        self.checkpoints.drop(key)
        self.failures.drop(key)

    def leases(self, owner: str = "", ttl: float = LEASE_SECONDS, clock: Callable[[], float] = time.time) -> Leases:
        """Return the leases by which drivers that share this store avoid training a stage at the same time."""
        return Leases(self.backend, owner, ttl, clock)

    def save_sweep(self, name: str, info: Mapping[str, Any]) -> None:
        """Save a sweep (plain data: command, config, plan, ...), replacing an earlier one of the same name.

        Raises:
            StoreError: the sweep is too large to be read again
        """
        self.mark()
        try:
            content = seal({"name": name, **info}, OF_SWEEPS)
        except ValueError as error:
            raise StoreError(
                f"{self._name}: the sweep {name!r} cannot be saved: {error}; run its trials as several sweeps"
            ) from None
        self.backend.write(_sweep_path(name), content)

    def load_sweep(self, name: str) -> dict[str, Any]:
        """Return the data that `save_sweep` was given.

        Raises:
            StoreError: there is no such sweep (the message lists the sweeps), or its file is damaged or a link
        """
        try:
            with self.reading_sweep(name):
                return unseal(self.backend.read(_sweep_path(name), OF_SWEEPS * MOST_BYTES), OF_SWEEPS)
        except FileNotFoundError as error:
            known = self.sweeps()
            if name in known and error.strerror:
                why = f"{_sweep_path(name)} cannot be read: {error.strerror}; put a regular file there, or remove it"
                raise StoreError(f"{self._name}: {why}") from None
            raise StoreError(f"{self._name} holds no sweep {name!r}; it holds: {', '.join(known) or 'none'}") from None

    @contextmanager
    def reading_sweep(self, name: str) -> Iterator[None]:
        """Turn a ValueError into a StoreError which says that the sweep's file is damaged."""
        try:
            yield
        except ValueError as error:
            raise StoreError(
                f"{self._name}: {_sweep_path(name)} is damaged: {error}. Remove it and run the sweep again: "
                "finished stages are kept"
            ) from None

    def sweeps(self) -> list[str]:
        """Return the names of the saved sweeps, sorted."""
        names = [name.removesuffix(".json") for name in self.backend.names("sweeps") if name.endswith(".json")]
        return [name for name in names if is_component(name)]

    def remove_sweep(self, name: str) -> None:
        """Remove a saved sweep; its stages stay."""
        self.backend.remove(_sweep_path(name))

    def preflights(self) -> set[str]:
        """Return the keys of successful preflight checks."""
        return set(self.backend.names("preflights"))

    def save_preflights(self, keys: Iterable[str]) -> None:
        """Save the keys of successful preflight checks, so that they are not repeated."""
        self.mark()
        for key in keys:
            self.backend.write(f"preflights/{component(key, 'key')}", seal({"passed": time.time()}))

    @property
    def _name(self) -> str:
        return f"`store.uri` (={redact(self.uri)})"

    @cached_property
    def _marked(self) -> bool:
        return self.backend.create("store.json", _LAYOUT.encode())

    def mark(self) -> None:
        """Write store.json if it is missing; done once in each process."""
        _ = self._marked


@dataclass(frozen=True)
class _Layout:
    """The content of store.json."""

    format: int


_LAYOUT = canonical_json({"format": FORMAT})


def _follows(record: StageRecord, above: Mapping[Key, StageRecord]) -> bool:
    """Whether a stage started from its parent's current weights; True if the parent is not finished."""
    parent = above.get(record.inputs.get(NETWORK, ""))
    return parent is None or record.started_from == parent.weights_digest


def _sweep_path(name: str) -> str:
    return f"sweeps/{component(name, 'name')}.json"
