"""Tables of networks that were trained once: figures of a full grid, from which any search can be replayed."""

from __future__ import annotations

import csv
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import NETWORK, Plan, StageSpec, TrialSpec, identity_of
from orchestrator.sweep.search.candidates import SearchSpace
from orchestrator.sweep.search.policy import Budget, Policy
from orchestrator.sweep.search.replay import Replay

if TYPE_CHECKING:
    from orchestrator.results.sweep_results import SweepResults

ACCURACY = Metric("accuracy", "%", "higher", margin=0.01, format=".2%")
Setting = tuple[str, float]
"""Method and sparsity."""


@dataclass(frozen=True)
class Network:
    """Finished network: accuracies, remaining parameters and multiply-accumulates, and steps of its own training."""

    method: str
    """`dense` for a dense network."""
    sparsity: float
    seed: int
    val: float
    test: float
    parameters: int
    macs: int
    steps: int


class Table:
    """Networks of a full grid.

    Args:
        networks: dense networks, one for each seed, and the pruned networks of all settings and seeds
        margin: loss that a match may hide
        iterative: whether the sparsities are the rounds of one trial, each pruned from the one before
    """

    def __init__(self, networks: Iterable[Network], margin: float, *, iterative: bool = False) -> None:
        self.margin, self.iterative = margin, iterative
        self.dense: dict[int, Network] = {}
        self.pruned: dict[tuple[Setting, int], Network] = {}
        for each in networks:
            if each.method == "dense":
                self.dense[each.seed] = each
            else:
                self.pruned[(each.method, each.sparsity), each.seed] = each
        self.seeds = tuple(sorted(self.dense))
        self.settings = tuple(dict.fromkeys(setting for setting, _ in self.pruned))
        self.methods = tuple(dict.fromkeys(method for method, _ in self.settings))
        self.sparsities = tuple(dict.fromkeys(sparsity for _, sparsity in self.settings))
        if len(self.pruned) != len(self.settings) * len(self.seeds):
            raise SystemExit(f"The table has {len(self.pruned)} networks, and not every setting with every seed.")

    def networks(self, setting: Setting) -> list[Network]:
        """Return the networks of a setting by seed."""
        return [self.pruned[setting, seed] for seed in self.seeds]

    def gains(self, setting: Setting) -> list[float]:
        """Return the gains over dense on validation by seed."""
        return [each.val - self.dense[seed].val for seed, each in zip(self.seeds, self.networks(setting), strict=True)]

    def mean_gain(self, setting: Setting) -> float:
        """Return the mean gain over dense on validation."""
        return fmean(self.gains(setting))

    def objectives(self, setting: Setting) -> tuple[float, float]:
        """Return the mean error on validation and the mean number of parameters: both are to be small."""
        found = self.networks(setting)
        return 1 - fmean(each.val for each in found), fmean(each.parameters for each in found)

    @property
    def steps(self) -> int:
        """Steps of all networks after their dense training."""
        return sum(each.steps for each in self.pruned.values())

    def resampled(self, seeds: int, draw: random.Random) -> Table:
        """Return a table of some seeds in random order, drawn without replacement and named 0, 1, ..."""
        name = {seed: place for place, seed in enumerate(draw.sample(self.seeds, seeds))}
        every = (*self.dense.values(), *self.pruned.values())
        renamed = (replace(each, seed=name[each.seed]) for each in every if each.seed in name)
        return Table(renamed, self.margin, iterative=self.iterative)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a search on a table."""

    settings: tuple[Setting, ...]
    """Settings of the networks in the answer."""
    spent: Mapping[Setting, int]
    """Setting -> number of its networks that the search asked for."""
    share: float
    """Steps of the networks that the search asked for over those of the whole grid, dense training not counted."""


class TableSpace:
    """Plan of the grid of a table, on which a search is replayed with the figures of any table of the same grid.

    Args:
        table: gives methods, sparsities, seeds and margin
    """

    def __init__(self, table: Table) -> None:
        self._place: dict[str, tuple[Setting, int]] = {}
        self._seed: dict[str, int] = {}
        stages, trials = dict[str, StageSpec](), list[TrialSpec]()
        identities: dict[str, str] = {}
        for method in table.methods:
            for targets in [table.sparsities] if table.iterative else [[each] for each in table.sparsities]:
                for seed in table.seeds:
                    specs = _chain(method, targets, seed)
                    for spec in specs:
                        stages[spec.key] = spec
                        identities[spec.key] = identity_of(spec, identities)
                    keys = tuple(spec.key for spec in specs)
                    self._seed[keys[0]] = seed
                    self._place |= {key: ((method, each), seed) for key, each in zip(keys[1:], targets, strict=True)}
                    config = _config(method, targets[-1], len(targets), seed, table.margin)
                    name = f"{method} sparsity={targets[-1]} seed={seed}"
                    trials.append(TrialSpec(name, (), config, keys, keys[0], identities[keys[-1]]))
        self._plan = Plan(stages, tuple(trials))

    @cached_property
    def space(self) -> SearchSpace:
        """Candidates of the plan."""
        return SearchSpace(self._plan)

    def records(self, table: Table) -> dict[str, StageRecord]:
        """Return the record of every stage, with the figures of a table."""
        of_dense = ((key, table.dense[seed], table.dense[seed]) for key, seed in self._seed.items())
        of_pruned = ((key, table.pruned[place], table.dense[place[1]]) for key, place in self._place.items())
        return {key: _record(self._plan.stages[key], each, dense) for key, each, dense in (*of_dense, *of_pruned)}

    def search(self, policy: Policy, table: Table) -> Outcome:
        """Run a search on a table.

        Raises:
            SystemExit: the search refuses the plan
        """
        if told := [*policy.refusals(self.space)]:
            raise SystemExit("\n".join(told))
        decision = Replay(policy, self.space, Budget()).next(self.records(table))
        needed = self._plan.with_inputs(dict.fromkeys(key for look in decision.looks for key in look.asked))
        asked = [self._place[key] for key in needed if key in self._place]
        spent = Counter(setting for setting, _ in asked)
        found = dict.fromkeys(self._place[key][0] for key in decision.networks)
        return Outcome(tuple(found), spent, sum(table.pruned[place].steps for place in asked) / table.steps)


def read_table(path: Path, margin: float, *, iterative: bool = False) -> Table:
    """Read a table that `write_table` wrote."""
    with path.open(newline="") as lines:
        return Table((_parsed(row) for row in csv.DictReader(lines)), margin, iterative=iterative)


def write_table(path: Path, networks: Iterable[Network]) -> None:
    """Write networks as CSV."""
    with path.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, [each.name for each in fields(Network)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(each) for each in networks)


def networks_of(sweep: SweepResults) -> Iterator[Network]:
    """Yield the networks of a finished sweep, each dense network once."""
    known: set[str] = set()
    for trial in sweep.plan.trials:
        for key in trial.stages:
            if key not in known:
                known.add(key)
                found, pruned = sweep.records[key], key != trial.dense
                yield Network(
                    trial.config["method"]["name"] if pruned else "dense",
                    round(sweep.plan.stages[key].fields["target"], 6) if pruned else 0.0,
                    trial.config["seed"],
                    round(found.figure("val"), 6),
                    round(found.figure("test"), 6),
                    found.remaining_parameters,
                    round(found.macs_remaining),
                    found.steps,
                )


def _parsed(row: Mapping[str, str]) -> Network:
    seed, parameters, macs, steps = (int(row[name]) for name in ("seed", "parameters", "macs", "steps"))
    sparsity, val, test = (float(row[name]) for name in ("sparsity", "val", "test"))
    return Network(row["method"], sparsity, seed, val, test, parameters, macs, steps)


def _config(method: str, sparsity: float, rounds: int, seed: int, margin: float) -> dict[str, Any]:
    """Return the settings of a trial that a comparison reads."""
    kind = "one_shot" if rounds == 1 else "geometric"
    return {
        "seed": seed,
        "model": {"name": "network", "kind": "network"},
        "data": {"name": "mnist", "kind": "mnist"},
        "method": {"name": method},
        "schedule": {"kind": kind, "sparsity": sparsity, "rounds": rounds, "amount": None},
        "compare": {"margin": margin},
    }


def _chain(method: str, targets: Sequence[float], seed: int) -> Sequence[StageSpec]:
    """Return the stages of a trial: dense, and a round for each sparsity."""
    found = [StageSpec("dense", {"seed": seed})]
    for number, target in enumerate(targets, start=1):
        fields_of_round = {"method": {"name": method}, "seed": seed, "round": number, "target": target}
        found.append(StageSpec("round", fields_of_round, {NETWORK: found[-1].key}))
    return found


def _record(spec: StageSpec, network: Network, dense: Network) -> StageRecord:
    """Return a record with the figures of a network; all parameters count as prunable."""
    sparsity = 1 - network.parameters / dense.parameters
    return StageRecord(
        key=spec.key,
        kind=spec.kind,
        round=spec.round,
        before={},
        after={"val/accuracy": network.val, "test/accuracy": network.test},
        metrics=(ACCURACY,),
        curve=(),
        requested_sparsity=network.sparsity if spec.round else None,
        sparsity=sparsity,
        tensor_sparsity={"weights": sparsity},
        tensor_sizes={"weights": dense.parameters},
        parameters=dense.parameters,
        macs=dense.macs,
        macs_remaining=float(network.macs),
        weights_digest=spec.key,
        mask_digest=spec.key,
        steps=network.steps,
        best_step=network.steps,
        started=0.0,
    )
