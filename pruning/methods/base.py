"""Base class of pruning methods, the container of successive methods, and the next mask of a parameter by a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TypeGuard, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

from pruning.holding.copies import restored_on_error
from pruning.holding.parameter import (
    ModuleParameter,
    check_generator,
    check_prunable,
    check_same_shape,
    is_pruning_hook,
)
from pruning.holding.reparam import Reparam, held, mask_name, masked, orig_name
from pruning.selection.channel_masks import alive_channels, check_dim


class MaskMethod(Protocol):
    """Interface of a pruning method of this package or of torch."""

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return the mask of `t`."""


class BuiltinMethod:
    """Mixin of built-in methods, which prune by changing a mask in place with few passes over memory.

    It comes before `BasePruningMethod` among a method's bases. If a subclass overrides `compute_mask`, its
    `compute_mask` is called instead, with the arguments that torch would pass.
    """

    READS_PRUNED: ClassVar[bool] = False
    """Whether the method reads scores of pruned entries, so that the scores must be masked first."""

    def prune_(self, mask: Tensor, scores: Tensor) -> None:
        """Set further entries of `mask` to 0 in place; an error is raised before the mask is changed."""
        self.prune_across_([mask], [scores])

    def prune_across_(self, masks: Sequence[Tensor], scores: Sequence[Tensor]) -> None:
        """Prune like `prune_`, ranking the entries of all tensors together; unstructured methods define this method."""
        raise NotImplementedError(f"{type(self).__name__} does not prune across tensors.")

    def first_mask(self, scores: Tensor, like: Tensor) -> Tensor:
        """Return the first mask of an unpruned tensor, with the shape, strides and dtype of `like`."""
        mask = torch.ones_like(like)
        self.prune_(mask, scores)
        return mask

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return `default_mask` with 0 where this method prunes `t`; all entries of `t` are ranked."""
        return self.first_mask(t, default_mask).mul_(default_mask)


def is_builtin(method: object) -> TypeGuard[BuiltinMethod]:
    """Return whether `method.prune_` applies: `compute_mask` and `PRUNING_TYPE` are not overridden or patched."""
    if not isinstance(method, BuiltinMethod) or type(method).compute_mask is not BuiltinMethod.compute_mask:
        return False
    kinds = [vars(base)["PRUNING_TYPE"] for base in type(method).__mro__ if "PRUNING_TYPE" in vars(base)]
    return not kinds or kinds[-1] == getattr(method, "PRUNING_TYPE", None)


def next_mask(
    method: MaskMethod, parameter: ModuleParameter, importance_scores: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Return the next mask of `parameter` by `method`, as a new tensor."""
    if importance_scores is not None:
        check_same_shape(importance_scores, parameter.orig, parameter.label)
    if parameter.orig.is_meta:  # no values to rank: keep the mask; as in torch, a mask can be loaded later
        return parameter.copied_mask()
    try:
        if not is_builtin(method):
            return _custom_mask(method, parameter, importance_scores, generator)
        scores = parameter.orig if importance_scores is None else importance_scores
        if importance_scores is None and parameter.mask is not None and method.READS_PRUNED:
            scores = masked(parameter.orig.detach(), parameter.mask)
        with drawing_from(method, generator):
            if parameter.mask is None:
                return method.first_mask(scores.detach(), parameter.orig.detach())
            mask = parameter.copied_mask()
            method.prune_(mask, scores.detach())
        return mask
    except ValueError as error:
        raise ValueError(f"Pruning {parameter.label}: {error}") from error


