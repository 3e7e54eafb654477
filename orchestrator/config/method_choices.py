"""Config groups for the choices that make a pruning method; no torch.

`pruning.choices` defines the values and their combinations: the schemas are derived from its dataclasses, and
`violations` quotes the engine's errors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from orchestrator.config import round_amounts
from orchestrator.config.key_rules import key
from orchestrator.core import stage_fields
from orchestrator.core.plain_data import read_as
from orchestrator.core.restart_kinds import control_of
from orchestrator.core.stage_fields import RANKING, Component, StageFields, choices_of
from pruning.catalogue.allocations import ALLOCATIONS
from pruning.catalogue.dynamics import DYNAMICS
from pruning.catalogue.methods import METHODS
from pruning.catalogue.reconstructions import SOLVERS
from pruning.catalogue.rows import one_of
from pruning.choices import axes
from pruning.choices.combining import Choices
from pruning.choices.published import PUBLISHED, Method
from pruning.errors import Refused

CHOICES = ("score", "unit", "scope", "dynamics", "repair")
"""Groups that define how a round ranks."""


def schema_of_axis(
    axis: type, *, words: Mapping[str, Collection[str]] | None = None, more: Sequence[tuple[str, Any, Any]] = ()
) -> type:
    """Convert a choice of the engine to a dataclass for OmegaConf: text for literals, dicts for mappings.

    Args:
        axis: a class of `pruning.choices.axes`.
        words: field -> its allowed values, if the engine has a catalogue of them.
        more: name, type and field of keys that only a sweep has.
    """
    hints = get_type_hints(axis)
    made = []
    for each in fields(axis):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        rules = [one_of(*words[each.name])] if words and each.name in words else []
        made.append((each.name, _plain_type(hints[each.name]), key(default, *rules)))
    schema = make_dataclass(axis.__name__, [*made, *more], namespace={"AXIS": axis})
    schema.__module__ = __name__  # where pickle finds it
    return schema


def _plain_type(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) is Mapping:
        return dict[get_args(hint)]  # type: ignore[misc]  # at run time
    if type(None) in get_args(hint):
        (kind,) = (each for each in get_args(hint) if each is not type(None))
        return _plain_type(kind) | None
    return hint


if TYPE_CHECKING:
    Unit: TypeAlias = Any
    Scope: TypeAlias = Any
else:
    Unit = schema_of_axis(axes.Unit)
    Scope = schema_of_axis(
        axes.Scope, words={"allocation": ALLOCATIONS}, more=[(round_amounts.KEY, str | None, round_amounts.NAME)]
    )


def scored_as(score: Mapping[str, Any], at: str, dynamics: str | None) -> Mapping[str, Any]:
    """Replace a null `batch_norm` of a score by its default: `train` before the training, else `eval`."""
    if score.get("batch_norm", "") is not None:
        return score
    row = DYNAMICS.get(str(dynamics))
    before = at == "start" or (at == "during" and row is not None and row.keeps_counts)
    return {**score, "batch_norm": "train" if before else "eval"}


def order_of(config: Mapping[str, Any]) -> str:
    """Return the order in which a round prunes its layers; null in the configuration follows the score."""
    given = config["schedule"]["order"]
    is_solver = config["score"].get("kind") in SOLVERS and not decides_itself(config["method"])
    return str(given or ("sequential" if is_solver else "at_once"))


def called(config: Mapping[str, Any]) -> str | None:
    """Return a method's name in reports. The name tells a score, a dynamics, or the units that replace its own."""
    method, dynamics = config["method"], config.get("dynamics", {})
    name, own = _ranked_by(config), dynamics.get("name") or dynamics.get("kind")
    if (target := dynamics.get("_target_")) is not None:
        own = dynamics.get("name") or str(target).rpartition(".")[2]
    elif (row := DYNAMICS.get(str(own))) is None or not row.in_training:
        return name
    published = PUBLISHED.get(str(method.get("name")))
    if published is not None and published.choices.dynamics.kind == own:
        return name
    return str(own) if name in (RANKING, "magnitude") else f"{name}, dynamics={own}"


def _ranked_by(config: Mapping[str, Any]) -> str | None:
    """Return a method's name; if another score replaces the method's own, the name tells that score."""
    method, score = config["method"], config["score"]
    name: str | None = method.get("name")
    kind = score.get("kind")
    published = PUBLISHED.get(str(name))
    if decides_itself(method) or (published is None and method.get("kind") != RANKING):
        return name
    usual = published.choices.score.kind if published else "magnitude"
    if kind == usual:
        units = [] if published or name not in (None, RANKING) else [*_other_units(config)]
        return ", ".join(["magnitude", *units]) if units else name
    instead = score.get("name") or str(score.get("_target_")).rpartition(".")[2]
    if method.get("kind") == RANKING or (published and _chooses_a_score_alone(published)):
        return instead
    return f"{name}, score={instead}"


