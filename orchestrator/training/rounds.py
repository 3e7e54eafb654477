"""Prune one round, and hold what came of it to the laws: counts from targets, and the audit of the masks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from hydra.utils import get_object
from torch import Tensor, nn

import pruning
from orchestrator.config.parts.choices import decides_itself
from orchestrator.config.well_formed import INFINITIES
from orchestrator.core.errors import OrchestratorError
from orchestrator.training.scoring.ranking import Read, Scoring, off_target, rank, rounding_of_units, short_of
from orchestrator.workloads.models import Prunable, prunable
from orchestrator.workloads.targets import NAMING, TargetError, failure, given
from pruning import BasePruningMethod, MaskSet
from pruning.selection.channels import check_dim, check_structured


class LawBroken(OrchestratorError):
    """A trial whose result must not be reported: what was asked for is not what came out."""

    repeats = True


class Overflow(LawBroken):
    """A pruned network whose loss is no number."""


def by_choices(fields: Mapping[str, Any]) -> bool:
    """Whether a round ranks by the choices of its method, and not as a class decides."""
    return "amount" not in fields and not decides_itself(fields["method"])


def prune_round(
    model: nn.Module,
    fields: Mapping[str, Any],
    parent: MaskSet,
    generator: torch.Generator,
    read: Read,
) -> tuple[MaskSet, Scoring]:
    """Prune a plain model by a round's method on top of the masks so far; return its masks, and what scoring took.

    A score ranks as the choices say. Of a class, with target sparsity s, a tensor of n entries of which z are masked
    loses round(s n) - z more; structured ones count channels, and global ones all entries together. A raw amount goes
    to the class as it is. The model is left plain, with zeros where the masks are 0. Of a round whose control is
    `shuffle`, the masks are shuffled then.
    """
    chosen = prunable(model, fields["prune"])
    if by_choices(fields):
        masks, scoring = rank(model, chosen, fields, parent, read)
        pruning.remove_all(model)
        return masks, scoring
    whole = [each.module.get_parameter(each.parameter).detach().clone() for each in chosen] if _shuffles(fields) else []
    parent.apply(model)
    _apply(chosen, fields, generator)
    masks = MaskSet({each.name: _mask(each) for each in chosen})
    pruning.remove_all(model)
    if whole:
        masks = shuffled(masks, fields["method"], read.order)
        with torch.no_grad():
            for each, values in zip(chosen, whole, strict=True):
                each.module.get_parameter(each.parameter).copy_(values)
        masked(model, masks)
    return masks, Scoring()


def masked(model: nn.Module, masks: MaskSet) -> None:
    """Set the entries of a plain model that are masked to zero."""
    masks.apply(model)
    pruning.remove_all(model)


def _apply(chosen: Sequence[Prunable], fields: Mapping[str, Any], generator: torch.Generator) -> None:
    """Apply the method to the chosen parameters, so that each ends at the round's target."""
    config = fields["method"]
    method = _method(config)
    options = {key: value for key, value in config.items() if key not in NAMING}
    if options.get("n") in INFINITIES:
        options["n"] = float(options["n"])
    common: dict[str, Any] = {"generator": generator, **options}
    if _is_global(fields):
        amount = _global_amount(chosen, fields)
        with _explained(config, "all parameters together"):
            pruning.global_unstructured([(p.module, p.parameter) for p in chosen], method, amount=amount, **common)
        return
    for parameter in chosen:
        if issubclass(method, pruning.Identity):
            method.apply(parameter.module, parameter.parameter)
        else:
            amount = _amount(parameter, fields, structured=method.PRUNING_TYPE == "structured")
            with _explained(config, parameter.name):
                method.apply(parameter.module, parameter.parameter, amount=amount, **common)


def shuffled(masks: MaskSet, method: Mapping[str, Any], generator: torch.Generator | None) -> MaskSet:
    """Return the masks with the entries of each tensor in another order, whole channels where `method` prunes these."""
    dim = int(method.get("dim", 0)) if _method(method).PRUNING_TYPE == "structured" else None
    found = {}
    for name, mask in masks.items():
        size = mask.numel() if dim is None else mask.shape[dim]
        order = torch.randperm(size, generator=generator)
        found[name] = mask.flatten()[order].view_as(mask) if dim is None else mask.index_select(dim, order)
    return MaskSet(found)


