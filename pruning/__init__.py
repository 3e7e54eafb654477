"""Pruning of PyTorch modules: the functions of `torch.nn.utils.prune` under the same names, and further ones.

Differences visible to code written for `torch.nn.utils.prune`:

- importance scores default to the current values, `name_orig` masked, not to the product that the last forward cached;
- among equal scores, the lowest index is pruned first;
- the order of a module's parameters does not change in pruning and `remove`;
- a pruned entry is exactly 0, even if it was NaN or inf; masks contain only zeros and ones, in the parameter's dtype; a
  mask of averages, as after `AveragedModel(model, use_buffers=True)`, raises an error when it is used;
- scores that are NaN, or have another shape than the parameter, raise `ValueError` (torch: none, or `AssertionError`);
- a call that raises an error changes no module, in later rounds too;
- `CustomFromMask` does not keep its mask after `apply`; tied parameters count once in global pruning;
- random methods draw other numbers from the same seed; all methods take `generator`.

A submodule is imported when it is first used, so `pruning.choices.axes` and `pruning.schedule` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pruning import dynamics as dynamics
    from pruning import scores as scores
    from pruning.catalogue.methods import METHODS as METHODS
    from pruning.choices.axes import Amount as Amount
    from pruning.choices.axes import count_to_prune as count_to_prune
    from pruning.choices.axes import validate_amount as validate_amount
    from pruning.choices.combining import Choices as Choices
    from pruning.choices.published import PUBLISHED as PUBLISHED
    from pruning.compact.shrinking import Shrunk as Shrunk
    from pruning.compact.shrinking import shrink as shrink
    from pruning.compact.sparse_network import Sparse as Sparse
    from pruning.compact.sparse_network import to_sparse as to_sparse
    from pruning.dependencies.dependency_groups import DependencyGroup as DependencyGroup
    from pruning.dependencies.dependency_groups import DependencyGroups as DependencyGroups
    from pruning.dependencies.families.smaller_transformer import Resized as Resized
    from pruning.dependencies.families.smaller_transformer import smaller_transformer as smaller_transformer
    from pruning.dependencies.group_finding import dependency_groups as dependency_groups
    from pruning.engine.one_call import commit as commit
    from pruning.engine.one_call import effective_sparsity as effective_sparsity
    from pruning.engine.one_call import plan as plan
    from pruning.engine.one_call import prune as prune
    from pruning.engine.one_call import sparsity as sparsity
    from pruning.engine.plans import PruningPlan as PruningPlan
    from pruning.engine.scoring import groups as groups
    from pruning.engine.scoring import inverted as inverted
    from pruning.engine.scoring import shuffle as shuffle
    from pruning.holding.low_rank import LowRankUpdates as LowRankUpdates
    from pruning.holding.reparam import mask_gradients as mask_gradients
    from pruning.masks.keeper import MaskKeeper as MaskKeeper
    from pruning.masks.mask_set import MaskSet as MaskSet
    from pruning.measure.report import active_parameters as active_parameters
    from pruning.measure.report import latency as latency
    from pruning.measure.report import remaining_parameters as remaining_parameters
    from pruning.measure.report import report as report
    from pruning.measure.report import sizes as sizes
    from pruning.methods.base import BasePruningMethod as BasePruningMethod
    from pruning.methods.base import PruningContainer as PruningContainer
    from pruning.methods.built_in import CustomFromMask as CustomFromMask
    from pruning.methods.built_in import Identity as Identity
    from pruning.methods.built_in import L1Unstructured as L1Unstructured
    from pruning.methods.built_in import LnStructured as LnStructured
    from pruning.methods.built_in import RandomStructured as RandomStructured
    from pruning.methods.built_in import RandomUnstructured as RandomUnstructured
    from pruning.methods.functions import custom_from_mask as custom_from_mask
    from pruning.methods.functions import global_structured as global_structured
    from pruning.methods.functions import global_unstructured as global_unstructured
    from pruning.methods.functions import identity as identity
    from pruning.methods.functions import is_pruned as is_pruned
    from pruning.methods.functions import l1_unstructured as l1_unstructured
    from pruning.methods.functions import ln_structured as ln_structured
    from pruning.methods.functions import random_structured as random_structured
    from pruning.methods.functions import random_unstructured as random_unstructured
    from pruning.methods.functions import remove as remove
    from pruning.methods.functions import remove_all as remove_all
    from pruning.mixtures.survivors import route_among_survivors as route_among_survivors
    from pruning.reconstruction.block_by_block import Layerwise as Layerwise
    from pruning.reconstruction.block_by_block import layerwise as layerwise
    from pruning.schedule import targets as targets
    from pruning.selection.allocation import allocate as allocate
    from pruning.selection.selection_groups import select as select

_HOMES = {
    name: home
    for home, names in {
        "choices.axes": "Amount count_to_prune validate_amount",
        "catalogue.methods": "METHODS",
        "choices.combining": "Choices",
        "choices.published": "PUBLISHED",
        "compact.shrinking": "Shrunk shrink",
        "compact.sparse_network": "Sparse to_sparse",
        "dependencies.families.smaller_transformer": "Resized smaller_transformer",
        "dependencies.group_finding": "dependency_groups",
        "dependencies.dependency_groups": "DependencyGroup DependencyGroups",
        "engine.scoring": "groups inverted shuffle",
        "engine.one_call": "commit effective_sparsity plan prune sparsity",
        "engine.plans": "PruningPlan",
        "masks.keeper": "MaskKeeper",
        "holding.low_rank": "LowRankUpdates",
        "holding.reparam": "mask_gradients",
        "masks.mask_set": "MaskSet",
        "measure.report": "active_parameters latency remaining_parameters report sizes",
        "methods.base": "BasePruningMethod PruningContainer",
        "methods.functions": "custom_from_mask global_structured global_unstructured identity is_pruned "
        "l1_unstructured ln_structured random_structured random_unstructured remove remove_all",
        "methods.built_in": "CustomFromMask Identity L1Unstructured LnStructured RandomStructured RandomUnstructured",
        "reconstruction.block_by_block": "Layerwise layerwise",
        "mixtures.survivors": "route_among_survivors",
        "schedule": "targets",
        "selection.allocation": "allocate",
        "selection.selection_groups": "select",
    }.items()
    for name in names.split()
}
"""Public name -> module that defines it, imported when the name is first used."""

_TORCH_NAMES = {
    "_compute_norm": ("selection.channel_masks", "channel_norms"),
    "_compute_nparams_toprune": ("choices.axes", "count_to_prune"),
    "_validate_pruning_amount": ("choices.axes", "check_amount_fits"),
    "_validate_pruning_amount_init": ("choices.axes", "validate_amount"),
    "_validate_pruning_dim": ("selection.channel_masks", "check_dim"),
    "_validate_structured_pruning": ("selection.channel_masks", "check_structured"),
}
"""Private names of `torch.nn.utils.prune` that PyTorch's own tests use."""

_ROOMS = ("dynamics", "scores")
"""Subpackages that are used by their own names, as in `pruning.scores.snip`."""

__all__ = sorted([*_HOMES, *_ROOMS])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        home, attribute = _HOMES[name], name
    elif name in _TORCH_NAMES:
        home, attribute = _TORCH_NAMES[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
