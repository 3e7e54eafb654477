"""The base of all pruning methods: what a method decides (`compute_mask`), and how it is applied and removed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeGuard, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

from pruning.masking import masked
from pruning.reparam import Reparam, held, mask_name, orig_name, publish


class BasePruningMethod(ABC):
    """A rule that says which entries of a tensor to prune.

    A subclass defines `compute_mask` and `PRUNING_TYPE`:

    - 'unstructured': in later rounds `compute_mask` sees the 1-D tensor of the entries that are still unpruned;
    - 'structured': it sees the channels along `self.dim` that are not all pruned;
    - 'global': it sees the whole tensor.

    In the first round it always sees the whole tensor. `self.generator` is the generator given to `apply` (None for
    torch's default one), for methods that draw.
    """

    PRUNING_TYPE: ClassVar[str]
    generator: torch.Generator | None = None
    _tensor_name: str | None = None
    _reparam: Reparam | None = None

    def __call__(self, module: nn.Module, _inputs: object) -> None:
        """Bring `module.name` up to date before a forward."""
        # A forward that was under way when a later round began still calls the hook of the round before.
        reparam = self._reparam or next((own for _, own in held(module) if own.name == self._tensor_name), None)
        if reparam is None:
            raise RuntimeError(f"{type(self).__name__} is called as a hook but has not been applied to a module.")
        reparam.refresh(module)
        self.publish_own(module)

    def publish_own(self, module: nn.Module) -> None:
        """Let a subclass's own `apply_mask` say what the parameter reads, straight-through or softly masked, say."""
        if applies_own_mask(self):
            publish(module, self._name_of(module), self.apply_mask(module))

    @abstractmethod
    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return the mask of `t`: 1 keeps an entry, 0 prunes it.

        Args:
            t: importance scores; the parameter itself unless scores were given.
            default_mask: the mask so far, of the shape of `t`; must not be changed.
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
        """Prune the parameter `name` of `module`, on top of what is pruned already.

        The parameter moves to `name_orig` (the same object), the mask becomes the buffer `name_mask`, `name` a plain
        tensor that a forward pre-hook keeps up to date. A call that raises leaves the module as it was.

        Args:
            module: holds the parameter.
            name: of the parameter, say "weight".
            args, kwargs: of the constructor of the method.
            importance_scores: scores of the parameter's shape to prune by; None takes the current values of the
                parameter, masked.
            generator: source of random draws; None is torch's default generator.

        Returns:
            The hook: the method itself, from the second application on a `PruningContainer`.

        Raises:
            AttributeError: `module` has no parameter `name`.
            ValueError: scores of another shape or with NaN, an int amount above what is left.
        """
        from pruning.target import Target  # which needs the container, a subclass of this class

        target = Target.of(module, name)
        method = cls(*args, **kwargs)
        method._tensor_name = name
        return target.commit(method, target.compute_mask(method, importance_scores, generator))

    def apply_mask(self, module: nn.Module) -> Tensor:
        """Return the pruned tensor: `name_orig` where `name_mask` is 1, else 0; a subclass may return another."""
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
        """Return `t` with the entries set to zero that this method prunes; no module is involved.

        Args:
            t: the tensor to prune.
            default_mask: the mask so far, of the shape of `t`; None is all ones.
            importance_scores: scores of the shape of `t`; None takes `t`.
            generator: source of random draws; None is torch's default generator.

        Raises:
            ValueError: `importance_scores` have another shape than `t`.
        """
        scores = t if importance_scores is None else importance_scores
        check_same_shape(scores, t, "t")
        mask = torch.ones_like(t) if default_mask is None else default_mask
        with drawing_from(self, generator):
            return masked(t, self.compute_mask(scores, default_mask=mask))

    def remove(self, module: nn.Module) -> None:
        """Make the pruning of `module` permanent: `name` is a parameter again (the same object), with its zeros.

        Raises:
            RuntimeError: the method has not been applied.
        """
        from pruning.target import Target

        Target.of(module, self._name_of(module)).release()

    def forget(self) -> None:  # noqa: B027 - most methods have nothing to let go of
        """Let go of what only computing the mask has needed: called once the mask is in force."""

    def _name_of(self, module: nn.Module) -> str:
        if self._tensor_name is None:
            raise RuntimeError(f"{module} has not been pruned by this {type(self).__name__}; call `apply` first.")
        return self._tensor_name


class BuiltinMethod(BasePruningMethod):
    """A method that prunes by marking entries of a mask in place, so that it touches no more than it must.

    Where a subclass replaces `compute_mask`, that is what is called, with what torch would pass it.
    """

    READS_PRUNED: ClassVar[bool] = False
    """Whether scores of pruned entries matter, so that they must be masked first."""

    def prune_(self, mask: Tensor, scores: Tensor) -> None:
        """Set to 0, in place, what is pruned next of the entries still nonzero in `mask`; raise before writing."""
        self.prune_across_([mask], [scores])

    def prune_across_(self, masks: Sequence[Tensor], scores: Sequence[Tensor]) -> None:
        """As `prune_`, with the entries of all tensors ranked as one: an unstructured method defines this one."""
        raise NotImplementedError(f"{type(self).__name__} does not prune across tensors.")

    def first_mask(self, scores: Tensor, like: Tensor) -> Tensor:
        """Return the mask of a tensor that was never pruned, of the shape, strides and dtype of `like`."""
        mask = torch.ones_like(like)
        self.prune_(mask, scores)
        return mask

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return `default_mask` without what this method prunes of `t`, every entry of `t` being eligible."""
        return self.first_mask(t, default_mask).mul_(default_mask)


def is_builtin(method: object) -> TypeGuard[BuiltinMethod]:
    """Say whether `method.prune_` decides, nobody having replaced `compute_mask` in a subclass (or patched it)."""
    return isinstance(method, BuiltinMethod) and type(method).compute_mask is BuiltinMethod.compute_mask


def applies_own_mask(hook: BasePruningMethod | None) -> TypeGuard[BasePruningMethod]:
    """Say whether `hook` is of a subclass that replaces `apply_mask`."""
    return isinstance(hook, BasePruningMethod) and type(hook).apply_mask is not BasePruningMethod.apply_mask


def is_pruning_hook(hook: object) -> TypeGuard[BasePruningMethod]:
    """Say whether `hook` is a pruning method, of this package or of torch (which accepts ours as its own)."""
    return isinstance(hook, torch_prune.BasePruningMethod)


@contextmanager
def drawing_from(method: BasePruningMethod, generator: torch.Generator | None) -> Iterator[None]:
    """Let `method` draw from `generator` for a while; it is not kept, since a generator cannot be pickled."""
    if generator is None:
        yield
        return
    if not isinstance(cast(object, generator), torch.Generator):
        raise TypeError(f"`generator` (={generator!r}) must be a torch.Generator; make one by `manual_seed`.")
    before = vars(method).get("generator")
    method.generator = generator
    try:
        yield
    finally:
        if before is None:
            del method.generator
        else:
            method.generator = before


def check_tensor(value: object, name: str) -> None:
    """Raise `TypeError` unless the argument `name` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a tensor, not {type(value).__name__}; convert it by `torch.as_tensor`.")


def check_same_shape(scores: Tensor, tensor: Tensor, name: str) -> None:
    """Raise `TypeError` unless `scores` are a tensor, `ValueError` unless they have the shape of `tensor`."""
    check_tensor(scores, "importance_scores")
    if scores.shape != tensor.shape:
        raise ValueError(
            f"`importance_scores` (of shape {tuple(scores.shape)}) must have the shape of `{name}`, "
            f"{tuple(tensor.shape)}."
        )


# torch's isinstance checks, its `is_pruned` and its `remove` then accept these methods.
torch_prune.BasePruningMethod.register(BasePruningMethod)  # type: ignore[type-abstract]