def _custom_mask(
    method: MaskMethod, parameter: ModuleParameter, importance_scores: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    orig, before = parameter.orig, parameter.mask
    if before is None:
        scores = orig if importance_scores is None else importance_scores
        with drawing_from(method, generator):
            computed = method.compute_mask(scores, default_mask=torch.ones_like(orig))
        # A copy: the computed mask may be a slice that keeps a larger tensor in memory, or may be shared.
        mask = torch.empty_like(orig.detach()).copy_(_expanded(method, computed, orig))
    else:
        scores = masked(orig, before) if importance_scores is None else importance_scores
        mask = prune_survivors(method, scores, before, generator).to(orig.dtype)
    if not torch.logical_or(mask == 0, mask == 1).all():
        raise ValueError(f"{type(method).__name__} must compute a mask of only zeros and ones.")
    return mask


def prune_survivors(
    method: MaskMethod, t: Tensor, default_mask: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Return a new mask: `default_mask` after `method` pruned further entries or channels among the survivors."""
    mask = default_mask.detach().to(dtype=t.dtype, copy=True)
    with drawing_from(method, generator):
        if is_builtin(method):
            method.prune_(mask, t)
        else:
            where = _survivors(method, default_mask)
            before = default_mask.detach().clone()  # slices of the active mask would be views of it
            computed = method.compute_mask(t[where], default_mask=before[where])
            mask[where] = _expanded(method, computed, before[where]).to(mask.dtype)
    return mask


def _expanded(method: MaskMethod, computed: Tensor, like: Tensor) -> Tensor:
    """Return a computed mask, broadcast to the shape of `like`."""
    try:
        return computed.detach().expand_as(like)
    except RuntimeError:
        raise ValueError(
            f"`compute_mask` of {type(method).__name__} returned a mask of shape {tuple(computed.shape)}; it must have "
            f"the shape of its argument `t`, {tuple(like.shape)}."
        ) from None


def _survivors(method: MaskMethod, mask: Tensor) -> Tensor | tuple[slice | Tensor, ...]:
    """Return an index of the entries that `method` may prune next, by its `PRUNING_TYPE`."""
    kind = getattr(method, "PRUNING_TYPE", None)
    if kind == "unstructured":
        return mask == 1
    everything = (slice(None),) * mask.dim()
    if kind == "global":
        return everything
    if kind != "structured":
        raise ValueError(
            f"`PRUNING_TYPE` (={kind!r}) of {type(method).__name__} must be 'unstructured', 'structured' or 'global'."
        )
    if not hasattr(method, "dim"):
        raise AttributeError(f"{type(method).__name__} has PRUNING_TYPE 'structured', so it needs an attribute `dim`.")
    dim = check_dim(mask, method.dim)
    return (*everything[:dim], alive_channels(mask, dim), *everything[dim + 1 :])


@contextmanager
def drawing_from(method: Any, generator: torch.Generator | None) -> Iterator[None]:
    """Set `method.generator` inside the context; it is reset afterwards, because a generator cannot be pickled."""
    if generator is None:
        yield
        return
    check_generator(generator)
    before = vars(method).get("generator")
    method.generator = generator
    try:
        yield
    finally:
        if before is None:
            del method.generator
        else:
            method.generator = before


class BasePruningMethod(ABC):
    """Base class of methods that choose which entries of a tensor to prune.

    A subclass defines `compute_mask` and `PRUNING_TYPE`. The type decides which scores `compute_mask` gets in later
    rounds:

    - 'unstructured': a 1-D tensor of the unpruned entries;
    - 'structured': the channels along `self.dim` that are not entirely pruned;
    - 'global': the whole tensor.

    In the first round `compute_mask` always gets the whole tensor. For random methods, `self.generator` is the
    generator passed to `apply` (None: torch's default generator).
    """

    PRUNING_TYPE: ClassVar[str]
    generator: torch.Generator | None = None
    _tensor_name: str | None = None
    _reparam: Reparam | None = None

    @property
    def __name__(self) -> str:
        """Name of a hook, which `torch.jit.script` reads first; raises AttributeError."""
        raise AttributeError(
            f"`{type(self).__name__}` (the pruning hook of {self._tensor_name!r}) cannot be compiled by "
            "torch.jit.script; call pruning.remove_all(model) first."
        )

    def __call__(self, module: nn.Module, _inputs: object) -> None:
        """Update `module.name` before a forward."""
        # A forward that was running when a later round began still calls the hook of the earlier round.
        reparam = self._reparam or next((own for _, own in held(module) if own.name == self._tensor_name), None)
        if reparam is None:
            raise RuntimeError(f"{type(self).__name__} was called as a hook before it was applied; call `apply` first.")
        reparam.refresh(module)

    @abstractmethod
    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return the mask of `t`: 1 keeps an entry, 0 prunes it.

        Args:
            t: importance scores; the parameter itself if no scores were passed.
            default_mask: mask so far, with the shape of `t`; do not change it.
        """

    @classmethod
    def apply(
        cls,
        module: nn.Module,
        name: str,
        *args: Any,
        importance_scores: Tensor | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> BasePruningMethod:
        """Prune the parameter `name` of `module`, in addition to its earlier pruning.

        The parameter is renamed to `name_orig` (the same object), the mask becomes the buffer `name_mask`, and `name`
        becomes a plain tensor that a forward pre-hook updates. A call that raises an error does not change the module.

        Args:
            module: module of the parameter.
            name: name of the parameter, for example "weight".
            args, kwargs: arguments of the method's constructor.
            importance_scores: scores of the parameter's shape; None: the current values of the parameter, masked.
            generator: source of random draws; None: torch's default generator.

        Returns:
            the hook: the method itself, or a `PruningContainer` if the parameter was pruned before.

        Raises:
            AttributeError: `module` has no parameter `name`.
            ValueError: scores have another shape or are NaN, an int amount is larger than the number of survivors, or
                the parameter holds no floats, as a quantised one.
        """
        parameter = ModuleParameter.of(module, name)
        check_prunable(parameter.label, parameter.orig)
        method = cls(*args, **kwargs)
        method._tensor_name = name
        (hook,) = commit([(method, parameter, next_mask(method, parameter, importance_scores, generator))])
        return hook

    def apply_mask(self, module: nn.Module) -> Tensor:
        """Return the pruned tensor: `name_orig` where `name_mask` is 1, else 0; subclasses may override this."""
        name = self._name_of(module)
        return masked(getattr(module, orig_name(name)), getattr(module, mask_name(name)))

    def prune(
        self,
        t: Tensor,
        default_mask: Tensor | None = None,
        importance_scores: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Prune a plain tensor without a module: return `t` with zeros in place of pruned entries.

        Args:
            t: tensor to prune.
            default_mask: mask so far, with the shape of `t`; None: all ones.
            importance_scores: scores with the shape of `t`; None: `t` itself.
            generator: source of random draws; None: torch's default generator.

        Raises:
            ValueError: `importance_scores` have another shape than `t`.
        """
        check_prunable("t", t)
        scores = t if importance_scores is None else importance_scores
        check_same_shape(scores, t, "t")
        mask = torch.ones_like(t) if default_mask is None else default_mask
        with drawing_from(self, generator):
            return masked(t, self.compute_mask(scores, default_mask=mask))

    def remove(self, module: nn.Module) -> None:
        """Make the pruning of `module` permanent: `name` is a parameter again (the same object), with zeros in it.

        Raises:
            RuntimeError: the method was not applied.
        """
        ModuleParameter.of(module, self._name_of(module)).release()

    def forget(self) -> None:  # noqa: B027 - most methods have nothing to release
        """Release data that only `compute_mask` needed; called after the mask was applied."""

    def _name_of(self, module: nn.Module) -> str:
        if self._tensor_name is None:
            raise RuntimeError(f"{module} was not pruned by this {type(self).__name__}; call `apply` first.")
        return self._tensor_name


class PruningContainer(BasePruningMethod):
    """Container of the methods applied to one parameter, oldest first.

    `compute_mask` applies the newest method to the survivors. Amounts are relative to the survivors: k rounds of amount
    p leave a density of (1 - p)^k.

    Args:
        methods: methods, or iterables of methods.
    """

    def __init__(self, *methods: BasePruningMethod | Iterable[BasePruningMethod]) -> None:
        self._pruning_methods: tuple[BasePruningMethod, ...] = ()
        for item in methods:
            if isinstance(item, Iterable):
                for method in item:
                    self.add_pruning_method(method)
            else:
                self.add_pruning_method(item)

    def add_pruning_method(self, method: BasePruningMethod) -> None:
        """Append `method`.

        Raises:
            TypeError: `method` is no pruning method.
            ValueError: `method` prunes a parameter with another name.
        """
        if not is_pruning_hook(cast(object, method)):
            raise TypeError(f"`method` (={method!r}) must be a BasePruningMethod, not {type(method).__name__}.")
        name = getattr(method, "_tensor_name", None)
        if not self._pruning_methods and self._tensor_name is None:
            self._tensor_name = name
        elif name != self._tensor_name:
            raise ValueError(
                f"`method` prunes the parameter {name!r}, but this container prunes {self._tensor_name!r}; use one "
                "container for each parameter."
            )
        self._pruning_methods += (method,)

    def __len__(self) -> int:
        return len(self._pruning_methods)

    def __iter__(self) -> Iterator[BasePruningMethod]:
        return iter(self._pruning_methods)

    def __getitem__(self, index: int) -> BasePruningMethod:
        return self._pruning_methods[index]

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return `default_mask` after the newest method pruned survivors, in the dtype of `t`.

        Raises:
            ValueError: the container is empty, or the method's `PRUNING_TYPE` is unknown.
        """
        if not self._pruning_methods:
            raise ValueError("An empty PruningContainer computes no mask; call `add_pruning_method` first.")
        return prune_survivors(self._pruning_methods[-1], t, default_mask, self.generator)


def commit(plan: Sequence[tuple[BasePruningMethod, ModuleParameter, Tensor]]) -> list[BasePruningMethod]:
    """Apply every mask with its method, or change nothing if one fails; return the hooks."""
    hooks = []
    with restored_on_error(parameter.module for _, parameter, _ in plan):
        for method, parameter, mask in plan:
            hook = appended(parameter.hook, method)
            replaced = type(hook).apply_mask is not BasePruningMethod.apply_mask
            parameter.hold(hook, mask, hook.apply_mask if replaced else None)
            hooks.append(hook)
    for method, _, _ in plan:
        method.forget()
    return hooks


def appended(hook: BasePruningMethod | None, method: BasePruningMethod) -> BasePruningMethod:
    """Return a hook with the methods of `hook`, which may be a hook of torch, followed by `method`."""
    if hook is None:
        return method
    if isinstance(hook, PruningContainer):
        hook.add_pruning_method(method)
        return hook
    return PruningContainer(hook, method)  # `hook` is one method, or torch's container, which is iterated


# Registration makes torch's isinstance checks, `is_pruned` and `remove` accept these methods.
torch_prune.BasePruningMethod.register(BasePruningMethod)  # type: ignore[type-abstract]
torch_prune.PruningContainer.register(PruningContainer)