def _shuffles(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("restart", {}).get("control") == "shuffle")


def _is_global(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("scope", {}).get("kind") == "global")


def sizes(chosen: Sequence[Prunable], fields: Mapping[str, Any]) -> dict[str, int]:
    """Return how much a count can take of each tensor: channels where the method prunes these, else entries."""
    method = fields["method"]
    if _is_global(fields):
        return {"all prunable parameters": _entries(chosen)}
    if _method(method).PRUNING_TYPE != "structured":
        return {each.name: _mask(each).numel() for each in chosen}
    masks = [(each, _mask(each)) for each in chosen]
    return {each.name: mask.shape[_channel_dim(each, mask, method)] for each, mask in masks}


@contextmanager
def _explained(config: Mapping[str, Any], what: str) -> Iterator[None]:
    try:
        yield
    except OrchestratorError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise OrchestratorError(
            f"{given('method', config)} cannot prune {what}: {type(error).__name__}: {said}; check its "
            "arguments under `method`, and the amount under `schedule`."
        ) from error


def hold_finite(metrics: Mapping[str, float]) -> None:
    """Raise `LawBroken` for a network whose loss after pruning is no number: nothing can be compared with it."""
    if not math.isfinite(metrics["loss"]):
        raise Overflow(
            f"the loss of the pruned network is {metrics['loss']} before any fine-tuning: its activations overflow; "
            "use `finetune.precision=fp32`, or a method that leaves the layers balanced."
        )


