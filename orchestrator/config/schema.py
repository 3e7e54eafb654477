"""The typed schema of a sweep's configuration, and the rules its values must keep. OmegaConf stops here.

`register` puts the dataclasses into Hydra's ConfigStore, so that Hydra refuses a misspelled key or a wrong type as it
composes. `violations` holds a resolved, plain configuration to every rule that can be checked without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from orchestrator.config import cluster, components, sources, well_formed
from orchestrator.config.objective import OBJECTIVES
from orchestrator.core.errors import OrchestratorError, StoreError
from orchestrator.core.file_names import component
from orchestrator.core.metrics import ACCURACY
from pruning import schedule as schedules

MOST_ROUNDS = 10_000
"""A longer schedule is a slip of the keyboard, and its plan would fill the memory."""


NORMS = (*well_formed.INFINITIES, "fro", "nuc")


class ConfigError(OrchestratorError):
    """A configuration that cannot be planned; the text lists every reason."""

    exit_status = 2


@dataclass
class Schedule:
    """What each round prunes: a path to the overall `sparsity` over `rounds`, or the raw `amount` of every round."""

    kind: str = "geometric"
    sparsity: float | None = None
    rounds: int = 1
    amount: Any = None


@dataclass
class Prune:
    """Which parameters are pruned, by module type and name, less what the patterns leave out, and how they are held."""

    types: list[str] = field(
        default_factory=lambda: [
            "Linear",
            "Conv1d",
            "Conv2d",
            "Conv3d",
            "ConvTranspose1d",
            "ConvTranspose2d",
            "ConvTranspose3d",
        ]
    )
    parameters: list[str] = field(default_factory=lambda: ["weight"])
    include: list[str] = field(default_factory=lambda: ["*"])
    exclude: list[str] = field(default_factory=list)
    holding: str = "keeper"
    """What holds the masks while fine-tuning: a `keeper`, or `hooks`, which are as those of `torch.nn.utils.prune`."""


@dataclass
class Tracking:
    """Where the view of the sweep goes: `mlflow` or `none`."""

    kind: str = "mlflow"
    uri: str | None = None
    experiment: str = "pruning"


@dataclass
class Store:
    """Where finished stages are kept, and how much of them: see `orchestrator.store.store`."""

    uri: str = "store"
    keep: str = "needed"
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the fsspec file system, such as `endpoint_url` of an S3 server."""


@dataclass
class Compare:
    """How trials are compared: what they are does not depend on it."""

    margin: float = ACCURACY.margin
    """The loss of test accuracy against dense, a fraction, that a match may hide."""


@dataclass
class Config:
    """The root of a trial's configuration. Groups whose keys belong to the user's own target are open."""

    name: str | None = None
    seed: int = 0
    dry_run: bool = False
    objective: str = "val/accuracy"
    model: Any = MISSING
    data: Any = MISSING
    train: components.Train = field(default_factory=components.Train)
    method: Any = MISSING
    schedule: Schedule = field(default_factory=Schedule)
    finetune: components.Train = field(default_factory=components.Train)
    prune: Prune = field(default_factory=Prune)
    cluster: cluster.Cluster = field(default_factory=cluster.Cluster)
    tracking: Tracking = field(default_factory=Tracking)
    store: Store = field(default_factory=Store)
    compare: Compare = field(default_factory=Compare)


NODES: Mapping[str, Mapping[str, type]] = {
    "model": components.MODELS,
    "data": components.DATA,
    "method": {"base": components.Method, **components.METHODS},
}


