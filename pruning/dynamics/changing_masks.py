"""Masks that change within a training: the base of all dynamics, with its hooks in the optimizer and its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pruning.dynamics.mask_history import MaskHistory, MaskUpdate
from pruning.holding.keeper import MaskKeeper
from pruning.holding.masking import mask_
from pruning.holding.parameter import place
from pruning.masks.mask_set import MaskSet

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

    enforces_itself: ClassVar[bool] = False
    """Whether the method reads all gradients in every step and enforces the masks itself; the history then compares at
    most about `RECORDS` masks."""

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

    def own_state(self) -> dict[str, Any]:
        """Return what the method remembers besides the masks: tensors and plain values."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore `own_state`."""

    # --- used in a training ---

    def attach(
        self,
        model: nn.Module,
        masks: Mapping[str, Tensor],
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
            optimizer: optimizer of these parameters; its state of dropped and of regrown entries is set to 0.
            length: number of steps that the training takes.
            generator: source of random draws; None: torch's default generator.
            hooks: act by the optimizer's hooks; False: the caller calls `before` and `after` around each step.
            state: continue from a `state`, with the network and the optimizer restored to the same step; its masks
                replace `masks`.

        Raises:
            ValueError: a parameter is missing, has another shape, or is tied to one with another mask; `length` is not
                positive; or masks are attached already.
        """
        if self.is_attached:
            raise ValueError(f"{self} is attached already; call release() first, or make another one.")
        if not masks:
            raise ValueError("`masks` (={}) must contain at least one mask; make them by pruning.plan, for example.")
        if length < 1:
            raise ValueError(f"`length` (={length}) must be at least 1, the number of steps of the training.")
        self.model, self.optimizer, self.length, self.generator = model, optimizer, length, generator
        self.step, self._aliases = 0, _aliases(model, masks)
        self._shapes = {name: mask.shape for name, mask in masks.items() if name not in self._aliases}
        self.kept = {name: _on(self.parameter(name), masks[name]) for name in self._shapes}
        every = max(1, length // RECORDS) if self.enforces_itself else 1
        self.history = MaskHistory.of(self.kept, every)
        if state is None:
            self._enforce()
            self.begin()
            self.history = MaskHistory.of(self.kept, every)
            self._enforce()
        else:
            self.load_state(state)
        self.is_attached = True
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
        with torch.no_grad():
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
        """Set pruned entries to 0, and stop changing and enforcing the masks."""
        self._require_attached()
        for name, kept in self.kept.items():
            mask_(self.parameter(name), kept)
        if self._keeper is not None:
            self._keeper.stop()
        self._keeper, self.is_attached = None, False
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def state(self) -> dict[str, Any]:
        """Return the state between two steps: tensors and plain values, from which `load_state` continues.

        The weights and the optimizer's state are not part of it.
        """
        return {
            "step": self.step,
            "kept": {name: kept.clone() for name, kept in self.kept.items()},
            "history": self.history.state(),
            "generator": None if self.generator is None else self.generator.get_state(),
            "own": self.own_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, after the network and the optimizer were restored to the same step.

        Raises:
            ValueError: the state has masks of other names or shapes.
        """
        for name in state["kept"]:
            self.add(name)
        shapes = {name: kept.shape for name, kept in self.kept.items()}
        if {name: kept.shape for name, kept in state["kept"].items()} != shapes:
            raise ValueError("`state` belongs to another network: its masks have other names or shapes.")
        self.step = state["step"]
        self.kept = {name: _on(self.parameter(name), kept) for name, kept in state["kept"].items()}
        self.history.load_state(state["history"])
        if self.generator is not None:
            self.generator.set_state(state["generator"])
        self.load_own_state(state["own"])
        self._enforce()

    @property
    def updates(self) -> tuple[MaskUpdate, ...]:
        """The changes of the masks so far."""
        return tuple(self.history.updates)

    def mask(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the pruned entries of tensors beside the network, such as averages of its weights, to 0 in place."""
        for name, tensor in tensors.items():
            kept = self.kept.get(self._aliases.get(name, name))
            if kept is not None:
                mask_(tensor, kept.to(tensor.device))

    # --- used by the methods ---

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter that now has this name."""
        module, leaf = place(self.model, name, self._shapes[name])
        return module.get_parameter(leaf)

    def add(self, name: str) -> None:
        """Mask another parameter, which keeps all entries for now, unless it has a mask already."""
        if name not in self.kept and name not in self._aliases:
            parameter = self.model.get_parameter(name)
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
        self.history.record(self.step, self.kept)

    def place_of(self, given: float) -> int:
        """Return the step of a place: up to 1 it is a fraction of the training, above 1 a step."""
        return round(given * self.length) if given <= 1 else int(given)

    def _enforce(self) -> None:
        """Enforce the masks of now, with the gradients that the next step needs."""
        if self._keeper is not None:
            self._keeper.stop()
        self._dense = self.wants_dense()
        masks = {} if self.enforces_itself else self.kept
        self._keeper = MaskKeeper(self.model, masks, "dense" if self._dense else "masked")
        self._keeper.follow()

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
        optimizer: optimizer of the parameter; only tensors of the parameter's shape are changed.
        parameter: the parameter.
        kept: bool of the parameter's shape, True for entries that the optimizer remembers.
    """
    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            mask_(value, kept)


def _on(parameter: nn.Parameter, mask: Tensor) -> Tensor:
    """Return a mask as a new bool tensor on the parameter's device."""
    return (mask.detach() != 0).to(parameter.device, copy=True)


def _aliases(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, str]:
    """Return further name of a tied parameter -> its first name; check that masks fit.

    Raises:
        ValueError: a parameter is missing, has another shape, or is tied to one with another mask.
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, mask in masks.items():
        module, leaf = place(model, name, mask.shape)
        other = first.setdefault(id(module.get_parameter(leaf)), name)
        if other != name:
            if not torch.equal(mask != 0, masks[other] != 0):
                raise ValueError(f"`masks` of {other} and {name} must be equal, because the two share one parameter.")
            found[name] = other
    return found