def hold_laws(
    chosen: Sequence[Prunable],
    fields: Mapping[str, Any],
    parent: MaskSet,
    masks: MaskSet,
    weights: Mapping[str, Tensor],
    scoring: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Raise `LawBroken` unless masks are nested, pruned weights zero, and achieved equals requested; name dead tensors.

    The achieved sparsity may differ from the target by what rounding to whole entries (or channels) allows: half of one
    in every tensor that is ranked by itself. `scoring` says what a score has ranked: `units` by tensor, and the
    fraction `removed` of them, or of the budget of dependency groups.
    """
    ranked, nested = by_choices(fields), fields.get("dynamics", {}).get("kind", "nested") == "nested"
    if len(parent) and nested and not _shuffles(fields) and not masks.nested_in(parent):
        raise LawBroken("masks are not nested: an entry that an earlier round pruned has come back.")
    for name, mask in masks.items():
        weight = weights[name]
        if bool(((weight != 0) & ~mask.to(weight.device)).any()):
            raise LawBroken(f"pruned weights are not zero: {name} was trained where its mask is 0.")
    target = fields.get("target")
    if target is not None and ranked:
        if fields.get("unit", {}).get("kind") == "group":
            said = short_of(fields, scoring["removed"])
        else:
            said = off_target(chosen, fields, masks, scoring.get("units") or [*masks])
        if said:
            raise LawBroken(said)
    elif target is not None:
        total = _entries(chosen)
        pruned, slack = masks.sparsity() * total, rounding(chosen, fields, scoring) * total
        if abs(pruned - target * total) > slack + 1e-6 * total:
            raise LawBroken(
                f"achieved sparsity {masks.sparsity():.6f} is not the requested {target:.6f} "
                f"(off by {abs(pruned - target * total):.0f} of {total} entries, where rounding allows {slack:.0f}): "
                f"{given('method', fields['method'])} must prune as many entries as it is told."
            )
    return tuple(name for name, mask in masks.items() if not bool(mask.any()))


def details(
    chosen: Sequence[Prunable],
    fields: Mapping[str, Any],
    parent: MaskSet,
    masks: MaskSet,
    weights: Mapping[str, Tensor],
    scoring: Mapping[str, Any],
) -> dict[str, Any]:
    """Hold a round to its laws; return what its record says besides figures."""
    dead = hold_laws(chosen, fields, parent, masks, weights, scoring)
    slack = rounding(chosen, fields, scoring)
    return {"dead_tensors": [*dead], "rounding": slack, "scoring": scoring}


def hold_rewound(weights: Mapping[str, Tensor], saved: Mapping[str, Tensor], masks: MaskSet) -> None:
    """Raise `LawBroken` unless `weights` have the bytes that were saved where `masks` keep them, and 0 elsewhere."""
    for name, tensor in saved.items():
        kept = masks.get(name, torch.ones((), dtype=torch.bool)).to(tensor.device).expand(tensor.shape)
        if _bytes(weights[name][kept]) != _bytes(tensor[kept]) or bool(weights[name][~kept].any()):
            raise LawBroken(
                f"rewound weights are not those of the step to rewind to: {name} has other bytes where its mask is 1, "
                "or is not zero where it is 0."
            )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1, 1).view(torch.uint8).numpy().tobytes()


def _method(config: Mapping[str, Any]) -> type[BasePruningMethod]:
    if config.get("kind"):
        method: type[BasePruningMethod] = pruning.METHODS[config["kind"]].load()
        return method
    try:
        method = get_object(config["_target_"])
    except (Exception, SystemExit) as error:  # its module raises
        raise TargetError(failure("method", config, error)) from error
    if not (isinstance(method, type) and issubclass(method, BasePruningMethod)):
        raise OrchestratorError(
            f"`method._target_` (={config['_target_']}) must be a class derived from "
            f"pruning.BasePruningMethod, with a `compute_mask`{'' if isinstance(method, type) else ', no function'}."
        )
    return method


def _amount(parameter: Prunable, fields: Mapping[str, Any], *, structured: bool) -> Any:
    mask = _mask(parameter)
    dim = _channel_dim(parameter, mask, fields["method"]) if structured else None
    if "amount" in fields:
        return fields["amount"]
    if dim is not None:
        others = [d for d in range(mask.dim()) if d != dim]
        size, alive = mask.shape[dim], int((mask != 0).sum(others).count_nonzero())
    else:
        size, alive = mask.numel(), int(mask.count_nonzero())
    return max(0, round(fields["target"] * size) - (size - alive))


def _channel_dim(parameter: Prunable, mask: Tensor, method: Mapping[str, Any]) -> int:
    try:
        check_structured(mask)
        return check_dim(mask, int(method.get("dim", 0)))
    except (ValueError, IndexError) as error:
        raise OrchestratorError(
            f"`method.dim` (={method.get('dim', 0)}) must be a dimension of every tensor that is pruned, but "
            f"{parameter.name} has no such channels: {error} Pass 0 for output channels, 1 for input channels, or "
            "leave it out with `prune.exclude`."
        ) from None


def _global_amount(chosen: Sequence[Prunable], fields: Mapping[str, Any]) -> Any:
    if "amount" in fields:
        return fields["amount"]
    alive = sum(int(_mask(parameter).count_nonzero()) for parameter in chosen)
    return max(0, round(fields["target"] * _entries(chosen)) - (_entries(chosen) - alive))


def rounding(chosen: Sequence[Prunable], fields: Mapping[str, Any], scoring: Mapping[str, Any]) -> float:
    """Return by how much rounding to whole entries, or units, may move what is gone, a fraction of all that is cut."""
    if by_choices(fields):
        return rounding_of_units(chosen, fields, scoring)
    config = fields["method"]
    if _is_global(fields):
        slack = 0.5
    elif _method(config).PRUNING_TYPE != "structured":
        slack = 0.5 * len(chosen)
    else:
        dim = int(config.get("dim", 0))
        slack = sum(0.5 * _mask(parameter).numel() / _mask(parameter).shape[dim] for parameter in chosen)
    return slack / _entries(chosen)


def _entries(chosen: Sequence[Prunable]) -> int:
    return sum(_mask(parameter).numel() for parameter in chosen)


def _mask(parameter: Prunable) -> Tensor:
    """The parameter's mask, all ones where it has never been pruned."""
    mask = getattr(parameter.module, f"{parameter.parameter}_mask", None)
    return mask if isinstance(mask, Tensor) else torch.ones_like(getattr(parameter.module, parameter.parameter))
