"""Small dense network that masks leave, trained from scratch: a control for pruning.

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
"""Largest allowed difference between outputs of the whole and the small network, relative to the largest output."""


class ControlError(OrchestratorError):
    """Network whose masks do not leave a smaller dense network."""

    repeats = True


@dataclass(frozen=True)
class Small:
    """Small dense network with new random weights, and its place in the whole network.

    Args:
        model: the small network; its class and its names are those of the whole network.
        left: name of each smaller tensor -> bool tensor that broadcasts to its shape in the whole network; True marks
            the entries that the small network has.
    """

    model: nn.Module
    left: Mapping[str, Tensor]

    def put_into(self, whole: nn.Module) -> None:
        """Copy the small network into the whole one, with zeros elsewhere, so that both compute the same."""
        state, there = module_state(self.model), module_state(whole)["tensors"]
        restore_module(
            whole, {**state, "tensors": {n: self._embedded(n, t, there[n]) for n, t in state["tensors"].items()}}
        )

    def _embedded(self, name: str, tensor: Tensor, there: Tensor) -> Tensor:
        if name not in self.left:
            return tensor
        found = torch.zeros_like(there)
        found[self.left[name].to(found.device).expand(found.shape)] = tensor.flatten()
        return found


def small_of(whole: nn.Module, masks: MaskSet, example: Sequence[Any] | Mapping[str, Any], seed: int) -> Small:
    """Return the dense network that is left of `whole` without the channels that masks empty; `seed` draws its weights.

    Weights are drawn as modules of these sizes draw them: by each `reset_parameters`, inner modules first.

    Args:
        whole: a plain network; it is not changed. Only the masks decide which channels go, not biases or norms.
        masks: masks of the network.
        example: the network's arguments, by position or by name, on any device.
        seed: seed of the new weights.

    Raises:
        ControlError: no channel goes, masked entries are left, or the small network cannot be trained by itself.
        LawBroken: the whole network computes something else after the small one was copied into it.
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
        model.apply(_draw_weights)
    small = Small(model.to(device), report.left)
    _require_equal_outputs(small, emptied, example)
    return small


def _refusal(reason: str) -> ControlError:
    return ControlError(
        f"`restart.control` (=small) trains the dense network that is left without the channels that masks empty, but "
        f"{reason}; pass unit=group, exclude tensors that cannot shrink with `prune.exclude`, or pass another control."
    )


def _emptied(whole: nn.Module, masks: MaskSet) -> nn.Module:
    """Return a copy with masked entries at 0, in which channels without weights do not output constants."""
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
    """Return why the shrunk network is not a small dense network that can be trained; None if it is one."""
    if report.form == "unchanged" or report.after == report.before:
        return f"the network does not become smaller{_in_brackets(report.tried)}"
    if report.form != "module":
        return f"the smaller network can only be evaluated{_in_brackets(report.tried)}"
    if module_state(model)["tensors"].keys() != module_state(emptied)["tensors"].keys():
        return f"the smaller network has biases that the whole one has not ({', '.join(report.folded)})"
    for name, mask in masks.items():
        if not mask[report.left.get(name, torch.ones(())).bool().expand(mask.shape)].all():
            return f"entries of {name} that are left are masked{_in_brackets(report.kept.get(name, ()))}"
    for name, _ in model.named_parameters():
        above = [model.get_submodule(name[:end]) for end, letter in enumerate(name) if letter == "."]
        if not any(hasattr(module, "reset_parameters") for module in (model, *above)):
            return f"no module around {name} has a `reset_parameters` that draws new values for it"
    return None


def _in_brackets(reasons: Sequence[str] | Mapping[str, int]) -> str:
    return f" ({'; '.join(reasons)})" if reasons else ""


def _draw_weights(module: nn.Module) -> None:
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def _require_equal_outputs(small: Small, whole: nn.Module, example: Sequence[Any] | Mapping[str, Any]) -> None:
    """Raise `LawBroken` unless the whole network computes what the small one does, once that is copied into it."""
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
            raise LawBroken("the whole network computes something else after the small one was copied into it.")
