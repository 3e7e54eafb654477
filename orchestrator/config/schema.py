"""Schema of a sweep's configuration, and the rules of its values. Rooms above use plain data, not OmegaConf.

`hydra_options.register` puts the dataclasses into Hydra's ConfigStore, so that Hydra refuses a misspelled key or a
wrong type. `violations` checks a resolved, plain configuration against every rule that needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from orchestrator.config import (
    cluster,
    config_groups,
    deploy,
    harness,
    parallel,
    results,
    round_schema,
    sources,
    training,
    well_formed,
)
from orchestrator.config.key_rules import key
from orchestrator.config.key_rules import violations as broken
from orchestrator.core.errors import OrchestratorError, StoreError
from orchestrator.core.file_names import component
from pruning.catalogue.rows import Rule, at_least


class ConfigError(OrchestratorError):
    """Configuration that cannot be planned; the text lists every reason."""

    exit_status = 2


MATCHING = "matching_sparsity"
SIZES = ("sparsity/overall", "parameters/remaining", "macs/remaining")
"""Objectives beside metrics: figures of the last round's record."""
_MEASURED = re.compile(r"deploy/((\w+/\d+/)?(latency_ms|speedup)|(\w+/)?bytes)")


def _is_objective(name: Any) -> bool:
    if not isinstance(name, str):
        return False
    known = name in (MATCHING, *SIZES) or _MEASURED.fullmatch(name) is not None
    return known or (name.startswith("val/") and name[4:].isidentifier())


_OBJECTIVE = Rule(
    lambda given: bool(given) and all(map(_is_objective, given if isinstance(given, list) else [given])),
    f"be val/ and the name of a metric, as in val/loss, or one of {MATCHING}, {', '.join(SIZES)}, deploy/latency_ms, "
    "deploy/speedup, deploy/bytes, or a list of these; no figure of the test split, which must not guide a search",
)


def objectives(given: str | Sequence[str] | None) -> list[str | None]:
    """Return the names in `objective` as a list; None stands for the primary metric."""
    return [given] if given is None or isinstance(given, str) else list(given)


@dataclass
class Config:
    """Root of a trial's configuration. Groups with a custom target accept any key."""

    name: str | None = None
    """Name of the sweep in the store, in reports and in MLflow, followed by a digest; null: the preset's name."""
    seed: int = key(0, at_least(0, "; pass any other integer"))
    """Seed of the initialisation, the order of the data and random masks."""
    dry_run: bool = False
    """Print the plan (trials, shared stages, resources) and run nothing."""
    retry_failed: bool = False
    """Run stages again that failed before in a repeatable way, for example with a diverging loss."""
    objective: Any = key(None, _OBJECTIVE.or_null())
    """Objective for a search plugin: a metric of the last round on the validation split, as in `val/loss` (null: the
    primary metric), a size, a measured latency, `matching_sparsity`, or a list of these."""
    model: Any = MISSING
    """Network."""
    data: Any = MISSING
    """Data set, and its split."""
    task: Any = MISSING
    """Task: the loss and the metrics."""
    train: training.Train = field(default_factory=training.Train)
    """Training of the dense network."""
    score: Any = MISSING
    """Importance score that ranks the entries."""
    unit: round_schema.Unit = field(default_factory=round_schema.Unit)
    """Unit that is pruned as a whole, such as an entry or a channel."""
    scope: round_schema.Scope = field(default_factory=round_schema.Scope)
    """Scope of the ranking, and the allocation of densities to tensors."""
    dynamics: Any = MISSING
    """Whether pruned entries may return, or how masks change within the training."""
    repair: Any = MISSING
    """Repair of the survivors after pruning."""
    method: Any = MISSING
    """Pruning method: a published combination of these choices, or a class."""
    schedule: round_schema.Schedule = field(default_factory=round_schema.Schedule)
    """Amount that each round prunes, and when."""
    finetune: training.Train = field(default_factory=training.Train)
    """Training after each pruning round; has the keys of `train`."""
    restart: training.Restart = field(default_factory=training.Restart)
    """Start of the training in a round."""
    prune: round_schema.Prune = field(default_factory=round_schema.Prune)
    """Parameters that are pruned."""
    deploy: deploy.Deploy = field(default_factory=deploy.Deploy)
    """Formats in which last networks are deployed and measured."""
    harness: harness.Harness = field(default_factory=harness.Harness)
    """Tasks of lm-evaluation-harness on which networks are evaluated."""
    search: Any = MISSING
    """Search, which decides from finished stages what is run; `none` runs every trial."""
    parallel: parallel.Parallel = field(default_factory=parallel.Parallel)
    """Processes of a trial."""
    cluster: cluster.Cluster = field(default_factory=cluster.Cluster)
    """Place and resources of trials."""
    tracking: results.Tracking = field(default_factory=results.Tracking)
    """Tracking of the sweep."""
    store: results.Store = field(default_factory=results.Store)
    """Store of finished stages."""
    compare: results.Compare = field(default_factory=results.Compare)
    """Comparison of trials."""


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each setting of a plain, resolved configuration that is wrong by itself.

    Targets are looked up as files and never imported, so the check is safe and fast on any machine.
    """
    malformed = [
        *well_formed.missing(Config, config),
        *well_formed.unknown(Config, config, groups=("sweep",)),
        *well_formed.values_unfit_for_json(config),
        *well_formed.mistyped(Config, config),
    ]
    if malformed:
        yield from malformed
        return
    yield from broken("", Config, config)
    if config["name"] is not None:
        yield from _name_violations(config["name"])
    for group in config_groups.GROUPS:
        yield from _group_violations(group, config[group])
    for name in ("model", "data", "task", "score", "method", "dynamics", "search", "train", "finetune"):
        yield from sources.unreadable(name, config[name])
    for name in ("train", "finetune"):
        if config[name]["_target_"] is not None:
            yield from _own_violations(name, config[name])
        for part in ("optimizer", "scheduler", "loss"):
            if isinstance(config[name][part], Mapping) and config[name][part].get("_target_"):
                yield from _target_violations(f"{name}.{part}", config[name][part])


def _group_violations(group: str, node: Any) -> Iterator[str]:
    """Yield the errors of a group whose options are rows of a catalogue."""
    yield from _built_violations(group, node)
    if not isinstance(node, Mapping):
        return
    yield from config_groups.violations_of(group, node)
    for target in sources.targets(list(node.values())):
        if target.startswith("orchestrator."):
            yield (
                f"`{group}` holds the `_target_` (={target}), which is internal and may change; a target must be your "
                f"own; name a built-in component by `{group}.kind`."
            )


def _own_violations(name: str, node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the error of a `_target_` that names no training function."""
    if str(node["_target_"]).split(".")[0] in sources.OURS:
        yield f"`{name}._target_` (={node['_target_']}) must be your own function; pass null for the built-in loop."
    else:
        yield from _target_violations(name, node)