def _other_units(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the choices by which a ranking by magnitude is not that of the class `RANKING`, entries of each tensor."""
    for part, field, own in (("unit", "kind", "entry"), ("scope", "kind", "layer"), ("scope", "allocation", "each")):
        if (found := config.get(part, {}).get(field, own)) != own:
            yield f"{part if field == 'kind' else field}={found}"


def _chooses_a_score_alone(published: Method) -> bool:
    """Whether a method differs from pruning by magnitude by nothing but its score."""
    others = [each.name for each in fields(Choices) if each.name != "score"]
    return not published.restart and all(
        getattr(published.choices, each) == getattr(Choices(), each) for each in others
    )


def decides_itself(method: Mapping[str, Any]) -> bool:
    """Whether a method is a class that decides which entries to prune, without a score."""
    return stage_fields.decides_itself(read_as(Component, method))


def prunes_channels(method: Mapping[str, Any]) -> bool:
    """Whether a method is a built-in class that prunes whole channels."""
    row = METHODS.get(str(method.get("kind")))
    return row is not None and row.channels


def published_at_start(config: Mapping[str, Any]) -> bool:
    """Whether the paper of a trial's method prunes the initialised network, before its training."""
    published = PUBLISHED.get(str(config["method"].get("name")))
    return published is not None and published.at == "start"


TYPED = {"control.kind": "restart.control", "sparsity": "schedule.sparsity", "select": "method.kind"}
"""Choice of the engine -> its key in a configuration; other choices have equal keys."""
OF_A_CLASS = TYPED | {"unit.dim": "method.dim"}
"""The same where a class decides."""


def sentence(error: Refused, *, by_class: bool = False) -> str:
    """Return what the engine says of a choice, with the key as users type it; `by_class` if a class decides."""
    return error.named((OF_A_CLASS if by_class else TYPED).get(error.key, error.key))


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each choice that has no meaning, alone or together with others."""
    schedule, method = config["schedule"], config["method"]
    if method.get("_target_") and not method.get("kind") and method.get("name") in PUBLISHED:
        yield (
            f"`method` (={method['name']}) and `method._target_` (={method['_target_']}) are both given; leave out "
            f"method={method['name']}, or pass another `method.name`."
        )
        return
    if decides_itself(method) and (told := [*_of_a_class(config)]):
        yield from told
        return
    scope_file = config["scope"].get(round_amounts.KEY)
    config = {**config, "scope": round_amounts.without_file(config["scope"])}
    fields: dict[str, Any] = {name: config[name] for name in ("method", *CHOICES)}
    fields |= {"inner": schedule["inner"], "order": order_of(config)}
    control = control_of(config)
    fields["restart"] = {"control": control.name}
    try:
        for each in ("unit", "scope"):
            getattr(axes, each.capitalize())(**config[each])
        choices = choices_of(fields, read_as(StageFields, fields))
    except Refused as error:
        yield sentence(error)
        return
    if decides_itself(method):
        return
    of_magnitudes = method.get("kind") == RANKING and config["score"].get("kind") == "magnitude"
    if schedule["amount"] is not None and not of_magnitudes:
        yield (
            f"`schedule.amount` (={schedule['amount']}) is for a class such as method={RANKING}, but "
            f"`score` (={_named(config['score'])}) ranks to a sparsity; pass schedule.sparsity and "
            "schedule.amount=null."
        )
    elif schedule["amount"] is not None:
        yield from _of_a_class(config)
    if choices.schedule.order == "sequential" and control.shuffles:
        yield (
            f"`restart.control` (={control.name}) shuffles a mask, but in the sequential order the weights are updated "
            "for it; pass restart.control=none, or method=random for a control."
        )
    scope, rounds, sparsity = choices.scope, schedule["rounds"], schedule["sparsity"]
    if scope.kind == "window":
        exact = 1 - scope.n / scope.m
        if rounds > 1 or (sparsity is not None and abs(sparsity - exact) > 1e-9):
            yield (
                f"`schedule.sparsity` (={sparsity}) over `schedule.rounds` (={rounds}) must be {exact:g} in one round: "
                f"scope=window keeps {scope.n} of each {scope.m}; pass schedule=one_shot schedule.sparsity={exact:g}."
            )
    if scope.allocation == "given" and sparsity is not None and scope_file is None:
        yield (
            f"`schedule.sparsity` (={sparsity}) must be null with scope.allocation=given, where `scope.densities` "
            "define the survivors; pass schedule.sparsity=null, or the densities by `scope.densities_file`."
        )


def _of_a_class(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each choice that the class of a method does not read."""
    plain, method, scope = Choices(), config["method"], config["scope"]
    named = method.get("name") or method.get("kind") or method.get("_target_")
    if config["schedule"]["amount"] is not None and not decides_itself(method):
        named = f"{named} with schedule.amount"
    chosen = {
        "score": (_named(config["score"]), plain.score.kind),
        "unit": (config["unit"]["kind"], plain.unit.kind),
        "scope.allocation": (scope["allocation"], plain.scope.allocation),
        "dynamics": (_named(config["dynamics"]), plain.dynamics.kind),
        "repair": (config["repair"]["kind"], plain.repair.kind),
        "schedule.inner": (config["schedule"]["inner"], plain.schedule.inner),
        "schedule.order": (order_of(config), plain.schedule.order),
    }
    for name, (value, default) in chosen.items():
        if value != default:
            yield (
                f"`{name}` (={value}) is for ranking by a score, but `method` (={named}) is a class that decides "
                f"itself; pass method=magnitude, or leave out `{name}`."
            )
    if scope["kind"] not in ("layer", "global"):
        yield (
            f"`scope` (={scope['kind']}) is for ranking by a score, but `method` (={named}) is a class that takes only "
            "layer or global; pass method=magnitude, or another scope."
        )
    if (control := control_of(config)).inverts:
        yield (
            f"`restart.control` (={control.name}) inverts scores, but `method` (={named}) has no scores; pass "
            "method=magnitude, or another control."
        )
    if scope["kind"] == "global" and prunes_channels(method):
        yield (
            f"`scope` (=global) ranks entries of all tensors, but {method['kind']} prunes whole channels of one "
            "tensor; pass scope=layer, or method=magnitude unit=channel."
        )


def _named(score: Mapping[str, Any]) -> Any:
    return score.get("kind") or score.get("_target_")
