"""The base of all pruning methods: how one is applied and removed; and the container of successive ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

from pruning.holding.masking import masked
from pruning.holding.parameter import ModuleParameter, check_same_shape, is_pruning_hook
from pruning.holding.reparam import Reparam, held, mask_name, orig_name
from pruning.holding.rollback import restored_on_error
from pruning.methods.next_masks import drawing_from, next_mask, prune_survivors


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
        parameter = ModuleParameter.of(module, name)
        method = cls(*args, **kwargs)
        method._tensor_name = name
        (hook,) = commit([(method, parameter, next_mask(method, parameter, importance_scores, generator))])
        return hook

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
        ModuleParameter.of(module, self._name_of(module)).release()

    def forget(self) -> None:  # noqa: B027 - most methods have nothing to let go of
        """Let go of what only computing the mask has needed: called once the mask is in force."""

    def _name_of(self, module: nn.Module) -> str:
        if self._tensor_name is None:
            raise RuntimeError(f"{module} has not been pruned by this {type(self).__name__}; call `apply` first.")
        return self._tensor_name


class PruningContainer(BasePruningMethod):
    """The methods applied to one parameter, oldest first; `compute_mask` is that of the newest, on what survives.

    Amounts are relative to the survivors: k rounds of amount p leave (1 - p)^k.

    Args:
        methods: methods, or one iterable of them.
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
            TypeError: it is no pruning method.
            ValueError: it acts on a parameter of another name.
        """
        if not is_pruning_hook(cast(object, method)):
            raise TypeError(f"`method` (={method!r}) must be a BasePruningMethod, not {type(method).__name__}.")
        name = getattr(method, "_tensor_name", None)
        if not self._pruning_methods and self._tensor_name is None:
            self._tensor_name = name
        elif name != self._tensor_name:
            raise ValueError(
                f"`method` acts on the parameter {name!r}, this container on {self._tensor_name!r}; "
                "use one container for each parameter."
            )
        self._pruning_methods += (method,)

    def __len__(self) -> int:
        return len(self._pruning_methods)

    def __iter__(self) -> Iterator[BasePruningMethod]:
        return iter(self._pruning_methods)

    def __getitem__(self, index: int) -> BasePruningMethod:
        return self._pruning_methods[index]

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return `default_mask` without what the newest method prunes of the rest, in the dtype of `t`.

        Raises:
            ValueError: the container is empty, or the method's `PRUNING_TYPE` is unknown.
        """
        if not self._pruning_methods:
            raise ValueError("An empty PruningContainer computes no mask; call `add_pruning_method` first.")
        return prune_survivors(self._pruning_methods[-1], t, default_mask, self.generator)


def commit(plan: Sequence[tuple[BasePruningMethod, ModuleParameter, Tensor]]) -> list[BasePruningMethod]:
    """Put every mask in force and remember its method, or change nothing; return the hooks that hold them."""
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
    """Return the hook that holds `method` after those of `hook`, which may be one of torch's."""
    if hook is None:
        return method
    if isinstance(hook, PruningContainer):
        hook.add_pruning_method(method)
        return hook
    return PruningContainer(hook, method)  # of one method, or of all in a container of torch's


# torch's isinstance checks, its `is_pruned` and its `remove` then accept these methods.
torch_prune.BasePruningMethod.register(BasePruningMethod)  # type: ignore[type-abstract]
torch_prune.PruningContainer.register(PruningContainer)