def register() -> None:
    """Put the schema into Hydra's ConfigStore: `/hydra/schema/config` and one node for each built-in of a group."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(group="hydra/schema", name="config", node=Config, package="_global_")
    store.store(group="hydra/schema", name="cluster", node=cluster.Cluster)
    for group, nodes in NODES.items():
        for name, node in nodes.items():
            store.store(group=f"hydra/schema/{group}", name=name, node=node)


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each rule that a plain, resolved trial configuration breaks.

    Each quotes argument, value, rule and remedy. Nothing is imported that the configuration names: targets are looked
    up as files, so this is safe and fast on any machine.
    """
    malformed = [
        *well_formed.missing(Config, config),
        *well_formed.unknown(Config, config, groups=("sweep",)),
        *well_formed.odd_values(config),
    ]
    if malformed:
        yield from malformed
        return
    if config["seed"] < 0:
        yield f"`seed` (={config['seed']}) must be at least 0; pass any other integer."
    if config["name"] is not None:
        yield from _name_violations(config["name"])
    yield from _schedule_violations(config["schedule"], takes_amount=not is_identity(config["method"]))
    for group in components.BUILT_IN:
        yield from _built_violations(group, config[group])
    yield from _method_violations(config["method"])
    for name in ("model", "data", "method", "train", "finetune"):
        yield from sources.unreadable(name, config[name])
    for name in ("train", "finetune"):
        yield from components.violations(name, config[name])
        for part in ("optimizer", "scheduler", "loss"):
            if isinstance(config[name][part], Mapping) and config[name][part].get("_target_"):
                yield from _target_violations(f"{name}.{part}", config[name][part])
    if isinstance(config["model"], Mapping):
        yield from components.model_violations("model", config["model"])
    if isinstance(config["data"], Mapping):
        yield from components.split_violations("data", config["data"])
    yield from cluster.validate(config["cluster"])
    yield from _choice("objective", config["objective"], OBJECTIVES)
    yield from _choice("tracking.kind", config["tracking"]["kind"], ("mlflow", "none"))
    if not config["tracking"]["experiment"].strip():
        yield "`tracking.experiment` (='') must be a name; pass pruning for the default."
    yield from _choice("store.keep", config["store"]["keep"], ("needed", "all"))
    yield from margin_violations("compare.margin", config["compare"]["margin"])
    yield from _choice("prune.holding", config["prune"]["holding"], ("keeper", "hooks"))
    for name in ("types", "parameters", "include"):
        if not config["prune"][name]:
            yield f"`prune.{name}` (=[]) must hold a pattern, or nothing is pruned; pass ['*'] to take every one."


def margin_violations(name: str, margin: float) -> Iterator[str]:
    """Yield a sentence where `margin` is no loss of accuracy."""
    if not 0.0 <= margin < 1.0:
        yield f"`{name}` (={margin}) must lie in [0, 1): it is a fraction; pass 0.01 for one point."


def is_identity(method: Mapping[str, Any]) -> bool:
    """Whether a method prunes nothing and so takes no amount."""
    return method.get("kind") == "identity"


def _schedule_violations(schedule: Mapping[str, Any], *, takes_amount: bool) -> Iterator[str]:
    sparsity, amount, rounds = schedule["sparsity"], schedule["amount"], schedule["rounds"]
    if not 1 <= rounds <= MOST_ROUNDS:
        limit = "at least 1" if rounds < 1 else f"at most {MOST_ROUNDS}"
        yield f"`schedule.rounds` (={rounds}) must be {limit}; pass 1 to prune in one step."
    if not takes_amount:
        return
    if (sparsity is None) == (amount is None):
        given, remedy = "neither", "the overall sparsity to end at, or the amount that each round takes."
        if amount is not None:
            given, remedy = "both", "add `schedule.sparsity=null` (a preset may set it) or `schedule.amount=null`."
        yield (
            f"`schedule.sparsity` (={sparsity}) and `schedule.amount` (={amount}) are {given} given; pass exactly one: "
            f"{remedy}"
        )
    elif amount is not None:
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            yield f"`schedule.amount` (={amount!r}) must be a number; pass a float for a fraction, an int for a count."
        elif isinstance(amount, float) and not 0.0 <= amount <= 1.0:
            yield (
                f"`schedule.amount` (={amount}) must lie in [0, 1] when it is a float; pass an int to prune a count."
            )
        elif isinstance(amount, int) and amount < 0:
            yield f"`schedule.amount` (={amount}) must not be negative; pass 0 to prune nothing."
    elif not (math.isfinite(sparsity) and 0.0 <= sparsity < 1.0):
        yield (
            f"`schedule.sparsity` (={sparsity}) must lie in [0, 1): it is the fraction of prunable weights that are "
            "zero in the end; pass 0.9 to keep a tenth of them."
        )
    if amount is None:
        yield from _choice("schedule.kind", schedule["kind"], tuple(schedules.KINDS))


