"""Build a network from a catalogue row or from any `_target_`, and select the parameters to prune."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from orchestrator.catalogue.models import MODELS
from orchestrator.config.round_schema import Prune
from orchestrator.core.errors import ModelError
from orchestrator.core.seeding import seeded
from orchestrator.core.specs import PruneFields
from orchestrator.planning.number_formats import first_few
from orchestrator.workloads.targets import FILLED, create, given
from pruning.choices.combining import Choices
from pruning.engine.scoring import pruned_if_named
from pruning.holding.default_weights import default_weights
from pruning.holding.parameter import plain_parameters
from pruning.layouts import TRANSPOSED_LINEAR, kind_of
from pruning.measure.matrix_weights import Considered

OURS = ("weights", "revision", "reinitialise")
"""Keys of a model node that apply to the built network; the target does not get them."""


def build(config: Mapping[str, Any], *, input_shape: Sequence[int], classes: int, seed: int) -> nn.Module:
    """Build the network that `config` describes, on the CPU.

    Null `input_shape` and `classes` are filled in. The global generators are seeded with `seed` and restored
    afterwards, so the initial weights are always those of `torch.manual_seed(seed)` followed by the constructor.

    Args:
        config: `kind` or `_target_`, and its arguments; `name` is for display.
        input_shape: shape of one example, without the batch.
        classes: number of classes.
        seed: seed of the initialisation.

    Raises:
        OrchestratorError: the target fails, or does not return an `nn.Module`.
    """
    found = dict(zip(FILLED, (list(input_shape), classes), strict=True))
    filled = {
        key: found[key] if key in found and value is None else value for key, value in config.items() if key not in OURS
    }
    with seeded(seed):
        model = create("model", filled, kinds=MODELS)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{given('model', config)} must return a torch.nn.Module, not {type(model).__name__}; "
            "name a class or a function that builds one."
        )
    lazy = [name for name, value in model.named_parameters() if isinstance(value, UninitializedParameter)]
    if lazy:
        raise ModelError(
            f"{given('model', config)} must return a network whose parameters have shapes, but {lazy[0]} belongs to a "
            "lazy layer; give the layer its input size, or run a batch through the network where it is built."
        )
    return model


@dataclass(frozen=True)
class Prunable:
    """Parameter to prune: `parameter` of `module`, with the name `name` in the whole network, as in conv1.weight."""

    module: nn.Module
    parameter: str
    name: str


def prunable(model: nn.Module, prune: PruneFields) -> list[Prunable]:
    """Return the parameters of `model` that `prune` selects, in the order of `named_parameters`; tied parameters once.

    The default `types` and `parameters` select the weights that Python prunes by default, too (`default_weights`).

    Args:
        model: a network, pruned or not; a pruned parameter `weight_orig` is called `weight`.
        prune: `types`, names of module classes or of their bases; `parameters`, patterns on the parameter's own name;
            `include` and `exclude`, patterns on its qualified name. Patterns are those of fnmatch. A name without
            wildcards in `include` is selected whatever its type.

    Raises:
        ModelError: no parameter is selected, or `include` or `exclude` has a name without wildcards that the network
            lacks.
    """
    names: dict[int, list[str]] = {}
    found: dict[int, Prunable] = {}
    by_layout = {*prune.types} == {*Prune().types} and [*prune.parameters] == Prune().parameters
    usual = set(default_weights(model)) if by_layout else ()
    for prefix, module in model.named_modules():
        typed = not by_layout and any(_matches(kind, prune.types) for kind in _types(module))
        for parameter, value in plain_parameters(module):
            name = f"{prefix}.{parameter}" if prefix else parameter
            names.setdefault(id(value), []).append(name)
            fits = name in usual or name in prune.include or (typed and _matches(parameter, prune.parameters))
            if fits and _matches(name, prune.include) and value.numel():
                found.setdefault(id(value), Prunable(module, parameter, name))
    every = [name for tied in names.values() for name in tied]
    _require_known(prune, every)
    for key in [key for key in found if any(_matches(name, prune.exclude) for name in names[key])]:
        del found[key]
    if not found:
        raise ModelError(
            f"`prune` (types={list(prune.types)}, parameters={list(prune.parameters)}, "
            f"include={list(prune.include)}, exclude={list(prune.exclude)}) leaves nothing to prune; "
            f"select some of the network's {_listing(every)}."
        )
    return list(found.values())


def untold(model: nn.Module, found: Considered, prune: PruneFields, choices: Choices) -> tuple[str, ...]:
    """Return a warning of the weights that stay dense although `prune` includes them, and does not exclude them."""
    left_out = [n for n in found.dense if _matches(n, prune.exclude) or not _matches(n, prune.include)]
    left = found.without(left_out)
    named = pruned_if_named(model, choices, left.dense)
    example = ",".join(f"'{name}'" for name in (*prune.include, *(named or [*left.dense])[:1]))
    naming = f"add their names to prune.include, as in prune.include=[{example}]"
    otherwise = f"choose a method that prunes single entries, such as method=magnitude, and {naming}"
    sentence = left.sentence(named, naming, otherwise)
    return (sentence,) if sentence else ()


def unmatched(model: nn.Module, prune: PruneFields) -> Iterator[tuple[str, str]]:
    """Yield (key, pattern) for each name pattern of `prune` that matches no parameter of `model`."""
    modules = dict(model.named_modules())
    every = [f"{prefix}.{name}" if prefix else name for prefix, m in modules.items() for name, _ in plain_parameters(m)]
    names = {"include": every, "exclude": every, "parameters": [name.rpartition(".")[2] for name in every]}
    for key, known in names.items():
        for pattern in getattr(prune, key):
            if not any(fnmatchcase(name, pattern) for name in known):
                yield key, pattern


def _require_known(prune: PruneFields, every: Sequence[str]) -> None:
    for key in ("include", "exclude"):
        for pattern in getattr(prune, key):
            if not any(letter in pattern for letter in "*?[") and pattern not in every:
                raise ModelError(
                    f"`prune.{key}` (={pattern!r}) names no parameter of the network; pass a qualified name or a "
                    f"pattern such as '{pattern}.*'. The network has {_listing(every)}."
                )


def _types(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's class and bases; transformers' Conv1D counts as Linear (it is one, transposed)."""
    for kind in type(module).__mro__:
        yield kind.__name__
    if kind_of(module) is TRANSPOSED_LINEAR:
        yield "Linear"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listing(names: Sequence[str]) -> str:
    return f"{len(names)} parameters: {first_few(names, 40, ', ')}"