def _name_violations(name: str) -> Iterator[str]:
    try:
        component(f"{name}-12345678", "name")  # part of file names in the store, with a digest after it
    except StoreError as error:
        yield f"{str(error).replace('-12345678', '')}."


def _built_violations(group: str, node: Any) -> Iterator[str]:
    """Yield the errors of a component's name: a built-in has a `kind`, a custom component a `_target_`."""
    kinds = config_groups.GROUPS[group].rows
    kind, target = (node.get("kind"), node.get("_target_")) if isinstance(node, Mapping) else (None, None)
    if kind and target:
        yield (
            f"`{group}.kind` (={kind}) and `{group}._target_` (={target}) are both given; pass exactly one: "
            f"leave out the kind, or choose `override /{group}: {config_groups.OWN}` in the `defaults` of a file that "
            "sets the target."
        )
    elif target:
        name = str(target).rpartition(".")[2].lower().replace("_", "")
        if str(target).split(".")[0] in sources.OURS:
            meant = next((kind for kind in kinds if kind.replace("_", "") == name), None)
            remedy = f"pass `{group}={meant}`, or `kind: {meant}` in a file" if meant else f"one of {', '.join(kinds)}"
            yield f"`{group}._target_` (={target}) must be your own; a built-in component has a `kind`: {remedy}."
        else:
            yield from _target_violations(group, node)
    elif not kind and (group != "method" or not isinstance(node, Mapping)):
        own = any(option.name == "_target_" for option in config_groups.GROUPS[group].own)
        or_own = f", or a `_target_` of your own, as in `{group}._target_=package.Thing`" if own else ""
        yield f"`{group}` (={node!r}) must name what to build: add a `kind`, one of {', '.join(kinds)}{or_own}."
    elif kind is None and (odd := [key for key in node if key not in ("name", "kind", "_target_", "depends")]):
        yield (
            f"`{group}.{odd[0]}` (={node[odd[0]]}) is an argument, but `{group}` names no class; add `_target_: "
            f"package.Thing` to its file for your own, or `kind: NAME` for one of {', '.join(kinds)}."
        )
    elif kind is not None and kind not in tuple(kinds):
        yield f"`{group}.kind` (={kind}) must be one of {', '.join(kinds)}."
    else:
        known = well_formed.keys(config_groups.schema_of(group, kind))
        common = {option.name for option in (*config_groups.NETWORK, *config_groups.GROUPS[group].own)}
        for key in [key for key in node if key not in known]:
            taken = ", ".join(name for name in known if name not in common)
            yield (
                f"`{group}.{key}` (={node[key]}) is not an argument of {kind}, which takes {taken or 'none'}; leave it "
                f"out, or choose `{group}={kind}`."
            )


def _target_violations(name: str, node: Mapping[str, Any]) -> Iterator[str]:
    try:
        sources.locate(str(node["_target_"]))
    except sources.SourceError as error:
        yield f"`{name}._target_` (={node['_target_']}) {error}"
