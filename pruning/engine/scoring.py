"""Units of a network and their scores: entries, blocks, channels or groups; a score's options, arguments and call."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from pruning.catalogue.reconstructions import RECONSTRUCTIONS, SOLVERS
from pruning.catalogue.rows import refuse_unknown
from pruning.catalogue.scores import SCORES, ScoreRow
from pruning.choices.axes import Scope, Score, Unit
from pruning.choices.combining import Choices
from pruning.dependencies.dependency_groups import NO_EXAMPLE, DependencyGroups
from pruning.dependencies.families.family_groups import family_groups
from pruning.engine.output_weights import output_weights
from pruning.graph.tracing import first_line
from pruning.holding.default_weights import default_weights
from pruning.holding.parameter import check_generator, joined
from pruning.measure.matrix_weights import NAMED
from pruning.refused import RefusedValue, unfit_call
from pruning.scores.readings.network import Weight, network, weights_of
from pruning.scores.readings.scoring_data import ScoringInput
from pruning.selection.selection_groups import Groups, groups_of

Cut: TypeAlias = Groups | DependencyGroups


def groups(
    model: nn.Module,
    unit: Unit | None = None,
    scope: Scope | None = None,
    parameters: Iterable[str] | None = None,
) -> Groups:
    """Divide the parameters of a network into units.

    Args:
        model: pruned or not.
        unit: entries that are pruned together; None: single entries.
        scope: units that are ranked together; None: those of one tensor.
        parameters: names of the parameters to prune; None: every weight whose layout is known, but for embeddings,
            heads tied to them and routers.

    Raises:
        ValueError: a block or a window does not divide a tensor, or a tensor has no channels along the dimension; the
            message names the tensor.
    """
    return cut_of(weights_of(model, None, parameters), unit, scope)


def cut_of(weights: Mapping[str, Weight], unit: Unit | None, scope: Scope | None) -> Groups:
    """Divide weights into units."""
    shapes = {name: weight.parameter.shape for name, weight in weights.items()}
    return groups_of(shapes, unit, scope, {name: weight.layout for name, weight in weights.items()})


def groups_of_weights(
    model: nn.Module, choices: Choices, example: Any, parameters: Iterable[str] | None
) -> DependencyGroups:
    """Return the dependency groups of a network that remove only outputs of the named weights.

    Units of stock transformers come from their family; others are found by tracing.

    Args:
        model: pruned or not.
        choices: unit and scope are read.
        example: input of the network.
        parameters: names of weights; None: all.

    Raises:
        ValueError: there is no example, the network cannot be traced or is of no family, or no group is left.
    """
    known, named = set(default_weights(model)), set(parameters or ())
    spared = set() if parameters is None else known - named
    if choices.unit.of_transformer:
        found = family_groups(model, choices.unit, choices.scope, example, spared)
    elif example is None:
        raise ValueError(NO_EXAMPLE)
    else:
        from pruning.dependencies.group_finding import dependency_groups  # torch.export takes a second to import

        try:
            found = dependency_groups(model, example, choices.unit, choices.scope)
        except ValueError as error:
            raise RefusedValue("unit.kind", "group").because(f"needs to trace the network: {error}") from error
    left, on_request = [], list[list[str]]()
    for group in found:
        outputs = {each.tensor for each in group.members if each.dims == (found.tensors[each.tensor].outputs,)}
        masked = [*dict.fromkeys(each.tensor for each in group.members if each.masked)]
        if (known | named).isdisjoint(masked):
            on_request.append(masked)
        elif not outputs & spared:
            left.append(group)
    if not any(group.units for group in left):
        if on_request and not named:
            first = [repr(each[0]) for each in on_request]
            raise ValueError(
                f"`parameters` (=None) leaves none of {len(found.groups)} dependency groups: their layers are of no "
                f"known kind; name a weight of each to prune: {', '.join(first[:NAMED])}{' ...' * (len(first) > NAMED)}"
            )
        raise ValueError(
            "`parameters` must name all weights of at least one of the network's "
            f"{len(found.groups)} dependency groups, whose outputs are removed together; name more weights."
        )
    return replace(
        found, groups=tuple(left), on_request=tuple({name: None for masked in on_request for name in masked})
    )


def scored_names(cut: Cut, model: nn.Module, named: Iterable[str] | None) -> list[str]:
    """Return the names of the parameters to score; for dependency groups, all weights in them, and matrices `named`."""
    if isinstance(cut, Groups):
        return list(cut.sizes)
    every = weights_of(model, None, dict.fromkeys([*default_weights(model), *(named or ())]))
    return [name for name, each in every.items() if name in cut.parameters and each.parameter.ndim > 1]


_KEEPING_CHANNELS = frozenset(
    {
        *("relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "mish", "softplus", "hardswish", "hardtanh"),
        *("tanh", "sigmoid", "hardsigmoid", "dropout", "contiguous", "clone"),
        *(f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for dims in (1, 2, 3)),
    }
)
"""Functions and methods that keep every channel at its position."""


def batch_norms_after(model: nn.Module) -> dict[str, str]:
    """Return name of a layer's weight -> name of the scale of the BatchNorm that reads the layer's output.

    Activations, dropout and pooling may come between the two. A layer is left out if no BatchNorm follows it, if it or
    its BatchNorm is called more than once, or if its channels are mixed with others before the BatchNorm.

    Raises:
        ValueError: `torch.fx` cannot trace the forward of `model`.
    """
    with network(model, None, None) as net:
        modules = dict(net.model.named_modules())
        try:
            graph = _Layers().trace(net.model)
        except Exception as error:
            raise ValueError(
                f"`model` ({type(model).__name__}) cannot be traced by torch.fx ({first_line(error)}), which "
                "finds the BatchNorm after each layer; remove branches on inputs from its forward, or choose a score "
                "that does not read BatchNorm."
            ) from error
    calls = Counter(id(modules[str(node.target)]) for node in graph.nodes if node.op == "call_module")
    found: dict[str, str] = {}
    for node in graph.nodes:
        norm = modules[str(node.target)] if node.op == "call_module" else None
        source = _source(node.all_input_nodes, modules) if isinstance(norm, _BatchNorm) and norm.affine else None
        if norm is None or source is None or any(calls[id(each)] > 1 for each in (norm, modules[source])):
            continue
        layer: Any = modules[source]
        if (layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features) != norm.num_features:
            continue
        found.setdefault(joined(source, "weight"), joined(str(node.target), "weight"))
    return {name: found[name] for path in modules if (name := joined(path, "weight")) in found}


class _Layers(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear | _ConvNd | _BatchNorm) or super().is_leaf_module(m, module_qualified_name)


def _source(read: list[fx.Node], modules: dict[str, nn.Module]) -> str | None:
    """Return the name of the one layer whose channels these nodes carry; None if there is none, or several."""
    while len(read) == 1:
        node = read[0]
        module: Any = modules[str(node.target)] if node.op == "call_module" else None
        if isinstance(module, nn.Linear | _ConvNd):
            return str(node.target)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        kind = "" if module is None else type(module).__module__
        keeps = isinstance(module, nn.Identity) or kind.endswith((".activation", ".dropout", ".pooling"))
        if not keeps and (module is not None or name.rstrip("_") not in _KEEPING_CHANNELS):
            return None
        read = node.all_input_nodes
    return None


def compute_scores(
    score: Score, given: ScoringInput, names: Sequence[str], dim: int | None = None
) -> Mapping[str, Tensor]:
    """Compute scores: name -> tensor with the shape of the parameter, or one score per unit for scores of units.

    Args:
        score: the score and its options.
        given: the network, pruned or not, and the scoring data.
        names: names of the parameters to score.
        dim: dimension of the channels; None if units are not channels.

    Raises:
        ValueError: the score is unknown, does not take an option, or lacks something it needs.
    """
    followers = batch_norms_after(given.model) if _reads_batch_norm(score) else {name: name for name in names}
    read = [followers[name] for name in names]
    given = replace(given, parameters=read)
    check_options(score)
    row = row_of(score)
    scores = _own_scores(score, given) if row is None else row.load()(given, **_options(row, score, dim))
    if not isinstance(scores, Mapping):
        raise ValueError(
            f"`score` ({_name(score)}) returned {type(scores).__name__}; it must return a mapping: name of a parameter "
            "-> tensor of scores."
        )
    if wrong := [name for name, values in scores.items() if not isinstance(values, Tensor)]:
        raise ValueError(
            f"`score` ({_name(score)}) returned {type(scores[wrong[0]]).__name__} for {wrong[0]!r}; it must return a "
            "mapping: name of a parameter -> tensor of scores; convert values with torch.as_tensor."
        )
    if scores and read and not any(name in scores for name in read):
        raise ValueError(
            f"`score` ({_name(score)}, which returned names such as {next(iter(scores))!r}) must return scores by the "
            f"names of the parameters to prune, such as {read[0]!r}."
        )
    return {name: scores[other] for name, other in zip(names, read, strict=True) if other in scores}


def _options(row: ScoreRow, score: Score, dim: int | None) -> Mapping[str, Any]:
    """Return the options of a built-in score, including the dimension of the channels if the score takes it."""
    if dim is None or "dim" not in row.unlisted:
        return score.options
    if score.options.get("dim", dim) != dim:
        raise RefusedValue("unit.dim", dim).because(
            f"must equal `dim` (={score.options['dim']!r}) of the score, which ranks along it; pass only unit.dim."
        )
    return {**score.options, "dim": dim}


def _own_scores(score: Score, given: ScoringInput) -> Any:
    """Call a custom score with the arguments that it takes."""
    function = cast(Callable[..., Any], score.kind)
    own = {name: getattr(given, name) for name in SHARED}
    taken = inspect.signature(function).parameters
    if not _takes_any(function):
        own = {name: value for name, value in own.items() if name in taken}
    named = {**own, **score.options}
    try:
        return function(given.model, given.batches, given.loss, **named)
    except (TypeError, AttributeError) as error:
        if unfit := unfit_call(function, given.model, given.batches, given.loss, **named):
            raise ValueError(
                f"`score` ({_name(score)}) is called with (model, batches, loss), but {unfit}; define it as "
                f"{_name(score)}(model, batches, loss, **_)."
            ) from error
        missing = [name for name in ("batches", "loss") if getattr(given, name) is None]
        if not missing:
            raise
        raise ValueError(
            f"`{missing[0]}` (=None) was passed to the score {_name(score)}, which failed with {type(error).__name__}: "
            f"{error}; pass `{'` and `'.join(missing)}` if the score reads them."
        ) from error


SHARED = ("size", "generator", "masks", "parameters")
"""Keyword arguments that every score may take, in addition to model, batches and loss."""


def _takes_any(function: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())


def options_taken(score: Score) -> list[str]:
    """Return the names of the options that a score takes."""
    if row := row_of(score):
        return [*(option.name for option in row.options), *row.unlisted]
    function = cast(Callable[..., Any], score.kind)
    return [
        name for name in inspect.signature(function).parameters if name not in ("model", "batches", "loss", *SHARED)
    ]


def check_options(score: Score) -> None:
    """Raise ValueError for an option that a score does not take, or whose value breaks a rule."""
    if row := row_of(score):
        row.refuse(score.options, "score")
    elif not _takes_any(cast(Callable[..., Any], score.kind)):
        refuse_unknown(score.options, options_taken(score), f"score {_name(score)}", "score")


def check_outputs(score: Score, cut: Cut, weights: Mapping[str, Weight]) -> None:
    """Refuse a score of outputs if the units are channels along another dimension, or hidden units of experts.

    Raises:
        ValueError: the dimensions differ, or a tensor stacks the matrices of experts; the message names the tensor.
    """
    row = row_of(score)
    if row is None or (not row.units and score.options.get("form", "entry") == "entry"):
        return
    if isinstance(cut, DependencyGroups):
        if of_experts := [group.name for group in cut if group.pools > 1]:
            raise RefusedValue("score.kind", score.kind).because(
                f"ranks outputs of layers, but {of_experts[0]!r} stacks the matrices of experts; type a score of "
                "entries, such as 'magnitude' or 'taylor'."
            )
        return
    if cut.unit.kind != "channel" or "dim" in row.unlisted:
        return
    for part in cut:
        layout = weights[part.name].layout
        if layout is None or not layout.is_oriented or part.order[0] != layout.outputs:
            known = layout is not None and layout.is_oriented
            outputs = (layout.outputs if "stack" in layout.roles else 0) if layout is not None and known else "known"
            raise RefusedValue("unit.dim", cut.unit.dim).because(
                f"must be {outputs}, the dimension of the outputs of {part.name!r}, which the score {_name(score)} "
                f"ranks; type {outputs}, or choose a score of entries."
            )


def generator_of(score: Score, generator: torch.Generator | None) -> torch.Generator | None:
    """Return the generator of a score; a random score without one gets a new generator, seeded by torch's default one.

    Without it, the score would not advance the default generator, and draw the same numbers at the next call.
    """
    check_generator(generator)
    if generator is None and (row := row_of(score)) and row.draws:
        return torch.Generator().manual_seed(int(torch.randint(2**63 - 1, ())))
    return generator


def row_of(score: Score) -> ScoreRow | None:
    """Return the catalogue row of a built-in score, None for a custom function.

    Raises:
        ValueError: the name is unknown, or ranks only layer by layer.
    """
    if callable(score.kind):
        return None
    if score.kind in SOLVERS:
        raise no_plan(score)
    if score.kind not in SCORES:
        raise RefusedValue("score.kind", score.kind).because(f"must be a function, or one of {', '.join(SCORES)}.")
    return SCORES[score.kind]


def score_for(score: Score, unit: str) -> Score:
    """Return the score that ranks a unit in the place of `score`: some rank whole layers or experts by another one."""
    row = row_of(score)
    return replace(score, kind=row.for_units[unit]) if row is not None and unit in row.for_units else score


def no_plan(score: Score) -> ValueError:
    """Return the error for a method that prunes layer by layer, where one plan for all layers is asked for."""
    also = ", or pass order='at_once', which takes statistics of the network as it is" if score.kind in SCORES else ""
    return RefusedValue("schedule.order", "sequential").because(
        f"prunes by {_name(score)} layer by layer, each with the pruned layers before it, so no plan comes first; call "
        f"pruning.layerwise(model, {_name(score)!r}, batches, sparsity=0.5) with batches that the model is called with"
        f"{also}."
    )


def names_to_score(model: nn.Module, score: Score, parameters: Iterable[str] | None) -> Iterable[str] | None:
    """Return the names of the parameters to prune; scores of BatchNorm need a layer that a BatchNorm follows."""
    if not _reads_batch_norm(score):
        return parameters
    followed = batch_norms_after(model)
    names = [name for name in (followed if parameters is None else parameters) if name in followed]
    if not names:
        raise RefusedValue("score.kind", score.kind).because(
            "ranks channels by the BatchNorm after their layer, but no layer is followed by one; choose another score, "
            "or other parameters."
        )
    return names


def pruned_if_named(model: nn.Module, choices: Choices, names: Collection[str]) -> list[str]:
    """Return the weights that the choices prune where they are named, among those that stay dense by default.

    Single entries are pruned in any tensor, unless the method reads the inputs of layers; all else needs the layout of
    a layer. A plan of dependency groups has its own answer: `details["on_request"]`.
    """
    if choices.unit.spans or not names:
        return []
    by_inputs = choices.schedule.order == "sequential" or ((row := row_of(choices.score)) and row.calibrated)
    if choices.unit.kind == "entry" and choices.scope.kind in ("layer", "global") and not by_inputs:
        return [*names]
    layouts = {name: weight.layout for name, weight in weights_of(model, None, names).items()}
    return [name for name, layout in layouts.items() if layout is not None and layout.is_oriented]


def names_by_choices(
    model: nn.Module, choices: Choices, parameters: Iterable[str] | None, example: Any
) -> Iterable[str] | None:
    """Return the names of the parameters to prune, by default without what the choices spare; None: all weights.

    Raises:
        ValueError: nothing is left.
    """
    spared, doubt = spared_weights(model, choices, example)
    if parameters is None and doubt:
        warnings.warn(doubt, stacklevel=4)
    if parameters is None:
        return without_spared(list(weights_of(model)), spared, choices) if spared else None
    names = list(weights_of(model, None, parameters))
    if choices.unit.kind == "channel" and (own := [name for name in names if name in spared]):
        warnings.warn(
            f"channels of {', '.join(own)} are outputs of the network, or whole experts: those that are pruned answer "
            "0, or the bias, to every input; leave the layer out of `parameters`, in a sweep by prune.exclude.",
            stacklevel=4,
        )
    return names


def without_spared(names: Sequence[str], spared: Container[str], choices: Choices) -> list[str]:
    """Return the names that the choices do not spare; raise ValueError if none is left."""
    if left := [name for name in names if name not in spared]:
        return left
    raise RefusedValue("unit.kind", choices.unit.kind).because(
        f"leaves nothing to prune, because the outputs of {', '.join(names[:3])} are taken for those of the "
        f"network; name what loses outputs in `parameters`, in a sweep by prune.include=[{names[0]}]."
    )


def spared_weights(model: nn.Module, choices: Choices, example: Any) -> tuple[set[str], str]:
    """Return the names of the default weights that a method leaves dense, unless they are named, and what is in doubt.

    Wanda, SparseGPT and ALPS spare the head of a language model. Channels of outputs spare the layers whose outputs are
    those of the network: the last ones in a call with `example`, else the last weight of the model. They also spare
    stacks, of which channels along the first dimension are whole experts.
    """
    kind, usual = choices.score.kind, default_weights(model)
    rows = [table[kind] for table in (SCORES, RECONSTRUCTIONS) if isinstance(kind, str) and kind in table]
    spared = set[str]()
    if choices.select is None and any(row.keeps_head for row in rows):
        spared = set(usual) - set(default_weights(model, with_head=False))
    if choices.unit.kind != "channel" or choices.unit.spare_last or _reads_batch_norm(choices.score) or not usual:
        return spared, ""
    outputs, losing = output_weights(model, usual, example), set[str]()
    for name, weight in weights_of(model, None, usual).items():
        layout = weight.layout
        if layout is None or not layout.is_oriented or "stack" in layout.roles:
            spared.add(name)
        elif layout.outputs == layout.dim(choices.unit.dim):
            losing.add(name)
    return spared | (losing & {*outputs.names}), outputs.sentence(losing - spared)


def _reads_batch_norm(score: Score) -> bool:
    row = row_of(score)
    return row is not None and (row.of_batch_norm or score.options.get("form") == "bn")


def _name(score: Score) -> str:
    return score.kind if isinstance(score.kind, str) else getattr(score.kind, "__name__", repr(score.kind))


def share(batches: Sequence[Any] | None, step: int, steps: int) -> Sequence[Any] | None:
    """Return the batches of re-scoring `step` of `steps`: an equal share, or one in turn if there are too few."""
    if batches is None or steps == 1 or not batches:
        return batches
    if len(batches) < steps:
        return [batches[step % len(batches)]]
    return batches[len(batches) * step // steps : len(batches) * (step + 1) // steps]


def shuffle(
    kept: Mapping[str, Tensor],
    groups: Groups | DependencyGroups,
    generator: torch.Generator | None = None,
    alive: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Permute at random which units are kept, within each tensor (or row, or window); counts do not change.

    Args:
        kept: name -> bool for each unit, as `select` returns.
        groups: layout of the units.
        generator: source of the permutations; None: torch's default generator.
        alive: name -> bool for each unit: only these units are permuted, so nested masks stay nested; None: all.
    """
    shuffled = {}
    for part in groups:
        mask = kept[part.name].view(-1, part.pool)
        open_to = torch.ones_like(mask) if alive is None else alive[part.name].view(-1, part.pool)
        keys = torch.rand(mask.shape, generator=generator, dtype=torch.float64)
        # Survivors of a pool in their own order, and in a random order.
        places = torch.where(open_to, 0.0, 2.0).double().sort(dim=1, stable=True).indices
        drawn = torch.where(open_to, keys, 2.0).sort(dim=1, stable=True).indices
        values = mask.gather(1, places)
        shuffled[part.name] = torch.zeros_like(mask).scatter_(1, drawn, values).view(-1)
    return shuffled


def inverted(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return scores with opposite signs, so that the highest scores are pruned first; unsigned ones as float64."""
    return {name: -(values if values.dtype.is_signed else values.to(torch.float64)) for name, values in scores.items()}
