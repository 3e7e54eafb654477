"""Masks that change within a training: the base of all dynamics, with its hooks in the optimizer and its state."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping, MutableSet
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pruning.choices.axes import Scope, Unit
from pruning.dynamics.mask_history import MaskHistory, MaskUpdate
from pruning.holding.parameter import (
    check_masks,
    outside_inference_mode,
    place,
    pruned_names,
    unwrapped,
)
from pruning.holding.reparam import mask_
from pruning.layouts import layout_of
from pruning.masks.keeper import MaskKeeper
from pruning.masks.mask_set import MaskSet
from pruning.schedule import step_of
from pruning.scores.readings.network import weights_of
from pruning.selection.selection_groups import Groups, groups_of

_ATTACHED: WeakKeyDictionary[Optimizer, WeakSet[Any]] = WeakKeyDictionary()
"""Optimizer -> dynamics that are attached to it."""


def attached_to(optimizer: Optimizer) -> MutableSet[Any]:
    """Return the dynamics that are attached to an optimizer, to be changed in place."""
    return _ATTACHED.setdefault(optimizer, WeakSet())


def aliases_of(model: nn.Module, masks: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, str]:
    """Return further name of a tied parameter -> its first name; check that masks fit, and that one optimizer trains.

    Raises:
        ValueError: a parameter is missing, has another shape, holds no floats, is pruned by hooks, is tied to one with
            another mask, is trained by another optimizer, or has changing masks already.
    """
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    taken = {id(other.parameter(name)): other for other in attached_to(optimizer) for name in other.kept}
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, mask in masks.items():
        module, leaf = place(model, name, mask.shape)
        if {leaf, leaf.removesuffix("_orig")} & pruned_names(module):
            raise ValueError(
                f"`{name}` is pruned by hooks; take its masks by MaskSet.collect, and call remove_all first."
            )
        parameter = module.get_parameter(leaf)
        other = first.setdefault(id(parameter), name)
        if other != name:
            if not torch.equal(mask != 0, masks[other] != 0):
                raise ValueError(f"`masks` of {other} and {name} must be equal, because the two share one parameter.")
            found[name] = other
        if parameter.requires_grad and id(parameter) not in own:
            raise ValueError(
                f"`{name}` is masked, but is no parameter of `optimizer`; use one optimizer for all masks."
            )
        if id(parameter) in taken:
            raise ValueError(f"`{name}` has masks of {taken[id(parameter)]} already; call its release() first.")
    return found


RECORDS = 100
"""Largest number of records of a dynamics that changes masks in every step."""


class Dynamics:
    """Masks that change while an optimizer trains a network.

        dynamics = pruning.dynamics.rigl(every=100, until=0.75)
        dynamics.attach(model, masks, optimizer, length=2000, generator=generator)
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()                    # the hooks change and enforce the masks
        dynamics.release()
        dynamics.masks                          # a MaskSet

    The network stays plain; pruned entries are 0 between two steps. Gradients of pruned entries are 0, except where a
    method reads them. A step that the optimizer does not take, for example because a GradScaler found an overflow, does
    not count. A subclass overrides `wants_dense`, `before_step` and `after_step`, and calls `change`.
    """

    keeps_counts: ClassVar[bool] = False
    """Whether the number of kept entries of each tensor never changes; a sweep then prunes before the training."""
    nested: ClassVar[bool] = False
    """Whether pruned entries stay pruned."""
    replaces_steps: ClassVar[bool] = False
    """Whether an update takes the place of a step of the optimizer."""
    enforces_itself: ClassVar[bool] = False
    """Whether the method reads all gradients in every step and enforces the masks itself."""
    prunes_less: ClassVar[str] = "a lower `sparsity`"
    """Change of the options by which fewer entries are pruned."""
    changes_each_step: ClassVar[bool] = False
    """Whether masks may change in every step; the history then compares at most about `RECORDS` of them."""
    new_values: tuple[float, float] = (-math.inf, math.inf)
    """Lowest and highest value with which a regrown entry may begin."""
    first: float = 0.0
    """Place of the first update."""
    until: float = 1.0
    """Place of the last update, or from which masks stay."""

    model: nn.Module
    optimizer: Optimizer
    length: int
    """Number of steps of the training."""
    generator: torch.Generator | None
    step: int = 0
    """Number of finished steps."""
    kept: dict[str, Tensor]
    """Name of a parameter -> bool, True where an entry is kept; tied parameters under the first of their names."""

    is_attached: bool = False
    """Whether a training is going on: after `attach` and before `release`."""
    _keeper: MaskKeeper | None = None
    _is_skipped: bool = False
    """Whether the optimizer leaves out the step that is going on, because a fused one found an overflow."""
    _handles: tuple[RemovableHandle, ...] = ()

    # --- overridden by the methods ---

    def begin(self) -> None:
        """Begin a training: the masks are known and nothing was trained yet."""

    def wants_dense(self) -> bool:
        """Return whether the next step reads the gradients of pruned entries."""
        return False

    def before_step(self) -> bool:
        """Act before the optimizer's step, with its gradients; return whether this replaces the step."""
        return False

    def after_step(self) -> None:
        """Act after `step` finished steps."""

    @property
    def is_at_target(self) -> bool:
        """Whether the masks prune as much as in the end."""
        return self.keeps_counts or self.step >= self.place_of(self.until)

    def try_update(self) -> None:
        """Raise ValueError if a later update cannot succeed; nothing is changed."""

    def own_state(self) -> dict[str, Any]:
        """Return what the method remembers besides the masks: tensors and plain values."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore `own_state`."""

    # --- used in a training ---

    @outside_inference_mode()
    def attach(
        self,
        model: nn.Module,
        masks: Mapping[str, Tensor] | None,
        optimizer: Optimizer,
        *,
        length: int,
        generator: torch.Generator | None = None,
        hooks: bool = True,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Apply the masks, and change them from now on as the optimizer takes steps.

        Args:
            model: plain network with every parameter that `masks` names, on the device of the training.
            masks: name -> tensor of the parameter's shape, nonzero where an entry is kept; for example a `MaskSet`.
                None: all weights that `prune` takes by default, with all their entries.
            optimizer: optimizer of these parameters; its state of dropped and of regrown entries is set to 0.
            length: number of steps that the training takes; masks stay in later ones.
            generator: source of random draws; None: torch's default generator.
            hooks: act by the optimizer's hooks; False: the caller calls `before` and `after` around each step.
            state: continue from a `state`, with the network and the optimizer restored to the same step; its masks
                replace `masks`.

        Raises:
            ValueError: a parameter is missing, has another shape, is pruned by hooks, is tied to one with another mask,
                is trained by another optimizer, or has changing masks already; `length` is not positive; a place lies
                outside of the training; or this dynamics is attached already.
        """
        if self.is_attached:
            raise ValueError(f"{self} is attached already; call release() first, or make another one.")
        if masks is None:
            masks = {name: torch.ones_like(each.value, dtype=torch.bool) for name, each in weights_of(model).items()}
        check_masks(masks)
        if not masks:
            raise ValueError("`masks` (={}) must contain at least one mask; make them by pruning.plan, for example.")
        if length < 1:
            raise ValueError(f"`length` (={length}) must be at least 1, the number of steps of the training.")
        aliases = aliases_of(model, masks, optimizer)
        self.model, self.optimizer, self.length, self.generator = model, optimizer, length, generator
        self._check_places()
        self.step, self._aliases, self._told_dead = 0, aliases, set[str]()
        self._shapes = {name: mask.shape for name, mask in masks.items() if name not in self._aliases}
        self.kept = {name: _on(self.parameter(name), masks[name]) for name in self._shapes}
        self.history = self._new_history()
        try:
            if state is None:
                self._begin()
            else:
                self.load_state(state)
        except BaseException:
            self.stop()
            raise
        self.is_attached = True
        attached_to(optimizer).add(self)
        if hooks:
            self._handles = (
                optimizer.register_step_pre_hook(self._pre_hook),
                optimizer.register_step_post_hook(lambda *_: self.after()),
            )

    def before(self) -> bool:
        """Act before a step; return whether the optimizer must leave this step out. Only for `hooks=False`."""
        self._require_attached()
        if self._keeper is not None:
            self._keeper.follow()
        overflow = getattr(self.optimizer, "found_inf", None)  # a GradScaler leaves the step to a fused optimizer
        self._is_skipped = overflow is not None and bool(overflow)
        if self._is_skipped:
            return False
        with torch.no_grad():
            if self.wants_dense():
                self._prepare_gradients()
            replaced = self.before_step()
            if replaced:
                for group in self.optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            elif self._dense and not self.enforces_itself:
                for name, kept in self.kept.items():
                    gradient = self.parameter(name).grad
                    if gradient is not None:
                        mask_(gradient, kept)
        return replaced

    def after(self) -> None:
        """Enforce the masks after a step, and change them if it is time. Only for `hooks=False`."""
        self._require_attached()
        if self._keeper is not None:
            self._keeper.enforce()
        if self._is_skipped:
            return
        self.step += 1
        with torch.no_grad():
            self.after_step()
        if self._keeper is None or self.wants_dense() != self._dense:
            self._enforce()

    @property
    def masks(self) -> MaskSet:
        """The masks as they are now."""
        named = self.kept | {name: self.kept[first] for name, first in self._aliases.items()}
        return MaskSet(named)

    def release(self) -> None:
        """Stop changing and enforcing the masks; pruned entries are 0, as after each step.

        Masks that have not changed for the last time cause a warning with their sparsity.
        """
        self._require_attached()
        if not self.is_at_target:
            asked = getattr(self, "sparsity", None)
            warnings.warn(
                f"{self} is released after {self.step} of {self.length} steps, before its last update (step "
                f"{self.place_of(self.until)}): the masks have a sparsity of {self.masks.sparsity():.4f}"
                f"{'' if asked is None else f', and `sparsity` (={asked}) is not reached'}; take all steps, attach "
                "with the `length` of the loop, or call stop() if the training goes on elsewhere.",
                stacklevel=2,
            )
        self.stop()

    def stop(self) -> None:
        """Stop changing and enforcing the masks wherever the training is, without a warning."""
        if self._keeper is not None:
            self._keeper.stop()
        self._keeper, self.is_attached = None, False
        attached_to(self.optimizer).discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which is detached, because optimizers are copied without their hooks."""
        if not self.is_attached:
            return vars(self)
        warnings.warn(
            f"{self} is attached, but its copy is not, because optimizers are copied without hooks: the copied network "
            "trains without masks until copy.attach(model, copy.masks, optimizer, length=..., state=copy.state()).",
            stacklevel=2,
        )
        return {**vars(self), "is_attached": False, "_keeper": None, "_handles": ()}

    def state(self) -> dict[str, Any]:
        """Return the state between two steps: tensors and plain values, from which `load_state` continues.

        The weights and the optimizer's state are not part of it.
        """
        return {
            "method": type(self).__name__,
            "step": self.step,
            "kept": {name: kept.clone() for name, kept in self.kept.items()},
            "history": self.history.state(),
            "generator": None if self.generator is None else self.generator.get_state(),
            "own": self.own_state(),
        }

    @outside_inference_mode()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, after the network and the optimizer were restored to the same step.

        Raises:
            ValueError: the state belongs to another method or network, or has a generator that this training lacks.
        """
        if state["method"] != type(self).__name__:
            raise ValueError(f"`state` belongs to {state['method']}, not to {self}; pass the state of this method.")
        if (state["generator"] is None) != (self.generator is None):
            was = "without" if state["generator"] is None else "with"
            raise ValueError(f"`state` belongs to a training {was} a generator; attach {was} one.")
        for name in state["kept"]:
            self.add(name)
        shapes = {name: kept.shape for name, kept in self.kept.items()}
        if {name: kept.shape for name, kept in state["kept"].items()} != shapes:
            raise ValueError("`state` belongs to another network: its masks have other names or shapes.")
        self.step = state["step"]
        self.kept = {name: _on(self.parameter(name), kept) for name, kept in state["kept"].items()}
        self.history = self._new_history()
        self.history.load_state(state["history"])
        if self.generator is not None:
            self.generator.set_state(state["generator"].cpu())
        self.load_own_state(state["own"])
        self._enforce()

    @property
    def updates(self) -> tuple[MaskUpdate, ...]:
        """The changes of the masks so far."""
        return tuple(self.history.updates)

    def mask(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the pruned entries of tensors beside the network, such as averages of its weights, to 0 in place.

        Raises:
            ValueError: no tensor has the name of a mask; wrappers' parts of the names do not count.
        """
        plain = {re.sub(r"(^|\.)(module|_orig_mod)(?=\.)", "", name).lstrip("."): name for name in tensors}
        names = [name for name in (*self.kept, *self._aliases) if name in plain]
        if not names:
            raise ValueError(
                f"`tensors` (of {len(tensors)} names) must have a masked parameter, such as {next(iter(self.kept))}."
            )
        for name in names:
            tensor = tensors[plain[name]]
            mask_(tensor, self.kept[self._aliases.get(name, name)].to(tensor.device))

    # --- used by the methods ---

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter that now has this name."""
        module, leaf = place(self.model, name, self._shapes[name])
        return module.get_parameter(leaf)

    def parts(self, unit: Unit | None = None, scope: Scope | None = None) -> Groups:
        """Return the units of the masked parameters."""
        layouts = {name: layout_of(*place(self.model, name, shape)) for name, shape in self._shapes.items()}
        return groups_of(self._shapes, unit, scope, layouts)

    def add(self, name: str) -> None:
        """Mask another parameter, which keeps all entries for now, unless it has a mask already."""
        if name not in self.kept and name not in self._aliases:
            parameter = unwrapped(self.model).get_parameter(name)
            self._shapes[name] = parameter.shape
            self.kept[name] = torch.ones_like(parameter, dtype=torch.bool)

    def change(self, masks: Mapping[str, Tensor], *, grown: Mapping[str, Tensor] | None = None) -> None:
        """Replace masks: dropped entries become 0, and the optimizer forgets dropped and regrown entries.

        Args:
            masks: name -> bool on the parameter's device; other masks stay.
            grown: name -> bool for entries that begin anew, if these are others than those that were 0 before.
        """
        if self._keeper is not None and not self.enforces_itself:
            self._keeper.stop()
            self._keeper = None
        before = dict(self.kept)
        for name, after in masks.items():
            new = after & ~before[name] if grown is None or name not in grown else grown[name]
            parameter = self.parameter(name)
            mask_(parameter, after)
            forget(self.optimizer, parameter, after & ~new)
            self.kept[name] = after
        self.record()

    def record(self) -> None:
        """Record the masks of now in the history."""
        last = min(self.length, self.place_of(self.until))
        self.history.record(self.step, self.kept, always=self.step == last)

    def tell_dead(self, names: Iterable[str]) -> None:
        """Warn of tensors that no entry is left of, once for each."""
        if dead := [name for name in names if name not in self._told_dead]:
            self._told_dead.update(dead)
            warnings.warn(
                f"every entry of {', '.join(dead)} is pruned after step {self.step}, so nothing passes through; pass "
                f"{self.prunes_less}.",
                stacklevel=2,
            )

    def direction(self, parameter: nn.Parameter) -> float:
        """Return 1 if the optimizer minimises along a parameter's gradient, and -1 if it maximises."""
        groups = [group for group in self.optimizer.param_groups if any(each is parameter for each in group["params"])]
        return -1.0 if groups and groups[0].get("maximize") else 1.0

    def progress(self, every: int) -> float | None:
        """Return the fraction of the way from the first update to the last one, if an update is due after this step."""
        begin, until = self.place_of(self.first), self.place_of(self.until)
        if not begin <= self.step <= until or ((self.step - begin) % every and self.step != until):
            return None
        return (self.step - begin) / max(1, until - begin)

    def place_of(self, given: float) -> int:
        """Return the step of a place: up to 1 it is a fraction of the training, above 1 a step."""
        return step_of(given, self.length)

    def _enforce(self) -> None:
        """Enforce the masks of now, with the gradients that the next step needs."""
        if self._keeper is not None:
            self._keeper.stop()
        self._dense = self.wants_dense()
        masks = {} if self.enforces_itself else self.kept
        self._keeper = MaskKeeper(self.model, masks, "dense" if self._dense else "masked")
        self._keeper.follow()

    def _begin(self) -> None:
        """Apply the first masks, and forget what the optimizer remembers of pruned entries."""
        if not self.enforces_itself:
            self._enforce()
            for name, kept in self.kept.items():
                forget(self.optimizer, self.parameter(name), kept)
        with torch.no_grad():
            self.begin()
        self.history = self._new_history()
        self._enforce()

    def _new_history(self) -> MaskHistory:
        return MaskHistory.of(self.kept, max(1, self.length // RECORDS) if self.changes_each_step else 1)

    def _check_places(self) -> None:
        begin, until = self.place_of(self.first), self.place_of(self.until)
        if not begin < until <= self.length:
            raise ValueError(
                f"`until` (={self.until}, step {until}) must lie after `begin` (={self.first}, step {begin}), and at "
                f"most at step {self.length}, the end of the training; up to 1 a place is a fraction of it."
            )

    def _prepare_gradients(self) -> None:
        """Make the gradients of masked parameters dense, and undo the scaling that a fused optimizer would undo."""
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale)
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        for name in self.kept:
            parameter = self.parameter(name)
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def _require_attached(self) -> None:
        if not self.is_attached:
            raise ValueError(f"{self} is not attached; call attach(model, masks, optimizer, length=...) first.")

    def _pre_hook(self, _optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not self.wants_dense():
            self.before()
            return None
        if self.enforces_itself and isinstance(self.optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"{self} reads the gradients once, before the step, but LBFGS computes them several times in a step; "
                "use another optimizer."
            )
        with torch.enable_grad():  # the gradients are read now; the optimizer does not compute them again
            loss = closure()
        self.before()
        return (args[0], lambda: loss), {name: value for name, value in kwargs.items() if name != "closure"}

    def __repr__(self) -> str:
        """Return the method's name."""
        return f"pruning.dynamics.{type(self).__name__}"


def forget(optimizer: Optimizer, parameter: nn.Parameter, kept: Tensor) -> None:
    """Set what an optimizer remembers of entries (momentum, both moments of Adam) to 0, except for some.

    Args:
        optimizer: optimizer of the parameter; only tensors of the parameter's shape are changed. LBFGS forgets all.
        parameter: the parameter.
        kept: bool of the parameter's shape, True for entries that the optimizer remembers.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.state.clear()  # its directions couple all entries
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step_size":
            mask_(value, kept)


def _on(parameter: nn.Parameter, mask: Tensor) -> Tensor:
    """Return a mask as a new bool tensor on the parameter's device."""
    return (mask.detach() != 0).to(parameter.device, copy=True)
