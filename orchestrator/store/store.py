"""The truth of a sweep: finished stages, addressed by their keys, committed whole or not at all.

    ROOT/store.json                     which layout this is
    ROOT/stages/KEY/record.json         the commit of a stage, sealed with its own digest
    ROOT/stages/KEY/[ATTEMPT/]NAME      its files, whose digests the record holds
    ROOT/checkpoints/KEY/               where a stage was that has not ended
    ROOT/failures/KEY                   how a stage failed that would fail so again
    ROOT/sweeps/NAME.json               what a sweep was, to rebuild its comparison
    ROOT/preflights/KEY                 what can run: tried once, and safe to forget
    ROOT/quarantine/KEY-*/              damaged stages, each with a reason.txt
    ROOT/leases/, probes/, tmp/         what running drivers need; no result is ever in them

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
from orchestrator.core.plain_data import canonical_json, parse_json, read_as
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact
from orchestrator.core.specs import NETWORK, Key, Plan
from orchestrator.core.work_order import FileWriter
from orchestrator.store.backends import Backend
from orchestrator.store.finished.finished_stages import Stages
from orchestrator.store.finished.stage_commit import folder_of
from orchestrator.store.leases import LEASE_SECONDS, Leases
from orchestrator.store.local_backend import LocalBackend
from orchestrator.store.object_backend import ObjectBackend, absolute
from orchestrator.store.sealed_json import seal, unseal
from orchestrator.store.unfinished.checkpoints import Checkpoints
from orchestrator.store.unfinished.failures import Failures

FORMAT = 1
"""Raised whenever the layout changes: a store of another layout is refused, never misread."""

Keep = Literal["needed", "all"]
"""`needed`: the weights of dense stages, branch points, ends of trials, and whatever a resumed sweep starts from."""


@dataclass(frozen=True)
class Store:
    """Finished stages at `uri`; a small value that pickles (its connection stays behind).

    Args:
        uri: a directory (made absolute here), or any fsspec URI such as `s3://bucket/prefix`
        keep: whose weights `retention.prune` leaves, see `Keep`
        options: arguments of the fsspec file system, such as `endpoint_url`
        max_bytes: what `retention.limit` holds the store to, as a number or as text such as `50GB`
        read_only: leave a damaged stage where it is

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
        """The place behind `uri`, once its layout is known to be ours."""
        backend: Backend = ObjectBackend(self.uri, self.options) if "://" in self.uri else LocalBackend(self.uri)
        try:
            found = read_as(_Layout, parse_json(backend.read("store.json")))
        except FileNotFoundError:
            return backend
        except ValueError as error:
            raise StoreError(
                f"{self._name}: store.json is damaged: {error}. It holds nothing but the layout: if this release wrote "
                f"the store, write {_LAYOUT} to it; `python -m orchestrator.store verify` then checks all else"
            ) from None
        if found.format != FORMAT:
            raise StoreError(
                f"{self._name}: store.json is of format {found.format}, and this release reads {FORMAT}; use the "
                "release that wrote it, or another `store.uri`"
            )
        return backend

    def opened(self, exists: bool = False) -> Self:
        """Return the store once its layout is known to be ours.

        Args:
            exists: refuse one in which nothing was ever written, and what holds other things alone

        Raises:
            StoreError: it is damaged or of another layout, cannot be read, or is not there
        """
        found = self.backend.names("")
        if exists and not {"store.json", "sweeps", "stages"}.intersection(found):
            what = "holds other things than a store" if found else "is not there, or empty"
            raise StoreError(f"{self._name} {what}; pass where sweeps ran")
        return self

    @cached_property
    def stages(self) -> Stages:
        """The commit protocol on that place, and what is in the files of finished stages."""
        return Stages(self.backend, self._name, self.read_only)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The states of stages that have not ended."""
        return Checkpoints(self.backend, self._name)

    @cached_property
    def failures(self) -> Failures:
        """How stages failed that would fail so again."""
        return Failures(self.backend)

    def finished(self, keys: Iterable[str]) -> dict[str, StageRecord]:
        """Return the records of those `keys` that are committed.

        A stage whose parent now has other weights than those it started from is not finished: it was damaged and
        repeated elsewhere, say, and its results do not belong to what stands there now.

        A damaged stage is set aside, named in a warning and left out. The sizes of files are compared where that costs
        no request (local paths); their digests are checked by `read`.

        Raises:
            StoreError: a record of another version, which is refused and never misread
        """
        records = {key: commit.record for key, commit in self.stages.all_standing(keys).items()}
        parents = {record.inputs[NETWORK] for record in records.values() if NETWORK in record.inputs} - records.keys()
        above = {key: commit.record for key, commit in self.stages.all_standing(parents).items()} | records
        return {key: record for key, record in records.items() if _follows(record, above)}

    def resumable(self, plan: Plan) -> dict[str, StageRecord]:
        """Return the finished stages of a plan, less those below one that is not, and those whose weights are needed.

        What is below a stage that must be repeated may be finished all the same: once its bits are known the worker
        sees. Weights are needed again where a later sweep branches from a stage whose weights `retention.prune` has
        dropped. Committing the repeated stage puts them back.
        """
        done = self.finished(plan.stages)
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

        Files are hashed as they are written and never held whole; on the way to an object store they lie on the disk of
        this node, under $TMPDIR.

        Of several attempts at a stage one wins; the others' work is dropped, and they are returned the winner's record.

        Args:
            record: of the stage; its `files` are filled in here
            files: relative name -> what writes the content; called again if another process interferes

        Raises:
            StoreError: the store is full, read-only or away, or a name leaves the stage; nothing is committed then
        """
        self.mark()
        return self.stages.commit(record, files)

    def read(self, key: str, name: str) -> bytes:
        """Return a small file of a finished stage, its digest checked.

        Raises:
            StageDamaged: the file is missing, truncated or altered; the stage has been set aside
            StoreError: the stage is not finished, has no such file, or its weights were dropped
        """
        return self.stages.read(key, name)

    def fetch(self, key: str, name: str) -> Path:
        """Return where a file of a finished stage lies on this node, its digest checked; raise what `read` raises.

        A file of a local store lies in it. One of an object store is kept under $TMPDIR, where a later one may take its
        place: open it at once (an open or mapped file stays whole), and never write to it.
        """
        return self.stages.fetch(key, name)

    def drop_weights(self, keys: Iterable[str]) -> None:
        """Delete weights, and states of trainings, of finished stages and strike them from their records."""
        self.stages.drop_weights(keys)

    def discard(self, key: str) -> None:
        """Forget a stage, so that the next run repeats it from its start."""
        self.backend.remove_folder(folder_of(key))
        self.checkpoints.drop(key)
        self.failures.drop(key)

    def leases(self, owner: str = "", ttl: float = LEASE_SECONDS, clock: Callable[[], float] = time.time) -> Leases:
        """Return the means by which drivers that share this store keep from training a stage at the same time."""
        return Leases(self.backend, owner, ttl, clock)

    def save_sweep(self, name: str, info: Mapping[str, Any]) -> None:
        """Save what a sweep was (plain data: command, config, plan, ...), replacing what was saved under that name."""
        self.mark()
        self.backend.write(_sweep_path(name), seal({"name": name, **info}))

    def load_sweep(self, name: str) -> dict[str, Any]:
        """Return what `save_sweep` was given.

        Raises:
            StoreError: there is no such sweep (the message names those there are), its file is damaged or a link
        """
        try:
            with self.reading_sweep(name):
                return unseal(self.backend.read(_sweep_path(name)))
        except FileNotFoundError as error:
            known = self.sweeps()
            if name in known and error.strerror:
                why = f"{_sweep_path(name)} cannot be read: {error.strerror}; put the file itself there, or remove it"
                raise StoreError(f"{self._name}: {why}") from None
            raise StoreError(f"{self._name} holds no sweep {name!r}; it holds: {', '.join(known) or 'none'}") from None

    @contextmanager
    def reading_sweep(self, name: str) -> Iterator[None]:
        """Say of a ValueError that the sweep's file is damaged, and what to do."""
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
        """Forget a sweep; its stages stay."""
        self.backend.remove(_sweep_path(name))

    def preflights(self) -> set[str]:
        """Return the keys that `save_preflights` was given."""
        return set(self.backend.names("preflights"))

    def save_preflights(self, keys: Iterable[str]) -> None:
        """Remember what was found to run, so that it is not tried again."""
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
        """Make sure that the store says which layout it has, once a process."""
        _ = self._marked


@dataclass(frozen=True)
class _Layout:
    """The content of store.json."""

    format: int


_LAYOUT = canonical_json({"format": FORMAT})


def _follows(record: StageRecord, above: Mapping[Key, StageRecord]) -> bool:
    """Whether a stage started from what stands as its parent, as far as that is there."""
    parent = above.get(record.inputs.get(NETWORK, ""))
    return parent is None or record.started_from == parent.weights_digest


def _sweep_path(name: str) -> str:
    return f"sweeps/{component(name, 'name')}.json"
