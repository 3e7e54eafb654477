"""The typed schema of a sweep's configuration, and the rules its values must keep. OmegaConf stops here.

`register` puts the dataclasses into Hydra's ConfigStore, so that Hydra refuses a misspelled key or a wrong type as it
composes. `violations` holds a resolved, plain configuration to every rule that can be checked without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from orchestrator.config import cluster, config_groups, sources, well_formed
from orchestrator.config.key_rules import key
from orchestrator.config.key_rules import violations as broken
from orchestrator.config.parts import deploy, method_choices, results, round_amounts, training
from orchestrator.core.errors import OrchestratorError, StoreError
from orchestrator.core.file_names import component
from pruning.catalogue.value_rules import Rule, at_least


class ConfigError(OrchestratorError):
    """A configuration that cannot be planned; the text lists every reason."""

    exit_status = 2


MATCHING = "matching_sparsity"
SIZES = ("sparsity/overall", "parameters/remaining", "macs/remaining")
"""What a search may be told beside metrics: figures of the last round's record."""
_MEASURED = re.compile(r"deploy/((\w+/\d+/)?(latency_ms|speedup)|(\w+/)?bytes)")


def _is_objective(name: Any) -> bool:
    if not isinstance(name, str):
        return False
    known = name in (MATCHING, *SIZES) or _MEASURED.fullmatch(name) is not None
    return known or (name.startswith("val/") and name[4:].isidentifier())


_OBJECTIVE = Rule(
    lambda given: bool(given) and all(map(_is_objective, given if isinstance(given, list) else [given])),
    f"be val/ and the name of a metric, as in val/loss, or one of {MATCHING}, {', '.join(SIZES)}, deploy/latency_ms, "
    "deploy/speedup, deploy/bytes, or a list of these; the test split is not to select by",
)


def objectives(given: str | Sequence[str] | None) -> list[str | None]:
    """Return the names that `objective` holds; None is the primary metric."""
    return [given] if given is None or isinstance(given, str) else list(given)


def _objective_violations(config: Mapping[str, Any]) -> Iterator[str]:
    formats, sizes = config["deploy"]["formats"], config["deploy"]["batch_sizes"]
    places = [f"{each}/{size}" for each in formats for size in sizes]
    for name in objectives(config["objective"]):
        if name is None or not name.startswith("deploy/"):
            continue
        place = name.partition("/")[2].rpartition("/")[0]
        if not formats:
            yield f"`objective` (={name}) is measured where the network is deployed; pass deploy=shrink, or another."
        elif place and place not in (*formats, *places):
            yield f"`objective` (={name}) must be of a format and batch size of `deploy`: {', '.join(places)}."