def _method_violations(method: Mapping[str, Any]) -> Iterator[str]:
    scope, kind = method.get("scope", "layer"), method.get("kind")
    yield from _choice("method.scope", scope, ("layer", "global"))
    if not hasattr(components.METHODS.get(str(kind)), "dim"):
        return
    if scope == "global":
        yield (
            f"`method.scope` (=global) ranks single entries of all tensors, and {kind} takes whole channels of one; "
            "pass method.scope=layer, or an unstructured method."
        )
    if not isinstance(method.get("dim", 0), int) or isinstance(method.get("dim"), bool):
        yield f"`method.dim` (={method['dim']}) must be an integer: the dimension whose slices are the channels."
    n = method.get("n", 2)
    if isinstance(n, bool) or not (isinstance(n, int | float) or n in NORMS):
        yield f"`method.n` (={n}) must be a number or one of {', '.join(NORMS)}: the order of the norm; pass 2."


def _name_violations(name: str) -> Iterator[str]:
    try:
        component(f"{name}-12345678", "name")  # it names files of the store, with a digest behind it
    except StoreError as error:
        yield f"{str(error).replace('-12345678', '')}."


def _built_violations(group: str, node: Any) -> Iterator[str]:
    """Yield what is wrong with how a model, data set or method is named: a built-in by `kind`, or by `_target_`."""
    kinds = components.BUILT_IN[group]
    kind, target = (node.get("kind"), node.get("_target_")) if isinstance(node, Mapping) else (None, None)
    if kind and target:
        yield (
            f"`{group}.kind` (={kind}) and `{group}._target_` (={target}) are both given; pass exactly one: add "
            f"`{group}.kind=null` to build your own."
        )
    elif target:
        name = str(target).rpartition(".")[2].lower().replace("_", "")
        if str(target).split(".")[0] in sources.OURS:
            meant = next((kind for kind in kinds if kind.replace("_", "") == name), None)
            remedy = f"pass `{group}={meant}`, or `kind: {meant}` in a file" if meant else f"one of {', '.join(kinds)}"
            yield f"`{group}._target_` (={target}) must be your own; what is built in has a `kind`: {remedy}."
        else:
            yield from _target_violations(group, node)
    elif not kind:
        yield (
            f"`{group}` (={node!r}) must name what to build: add a `kind`, one of {', '.join(kinds)}, or a `_target_` "
            f"of your own, as in `{group}._target_=package.Thing`."
        )
    elif kind not in tuple(kinds):
        yield from _choice(f"{group}.kind", kind, tuple(kinds))
    else:
        known = [key for key in vars(kinds[kind]()) if key not in vars(components.Component())]
        for key in [key for key in node if key not in vars(kinds[kind]())]:
            yield (
                f"`{group}.{key}` (={node[key]}) is no argument of {kind}, which takes {', '.join(known)}; take it "
                f"out, or choose `{group}={kind}` with all that belongs to it."
            )


def _target_violations(name: str, node: Mapping[str, Any]) -> Iterator[str]:
    try:
        sources.locate(str(node["_target_"]))
    except sources.SourceError as error:
        yield f"`{name}._target_` (={node['_target_']}) {error}"


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> Iterator[str]:
    if value not in choices:
        yield f"`{name}` (={value}) must be one of {', '.join(choices)}."
