"""`pruning.smaller_transformer`: the stock network and configuration of the sizes that pruning left."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pruning.dependencies.families.family_groups import call_of_network, require_plain_weights, stock_transformer
from pruning.dependencies.families.proof import StructuredTransformer, drawn_tokens
from pruning.dependencies.families.resizing import Left, build, cut_of, difference
from pruning.dependencies.families.structure import value_of
from pruning.holding.copies import values_with_history
from pruning.holding.parameter import check_all_have_values, pruned_names, unwrapped
from pruning.measure.report import parameters
from pruning.methods.functions import remove_all

CLOSE, ROUNDINGS = 1e-3, 30
"""Largest difference of outputs, relative to the largest, of a network of no family; in units of its rounding."""


@dataclass(frozen=True)
class Resized:
    """Report of `smaller_transformer`, as plain data.

    Args:
        before, after: number of parameters; a tied one counts once.
        config: key of the configuration -> (value before, value after), where they differ.
        layers: numbers of the layers that were kept, counted before.
        padding: unit -> number of empty units that stay, because other layers have more or the configuration cannot
            express the number.
        differs: why the outputs differ from the masked network's; empty if they are equal up to rounding.
        difference: largest difference from the masked network's outputs on the example, relative to the largest output,
            without its loss; None without an example, and for hidden states with fewer channels.
        left: name of a tensor of the smaller network -> its place in the whole one.
    """

    before: int
    after: int
    config: Mapping[str, tuple[Any, Any]]
    layers: tuple[int, ...]
    padding: Mapping[str, int]
    differs: tuple[str, ...]
    difference: float | None = None
    left: Mapping[str, Left] = field(default_factory=dict, compare=False, repr=False)


def smaller_transformer(model: nn.Module, example: Any = None) -> nn.Module:
    """Build the stock network without the layers, heads, hidden units and residual channels that pruning emptied.

        pruning.prune(model, "magnitude", unit="mlp", sparsity=0.25)
        smaller = pruning.smaller_transformer(model)
        smaller.save_pretrained("smaller")             # `from_pretrained` of an unmodified transformers loads it

    The result has the class of the network and a configuration with the sizes left. Layers are numbered anew. All
    layers keep as many heads and hidden units as the layer with most of them; empty ones fill up the others. Without
    d - d' of d residual channels, the scale of a norm is multiplied by sqrt(d / d') and its eps by d / d', so that
    RMSNorm computes the same. The outputs equal the masked network's, with two exceptions that the report names:
    LayerNorm over fewer channels, and removed layers of networks that normalise after each addition (BERT).

    Args:
        model: a stock class of transformers, or a model that wraps one; pruned or not, it is not changed.
        example: input of the model, for the difference in the report, and to prove the structure of a network of no
            family; a mapping or a tuple is unpacked. In a wrapper, both are on the inputs that the network gets.

    Returns:
        the stock network, each module in the mode that it had; its attribute `resized` is the report, a `Resized`.

    Raises:
        ValueError: the model is of no stock class, a tensor is on the meta device, a weight is no parameter (as in
            quantised layers), a wrapper does not call its network on the example, or a network of no family computes
            something else than the masked one.
    """
    check_all_have_values(model)
    plain = unwrapped(model)
    if any(pruned_names(module) for module in plain.modules()):
        plain = copy.deepcopy(plain, values_with_history(plain))
        remove_all(plain)
    found = stock_transformer(plain, example)
    if found is None:
        raise ValueError(
            f"`model` (a {type(model).__name__}) must be one network of a stock class of transformers; call "
            "pruning.shrink(model, example), which traces any network."
        )
    require_plain_weights(found)
    call = None if example is None else call_of_network(plain, found.network, found.path, example)
    cut = cut_of(found)
    smaller: nn.Module = build(found, cut)
    before, after = found.config, smaller.config
    changed = {key: (value_of(before, key), value_of(after, key)) for key in cut.sizes}
    measured = None if call is None else difference(smaller, found.network, call)
    if isinstance(found, StructuredTransformer) and not cut.differs:
        _require_equal(found, smaller, measured)
    report = Resized(
        parameters(found.network),
        parameters(smaller),
        {key: (old, new) for key, (old, new) in changed.items() if old != new},
        tuple(cut.layers),
        cut.padding,
        tuple(cut.differs),
        measured,
        cut.left,
    )
    smaller.resized = report  # type: ignore[assignment]
    return smaller


def _require_equal(found: StructuredTransformer, smaller: nn.Module, measured: float | None) -> None:
    """Raise ValueError if outputs differ by more than rounding: a structure is proven on few layers of a list."""
    off, call = measured, drawn_tokens(found.network) if measured is None else None
    if call is not None:
        try:
            off = difference(smaller, found.network, call)
        except Exception:  # a network of images and text may not run on tokens alone; it was proven on an example
            return
    dtypes = {each.dtype for each in found.network.parameters() if each.is_floating_point()}
    if off is not None and off > max(CLOSE, *(ROUNDINGS * torch.finfo(dtype).eps for dtype in dtypes)):
        raise ValueError(
            f"`model` (a {type(found.network).__name__}) computes something else with these units removed, by "
            f"{off:.1e} of its largest output, although its first layers do not; prune another unit, or type "
            "unit='group' and pruning.shrink(model, example), which traces any network."
        )