@dataclass
class Config:
    """The root of a trial's configuration. Groups whose keys belong to the user's own target are open."""

    name: str | None = None
    """What the sweep is called in the store, in reports and in MLflow, with a digest behind it; null: the preset's
    name."""
    seed: int = key(0, at_least(0, "; pass any other integer"))
    """Initialisation, order of the data and random masks follow from it."""
    dry_run: bool = False
    """Print the plan (trials, shared stages, resources), and run nothing."""
    retry_failed: bool = False
    """Try again what has failed before and would fail so again, as a loss that diverged."""
    objective: Any = key(None, _OBJECTIVE.or_null())
    """What a search plugin is told of a trial: a metric of its last round on the validation split, as in `val/loss`
    (null: the primary one), a size, a measured latency, `matching_sparsity`, or a list of these."""
    model: Any = MISSING
    """The network."""
    data: Any = MISSING
    """The data set, and how it is split."""
    task: Any = MISSING
    """What is learned: the loss and the metrics."""
    train: training.Train = field(default_factory=training.Train)
    """How the dense network is trained."""
    score: Any = MISSING
    """What ranks the entries."""
    unit: method_choices.Unit = field(default_factory=method_choices.Unit)
    """What is pruned at once."""
    scope: method_choices.Scope = field(default_factory=method_choices.Scope)
    """Among which units is ranked, and how many each tensor keeps."""
    dynamics: method_choices.Dynamics = field(default_factory=method_choices.Dynamics)
    """Whether what was pruned may return."""
    repair: Any = MISSING
    """What is done to the survivors."""
    method: Any = MISSING
    """How entries are chosen: by a published combination of these choices, or by a class."""
    schedule: round_amounts.Schedule = field(default_factory=round_amounts.Schedule)
    """How much each round prunes, and when."""
    finetune: training.Train = field(default_factory=training.Train)
    """How the network is trained after each round of pruning: the keys of `train`."""
    restart: training.Restart = field(default_factory=training.Restart)
    """What a round trains on from."""
    prune: round_amounts.Prune = field(default_factory=round_amounts.Prune)
    """Which parameters are pruned."""
    deploy: deploy.Deploy = field(default_factory=deploy.Deploy)
    """In which formats the last network is measured."""
    cluster: cluster.Cluster = field(default_factory=cluster.Cluster)
    """Where trials run, and what each of them takes."""
    tracking: results.Tracking = field(default_factory=results.Tracking)
    """Where the view of the sweep goes."""
    store: results.Store = field(default_factory=results.Store)
    """Where finished stages are kept."""
    compare: results.Compare = field(default_factory=results.Compare)
    """How trials are compared."""


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each rule that a plain, resolved trial configuration breaks.

    Each quotes argument, value, rule and remedy. Nothing is imported that the configuration names: targets are looked
    up as files, so this is safe and fast on any machine.
    """
    malformed = [
        *well_formed.missing(Config, config),
        *well_formed.unknown(Config, config, groups=("sweep",)),
        *well_formed.odd_values(config),
        *well_formed.mistyped(Config, config),
    ]
    if malformed:
        yield from malformed
        return
    if wrong := list(broken("", Config, config)):
        yield from wrong
    else:
        yield from _objective_violations(config)
    if config["name"] is not None:
        yield from _name_violations(config["name"])
    if not (isinstance(config["method"], Mapping) and round_amounts.is_identity(config["method"])):
        yield from round_amounts.given_once(config)
    for group in config_groups.GROUPS:
        yield from _built_violations(group, config[group])
        if isinstance(config[group], Mapping):
            yield from config_groups.violations_of(group, config[group])
            for target in sources.targets(list(config[group].values())):
                if target.startswith("orchestrator."):
                    yield (
                        f"`{group}` holds the `_target_` (={target}), which is ours and may move or change; a target "
                        f"must be your own, and what is built in is named by `{group}.kind`."
                    )
    if all(isinstance(config[group], Mapping) for group in ("method", "score", "repair")):
        yield from method_choices.violations(config)
    for name in ("model", "data", "task", "score", "method", "train", "finetune"):
        yield from sources.unreadable(name, config[name])
    if config["train"]["teacher"] is not None:
        yield (
            f"`train.teacher` (={config['train']['teacher']}) must be null: the dense network is what `train` trains; "
            "pass finetune.teacher=dense."
        )
    for name in ("train", "finetune"):
        if config[name]["_target_"] is not None:
            yield from _own_violations(name, config[name])
        for part in ("optimizer", "scheduler", "loss"):
            if isinstance(config[name][part], Mapping) and config[name][part].get("_target_"):
                yield from _target_violations(f"{name}.{part}", config[name][part])


def _own_violations(name: str, node: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with how a training function is named."""
    if str(node["_target_"]).split(".")[0] in sources.OURS:
        yield f"`{name}._target_` (={node['_target_']}) must be your own function; pass null for the built-in loop."
    else:
        yield from _target_violations(name, node)


def _name_violations(name: str) -> Iterator[str]:
    try:
        component(f"{name}-12345678", "name")  # it names files of the store, with a digest behind it
    except StoreError as error:
        yield f"{str(error).replace('-12345678', '')}."


def _built_violations(group: str, node: Any) -> Iterator[str]:
    """Yield what is wrong with how a component is named: a built-in by `kind`, one's own by `_target_`."""
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
            yield f"`{group}._target_` (={target}) must be your own; what is built in has a `kind`: {remedy}."
        else:
            yield from _target_violations(group, node)
    elif not kind and (group != "method" or not isinstance(node, Mapping)):
        own = any(option.name == "_target_" for option in config_groups.GROUPS[group].own)
        or_own = f", or a `_target_` of your own, as in `{group}._target_=package.Thing`" if own else ""
        yield f"`{group}` (={node!r}) must name what to build: add a `kind`, one of {', '.join(kinds)}{or_own}."
    elif kind is not None and kind not in tuple(kinds):
        yield f"`{group}.kind` (={kind}) must be one of {', '.join(kinds)}."
    else:
        known = well_formed.keys(config_groups.schema_of(group, kind))
        common = {option.name for option in (*config_groups.NETWORK, *config_groups.GROUPS[group].own)}
        for key in [key for key in node if key not in known]:
            taken = ", ".join(name for name in known if name not in common)
            yield (
                f"`{group}.{key}` (={node[key]}) is no argument of {kind}, which takes {taken or 'none'}; take it out, "
                f"or choose `{group}={kind}` with all that belongs to it."
            )


def _target_violations(name: str, node: Mapping[str, Any]) -> Iterator[str]:
    try:
        sources.locate(str(node["_target_"]))
    except sources.SourceError as error:
        yield f"`{name}._target_` (={node['_target_']}) {error}"
