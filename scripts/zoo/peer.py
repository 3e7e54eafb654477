"""Torch-Pruning on the same networks: 30% of the channels of each of its groups, by magnitude.

It is told what its own examples tell it: which layers make the outputs, how many heads a layer has, and which tensors
an output holds; attributes of attention are set after its step. Forwards are not rewritten, as some of its examples do.
Its result counts as right if it has fewer parameters and its first output has the same shape for two batch sizes; it
promises no more.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import Tensor, nn

from scripts.zoo.libraries import Built, called

AMOUNT = 0.3
PROJECTIONS = ("qkv", "query", "key", "value", "q_proj", "k_proj", "v_proj", "q_lin", "k_lin", "v_lin", "q", "k", "v")
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


def by_torch_pruning(built: Built) -> tuple[str, str]:
    """Return a verdict and a sentence."""
    tp: Any = importlib.import_module("torch_pruning")
    model, example = copy.deepcopy(built.model), built.inputs(2, 0)
    before, expected = _size(model), [_shape(model, built.inputs(batch, 5)) for batch in (2, 3)]
    try:
        pruner = tp.pruner.MagnitudePruner(
            model,
            example,
            importance=tp.importance.MagnitudeImportance(p=2),
            pruning_ratio=AMOUNT,
            ignored_layers=_outputs(model, example, built),
            num_heads=_heads(model),
            prune_num_heads=True,
            prune_head_dims=False,
            head_pruning_ratio=AMOUNT,
            output_transform=lambda found: [each for each in _tensors(found) if each.grad_fn is not None],
        )
        pruner.step()
        _refit(model, pruner.num_heads)
    except Exception as error:  # any failure of another library
        return "traceback", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if _size(model) >= before:
        return "nothing to remove", ""
    try:
        given = [_shape(model, built.inputs(batch, 5)) for batch in (2, 3)]
    except Exception as error:
        return "WRONG", f"the smaller network fails: {type(error).__name__}: {str(error).splitlines()[0]}"
    if given != expected:
        return "WRONG", f"the smaller network puts out {given} instead of {expected}"
    return "right", f"{before} -> {_size(model)}"


def _size(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    values = found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else ()
    return [tensor for value in values for tensor in _tensors(value)]


def _shape(model: nn.Module, given: Any) -> tuple[int, ...]:
    """Return the shape of the first output; others, such as hidden states, may become smaller."""
    with torch.no_grad():
        return tuple(_tensors(called(model, given))[0].shape)


def _outputs(model: nn.Module, example: Any, built: Built) -> list[nn.Module]:
    """Return the layers that make outputs, those with as many channels as the first output, and all heads' modules."""
    made: dict[int, nn.Module] = {}
    kept: list[Tensor] = []

    def note(module: nn.Module, _: Any, found: Any) -> None:
        if isinstance(found, Tensor):
            kept.append(found)  # else another tensor may get the same memory
            made[found.untyped_storage().data_ptr()] = module

    layers = [each for each in model.modules() if isinstance(each, nn.Linear | nn.modules.conv._ConvNd)]
    hooks = [each.register_forward_hook(note) for each in layers]
    with torch.no_grad():
        found = called(model, example)
    for hook in hooks:
        hook.remove()
    ends = [made[p] for each in _tensors(found) if (p := each.untyped_storage().data_ptr()) in made]
    shape = _tensors(found)[0].shape
    channels = shape[-1] if len(shape) == 3 else shape[1]
    ends += [each for each in layers if each.weight.shape[0] == channels]
    inside = [module for name in built.heads for module in model.get_submodule(name).modules()]
    return [*ends, *inside]


def _refit(model: nn.Module, heads: dict[nn.Module, int]) -> None:
    """Set the attributes of attention that its examples set after a step."""
    for module in model.modules():
        layers = [each for name in PROJECTIONS if (each := getattr(module, name, None)) in heads]
        if not layers:
            continue
        count, wide = heads[layers[0]], layers[0].out_features // (3 if hasattr(module, "qkv") else 1)
        new = {**dict.fromkeys(COUNTS, count), "head_dim": wide // count, "attention_head_size": wide // count}
        for name, value in {**new, "all_head_size": wide}.items():
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, value)


def _heads(model: nn.Module) -> dict[nn.Module, int]:
    """Return the layers of queries, keys and values with their numbers of heads."""
    found: dict[nn.Module, int] = {}
    for module in model.modules():
        count = next((each for name in COUNTS if isinstance(each := getattr(module, name, None), int)), None)
        if count is None:
            continue
        for name in PROJECTIONS:
            if isinstance(layer := getattr(module, name, None), nn.Linear):
                found[layer] = count
    return found
