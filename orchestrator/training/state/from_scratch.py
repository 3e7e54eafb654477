"""The small dense network that masks leave, trained from scratch: a control of what is pruned.

After Liu, Sun, Zhou, Huang and Darrell, "Rethinking the Value of Network Pruning", arXiv 1810.05270.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map

import pruning
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.seeding import seeded
from orchestrator.training.pruning_rounds import LawBroken, masked
from orchestrator.training.state.train_state import module_state, restore_module
from pruning import MaskSet, Shrunk

TOLERANCE = 1e-4
"""By how much outputs of the whole network may differ from the small one's, relative to the largest."""


class ControlError(OrchestratorError):
    """A network of which masks leave no small dense one."""

    repeats = True


@dataclass(frozen=True)
class Small:
    """A dense network, drawn anew, and where it lies in the whole one that it has the size of what is left of.

    Args:
        model: of the whole one's class, under its names.
        left: name of each smaller tensor -> bool that broadcasts to its shape in the whole one.
    """

    model: nn.Module
    left: Mapping[str, Tensor]

    def put_into(self, whole: nn.Module) -> None:
        """Give the whole network what the small one has, and zeros elsewhere, so that both compute the same."""
        state, there = module_state(self.model), module_state(whole)["tensors"]
        restore_module(whole, {**state, "tensors": {n: self._put(n, t, there[n]) for n, t in state["tensors"].items()}})

    def _put(self, name: str, tensor: Tensor, there: Tensor) -> Tensor:
        if name not in self.left:
            return tensor
        found = torch.zeros_like(there)
        found[self.left[name].to(found.device).expand(found.shape)] = tensor.flatten()
        return found


def small_of(whole: nn.Module, masks: MaskSet, example: Sequence[Any] | Mapping[str, Any], seed: int) -> Small:
    """Return the dense network that is left of `whole` without what the masks empty, with weights that `seed` draws.

    Weights are drawn as modules draw them in these sizes: by each `reset_parameters`, those within a module first.

    Args:
        whole: a plain network; it is not changed. Which channels go, the masks alone say, not biases or norms.
        example: its arguments, by position or by name, on any device.

    Raises:
        ControlError: nothing goes, masked entries are left, or what is left cannot be trained by itself.
        LawBroken: the whole network with the small one in its place computes something else.
    """
    emptied, device = _emptied(whole, masks), next(whole.parameters()).device
    example = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, example)
    try:
        model = pruning.shrink(emptied, example if isinstance(example, Mapping) else tuple(example))
    except (ValueError, TypeError) as error:
        raise _refusal(f"it cannot be shrunk: {str(error).rstrip('.')}") from error
    report: Any = model.shrunk
    if reason := _unfit(model, report, emptied, masks):
        raise _refusal(reason)
    del model.shrunk
    model.cpu()
    with seeded(seed):
        model.apply(_draw)
    small = Small(model.to(device), report.left)
    _hold_equal(small, emptied, example)
    return small


def _refusal(reason: str) -> ControlError:
    return ControlError(
        f"`restart.control` (=small) trains the dense network that is left without the channels that masks empty, and "
        f"{reason}; pass unit=group, leave out by `prune.exclude` what cannot go, or pass another control."
    )


def _emptied(whole: nn.Module, masks: MaskSet) -> nn.Module:
    """Return a copy whose masked entries are 0, and whose channels without weights put out no constants."""
    emptied = copy.deepcopy(whole)
    with torch.no_grad():
        for module in emptied.modules():
            if isinstance(module, _NormBase | nn.GroupNorm):
                module.reset_parameters()
            elif isinstance(bias := module._parameters.get("bias"), Tensor):
                bias.zero_()
    masked(emptied, masks)
    return emptied


def _unfit(model: nn.Module, report: Shrunk, emptied: nn.Module, masks: MaskSet) -> str | None:
    """Say why what is left is no small dense network that can be trained; None where it is one."""
    if report.form == "unchanged" or report.after == report.before:
        return f"nothing of the network goes{_listed(report.tried)}"
    if report.form != "module":
        return f"what is left of it can only be evaluated{_listed(report.tried)}"
    if module_state(model)["tensors"].keys() != module_state(emptied)["tensors"].keys():
        return f"what is left of it has biases that it has not ({', '.join(report.folded)})"
    for name, mask in masks.items():
        if not mask[report.left.get(name, torch.ones(())).bool().expand(mask.shape)].all():
            return f"entries of {name} are masked in what is left{_listed(report.kept.get(name, ()))}"
    for name, _ in model.named_parameters():
        above = [model.get_submodule(name[:end]) for end, letter in enumerate(name) if letter == "."]
        if not any(hasattr(module, "reset_parameters") for module in (model, *above)):
            return f"no module around {name} has a `reset_parameters` that draws it anew"
    return None


def _listed(reasons: Sequence[str] | Mapping[str, int]) -> str:
    return f" ({'; '.join(reasons)})" if reasons else ""


def _draw(module: nn.Module) -> None:
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def _hold_equal(small: Small, whole: nn.Module, example: Sequence[Any] | Mapping[str, Any]) -> None:
    """Raise `LawBroken` unless a whole network computes what the small one does, once that is put into it."""
    small.put_into(whole)
    outputs = []
    with torch.no_grad():
        for model in (small.model, whole.eval()):
            found = model(**example) if isinstance(example, Mapping) else model(*example)
            outputs.append(
                [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            )
    for one, other in zip(*outputs, strict=True):
        if not bool((one - other).abs().max() <= TOLERANCE * other.abs().max()):
            raise LawBroken("the whole network with the small one in its place computes something else.")
