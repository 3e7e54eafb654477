"""Small dense network that masks leave: trained from scratch as a control for pruning, or with the weights left.

The control is that of Liu, Sun, Zhou, Huang and Darrell, "Rethinking the Value of Network Pruning", arXiv 1810.05270.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map

import pruning
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.seeding import derive, seeded
from orchestrator.core.specs import StageSpec
from orchestrator.training.loop.sparse_training import cost_of
from orchestrator.training.loop.training_job import ELEMENTWISE, FitResult, TrainingJob
from orchestrator.training.pruning_rounds import LawBroken, masked
from orchestrator.training.scoring.ranking import example_of
from orchestrator.training.state.train_state import module_state, restore_module
from pruning import MaskSet, Shrunk
from pruning.dependencies.families.family_groups import stock_transformer
from pruning.dependencies.families.resizing import Left
from pruning.measure.macs import arguments_on, in_mode

if TYPE_CHECKING:
    from orchestrator.training.stage_record import StageInputs
    from orchestrator.training.training_stages import Run

TOLERANCE = 1e-4
"""Largest allowed difference between outputs of the whole and the small network, relative to the largest output."""


class ControlError(OrchestratorError):
    """Network whose masks do not leave a smaller dense network."""

    repeats = True


@dataclass(frozen=True)
class Small:
    """Small dense network, and its place in the whole network.

    Args:
        model: the small network; its class is that of the whole network.
        left: name of each smaller tensor -> bool tensor that broadcasts to its shape in the whole network; True marks
            the entries that the small network has.
        names: name of a tensor -> its name in the whole network, where it is another one.
        factors: name of a tensor -> factor of its values against those in the whole network, where it is not 1.
    """

    model: nn.Module
    left: Mapping[str, Tensor]
    names: Mapping[str, str] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

    def put_into(self, whole: nn.Module) -> None:
        """Copy the small network into the whole one, with zeros elsewhere, so that both compute the same."""
        state, there = module_state(self.model), module_state(whole)["tensors"]
        named = {self.names.get(name, name): (name, tensor) for name, tensor in state["tensors"].items()}
        learned = dict(whole.named_parameters(remove_duplicate=False))
        gone = {name: torch.zeros_like(tensor) if name in learned else tensor for name, tensor in there.items()}
        here = {name: self._embedded(*own, there[name]) for name, own in named.items()}
        restore_module(whole, {**state, "tensors": {**gone, **here}})

    def _embedded(self, name: str, tensor: Tensor, there: Tensor) -> Tensor:
        tensor = tensor / self.factors[name] if name in self.factors else tensor
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


def small_transformer_of(
    whole: nn.Module, masks: MaskSet, example: Sequence[Any] | Mapping[str, Any], seed: int
) -> Small:
    """Return the stock transformer that masks leave, with weights that `seed` draws as its class does.

    Raises:
        ControlError: there is none that computes what the masked network does.
    """
    small = transformer_left(whole, masks, example)
    if small is None:
        raise ControlError(
            "`restart.control` (=small) trains the transformer that is left without what masks empty, but the "
            "configuration of the network does not express it; pass scope=layer or scope.uniform=true, so that all "
            "layers have equal widths, or another control."
        )
    model: Any = small.model
    with seeded(seed):
        drawn = type(model)(model.config)
    restore_module(model, module_state(drawn.to(next(model.parameters()).device)))
    return small


def train_anew(stage: StageInputs, job: TrainingJob, run: Run) -> FitResult:
    """Train the small dense network that the masks leave, with new weights, and copy it into the whole one."""
    spec = stage.spec
    make = small_transformer_of if spec.typed.unit.of_transformer else small_of
    seed = derive(spec.typed.seed, f"{spec.round}/small")
    return _train_inside(make(job.model, job.masks, example_of(job.model, job.data), seed), job, run)


def may_be_smaller(spec: StageSpec) -> bool:
    """Whether a round may fine-tune a smaller transformer in the place of the masked network.

    The key then names the version of that code. The masked network would learn the same, but for optimizers that read
    more than an entry.
    """
    named = spec.training == "finetune" and "smaller" in spec.fields.get("versions", {})
    return named and spec.training_config["optimizer"]["_target_"] in ELEMENTWISE


def train_smaller(_stage: StageInputs, job: TrainingJob, run: Run) -> FitResult | None:
    """Train the smaller transformer that the masks leave, with the weights left; None if there is none."""
    small = transformer_left(job.model, job.masks, example_of(job.model, job.data))
    if small is None:
        return None
    cost = cost_of(job.model, job.data, job.device, job.masks, None)
    return _train_inside(small, replace(job, cost=cost), run)


def _train_inside(small: Small, job: TrainingJob, run: Run) -> FitResult:
    """Train a smaller network in the place of the whole one, and copy it into the whole one."""
    none_masked = [None for each in small.model.parameters() if each.requires_grad]
    fit = run(replace(job, model=small.model, masks=MaskSet({})), none_masked)
    small.put_into(job.model)
    return fit


def transformer_left(whole: nn.Module, masks: MaskSet, example: Sequence[Any] | Mapping[str, Any]) -> Small | None:
    """Return the stock transformer that masks leave, with the values that it has in the whole network.

    None if there is none that computes what the masked network does: the network is of no stock class, something else
    than whole units is masked, layers differ in width, or the network was changed after its class had built it.

    Args:
        whole: a plain network; it is not changed.
        masks: masks of the network.
        example: the network's arguments, by position or by name.
    """
    found = stock_transformer(whole)
    if found is None or found.path or not masks.sparsity():
        return None
    emptied = copy.deepcopy(whole)
    masked(emptied, masks)
    try:
        model = pruning.smaller_transformer(emptied, example if isinstance(example, Mapping) else tuple(example))
    except ValueError:
        return None
    report: Any = model.resized
    del model.resized
    left = {name: _entries_left(each, found.tensors[each.name]) for name, each in report.left.items()}
    kept = {each.name: left[name] for name, each in report.left.items()}
    if report.differs or report.padding or report.after == report.before or not _is_what_masks_keep(whole, masks, kept):
        return None
    names = {name: each.name for name, each in report.left.items() if each.name != name}
    small = Small(model, left, names, {name: each.factor for name, each in report.left.items() if each.factor != 1})
    return small if _equal_outputs(model, emptied, example, 1) else None


def _is_what_masks_keep(whole: nn.Module, masks: MaskSet, kept: Mapping[str, Tensor]) -> bool:
    """Whether a smaller network has the entries that masks keep, and no others; a value of 0 alone removes nothing."""
    by_parameter = {id(whole.get_parameter(name)): mask for name, mask in masks.items()}  # also under a tied name
    for name, parameter in whole.named_parameters():
        own = kept.get(name, torch.zeros(()).bool()).expand(parameter.shape)
        mask = by_parameter.get(id(parameter))
        if not (bool(own.all()) if mask is None else torch.equal(own, mask.cpu().bool())):
            return False
    return True


def _entries_left(place: Left, whole: Tensor) -> Tensor:
    """Return bool of the shape of a whole tensor: whether a smaller network has the entry."""
    found = torch.ones(whole.shape, dtype=torch.bool)
    for dim, positions in place.positions.items():
        rows = positions.cpu().reshape(-1, positions.shape[-1])  # several in a stack: one for each expert
        own = torch.zeros(len(rows), whole.shape[dim], dtype=torch.bool).scatter(1, rows, True)
        experts = {0: len(rows)} if len(rows) > 1 else {}
        found &= own.reshape([{**experts, dim: whole.shape[dim]}.get(each, 1) for each in range(whole.ndim)])
    return found


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
    if not _equal_outputs(small.model, whole, example):
        raise LawBroken("the whole network computes something else after the small one was copied into it.")


def _equal_outputs(
    small: nn.Module, whole: nn.Module, example: Sequence[Any] | Mapping[str, Any], count: int | None = None
) -> bool:
    """Whether the first `count` outputs of two networks are equal, up to `TOLERANCE` of the largest."""
    outputs, (args, kwargs) = [], arguments_on(whole, example if isinstance(example, Mapping) else tuple(example))
    for model in (small, whole):
        with torch.no_grad(), in_mode(model, training=False):
            found = model(*args, **kwargs)
        numbers = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        outputs.append(numbers[:count])
    pairs = zip(*outputs, strict=True)
    return all(bool((one - other).abs().max() <= TOLERANCE * other.abs().max()) for one, other in pairs)
