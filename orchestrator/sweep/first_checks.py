"""Checks before a sweep: its parts can run, every node sees the store, and the environment that is recorded."""

from __future__ import annotations

import platform
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import orchestrator
from orchestrator.config.schema import ConfigError
from orchestrator.core.errors import StoreError
from orchestrator.core.events import Failure
from orchestrator.core.file_names import component
from orchestrator.core.redact import redact
from orchestrator.core.specs import Plan
from orchestrator.execution.inline import InlineExecutor
from orchestrator.execution.on_ray.ray_executor import RayExecutor
from orchestrator.planning.number_formats import counted
from orchestrator.planning.pinned_content import release_of
from orchestrator.planning.plan import refusal
from orchestrator.planning.preflight_combinations import combinations
from orchestrator.store.store import Store
from orchestrator.sweep.outcome import invalid_margin, own_frames, unmeasured

QUIET = 10.0
"""Seconds after which a finished combination is told."""


def preflight(
    executor: RayExecutor | InlineExecutor,
    store: Store,
    plan: Plan,
    finished: Collection[str],
    environment: Mapping[str, str],
    *,
    own_only: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[str, ...]:
    """Try each combination of parts of the unfinished stages once, on the executor; return what rounds leave dense.

    Transient failures (a connection, memory) are left to the retries of the trials.

    Args:
        executor: executor of the sweep
        store: store that remembers passed combinations
        plan: plan of the sweep
        finished: keys of stages that need not run
        environment: package -> release
        own_only: for a dry run, which writes nothing: try only combinations with custom code or with patterns for
            names, as the rules of the configuration cover built-in parts
        say: prints what is tried, and how many are left after `QUIET` seconds

    Raises:
        ConfigError: a combination cannot run; each reason appears once with its trials
    """
    found = combinations(plan, finished, environment, own_only=own_only)
    passed = store.preflights() if found else set()
    left = [each for each in found if each.key not in passed]
    wrong: dict[str, list[str]] = {}
    unmatched, misfits, dense = [], [], dict[str, None]()
    if left:
        say(f"Trying {counted(len(left), 'new combination')} on a few examples; a large network takes minutes.")
    spoken = time.monotonic()
    for done, (index, outcome) in enumerate(executor.preflight([each.specs for each in left]), start=1):
        each = left[index]
        if done < len(left) and time.monotonic() - spoken >= QUIET:
            say(f"Tried {done} of {len(left)} combinations.")
            spoken = time.monotonic()
        if not isinstance(outcome, Failure):
            passed.add(each.key)
            sentences = [*unmeasured(each.objectives, outcome.figures), *invalid_margin(plan, outcome.primary)]
            for sentence in sentences:
                wrong[sentence] = [*dict.fromkeys([*wrong.get(sentence, ()), *each.trials])]
            dense.update(dict.fromkeys(outcome.told))
            if len(each.specs) > 1:
                unmatched.append(set(outcome.unmatched))
        elif not outcome.transient:
            misfits.append((each, outcome))
    told: set[str] = set()  # trials with a failed dense network: their rounds would repeat it
    for each, outcome in sorted(misfits, key=lambda misfit: len(misfit[0].specs)):
        if len(each.specs) > 1 and told.issuperset(each.trials):
            continue
        told.update(each.trials if len(each.specs) == 1 else ())
        frames = "".join(f"\n      {line}" for line in own_frames(outcome.traceback))
        wrong.setdefault(f"{outcome.message}{frames}", []).extend(each.trials)
    if len(left) == len(found) and not wrong:  # a pattern may match only one of several networks
        for key, pattern in sorted(set.intersection(*unmatched) if unmatched else ()):
            sentence = f"`prune.{key}` (={pattern!r}) matches no parameter of the network; check the spelling or leave"
            wrong[f"{sentence} it out."] = [trial.name for trial in plan.trials]
    if wrong:
        raise ConfigError(refusal(wrong, len(plan.trials), "cannot run; nothing was trained"))
    if left and not own_only:
        store.save_preflights(each.key for each in left if each.key in passed)
    return tuple(dense)


@dataclass(frozen=True)
class Probe:
    """Callable for a node: checks that the node reads the driver's file in the store, and can write."""

    store: Store
    token: str

    def __call__(self) -> None:
        """Read the driver's file, and write an answer.

        Raises:
            StoreError: this node cannot read or write the store; the message names the node and the remedy
        """
        host, backend = socket.gethostname(), self.store.backend
        try:
            seen = backend.read(self.path) == self.token.encode()
            if seen:
                answer = f"{self.path}.{uuid.uuid4().hex}"
                backend.write(answer, host.encode())
                backend.remove(answer)
        except FileNotFoundError:
            seen = False
        except StoreError as error:
            raise StoreError(f"node {host}: {error}") from error
        if not seen:
            raise StoreError(
                f"node {host} does not see `store.uri` (={redact(self.store.uri)}) as the driver does; set `store.uri` "
                "to a directory that every node mounts at the same path, or to an object store (s3://bucket/prefix)"
            )

    @property
    def path(self) -> str:
        """Path of the driver's file in the store."""
        return f"probes/{component(self.token, 'token')}"


@contextmanager
def probing(store: Store) -> Iterator[Probe]:
    """Write a file to `store`, yield the probe that looks for it, and remove the file at the end."""
    probe = Probe(store, uuid.uuid4().hex)
    store.mark()
    store.backend.write(probe.path, probe.token.encode())
    try:
        yield probe
    finally:
        store.backend.remove(probe.path)


PACKAGES = ("torch", "numpy", "ray", "hydra-core", "omegaconf", "mlflow")


def environment() -> dict[str, str]:
    """Return package -> version for results and their view, the platform, and `git_commit` if there is one."""
    found = {"orchestrator": orchestrator.__version__, "python": platform.python_version()}
    found |= {package: release for package in PACKAGES if (release := release_of(package))}
    found["platform"] = platform.platform()
    return found | _commit()


def _commit() -> dict[str, str]:
    """Return the commit of the working directory, and whether tracked files differ from it."""
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        return {"git_commit": _git("rev-parse", "HEAD")} | ({"git_changed": "yes"} if changed else {})
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
    return result.stdout.strip()
