"""Calls with the training flag set, and weights that no call of the example runs.

A forward may run further modules in training, such as auxiliary heads, or leave some out.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pruning.graph.label_flow import Flow
from pruning.graph.tracing import output_difference, outputs_of, quiet
from pruning.holding.copies import to_run, values_with_history
from pruning.holding.parameter import hooked, joined
from pruning.measure.macs import Inputs
from pruning.measure.matrix_weights import considered, shortened

SAME = 1e-5
"""Largest difference between a value of a trace and of a plain call that count as one, relative to the largest."""


class _NoDropout(TorchFunctionMode):
    """Leaves dropout out, whose draws depend on the number of channels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if str(getattr(func, "__name__", "")).endswith("dropout"):
            return args[0] if args else given["input"]
        return func(*args, **given | ({"dropout_p": 0.0} if "dropout_p" in given else {}))


def outputs_in_training(model: nn.Module, given: Inputs, seed: int = 0) -> list[Tensor]:
    """Return the outputs with the training flag set, without dropout, statistics of the batch and gradients.

    Args:
        model: a network in evaluation mode; a copy runs, whose buffers and parameters a forward may change.
        given: inputs of the network.
        seed: seed of the draws that a forward makes.
    """
    model = copy.deepcopy(model, values_with_history(model))
    for module in model.modules():
        of_torch = type(module).__module__.startswith("torch.nn.modules.")
        module.training = not of_torch and not isinstance(module, _NormBase | _DropoutNd)
    with torch.random.fork_rng(devices=[]), _NoDropout():
        torch.default_generator.manual_seed(seed)
        return outputs_of(model, given)


def pin_read_in_training(flow: Flow, paths: Collection[str]) -> set[str]:
    """Pin what modules read that run only with the training flag set, and return the names of these modules.

    Args:
        flow: labels of a trace.
        paths: names of the parts of the network that keep their classes.
    """
    read: dict[str, list[Tensor]] = {}
    for part in flow.traced.parts:
        if part.path in paths:
            module = flow.traced.model.get_submodule(part.path)
            own = _read_in_training(module, (part.args, part.kwargs))
            read |= {joined(part.path, name): tensors for name, tensors in own.items()}
    if read:
        with torch.no_grad(), quiet():
            _Pinning(flow, read).run(*flow.traced.inputs, enable_io_processing=False)
    return {*read}


def _read_in_training(model: nn.Module, given: Inputs) -> dict[str, list[Tensor]]:
    """Return name -> inputs of each module that runs only with the training flag set; {} if that call fails."""
    plain: set[str] = set()
    found: dict[str, list[Tensor]] = defaultdict(list)

    def note(path: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if path not in plain:  # in the plain call, names alone are noted
            found[path] += [leaf.clone() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and plain]

    named = [(module, partial(note, path)) for path, module in model.named_modules()]
    hooks = (module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in named)
    with hooked(hooks), suppress(Exception):  # a forward may raise anything
        outputs_of(to_run(model), given)
        plain.update(found)
        found.clear()
        outputs_in_training(model, given)
        return found
    return {}


class _Pinning(fx.Interpreter):
    """Run a traced network, and pin the labels of values that equal what modules read."""

    def __init__(self, flow: Flow, read: Mapping[str, list[Tensor]]) -> None:
        super().__init__(flow.traced.graph)
        self._flow = flow
        self._read = [(path, tensor) for path, tensors in read.items() for tensor in tensors]

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        for path, tensor in self._read if isinstance(value, Tensor) and self._flow.of(n) else ():
            if output_difference([value], [tensor]) <= SAME:
                self._flow.pin(self._flow.of(n), f"`{path}` reads it in training")
        return value


def not_run(flow: Flow, paths: Collection[str], in_training: Collection[str]) -> str:
    """Return a sentence that names modules with matrices that no call of the example runs; empty if there are none.

    Args:
        flow: labels of a trace.
        paths: names of the parts of the network that keep their classes.
        in_training: names of the modules that run with the training flag set.
    """
    read = {str(node.target) for node in flow.traced.graph.graph.find_nodes(op="get_attr")}
    unread = {name.rpartition(".")[0] or name for name in considered(flow.traced.model, read).dense}
    found = sorted(
        name for name in unread - {*in_training} if any(f"{name}.".startswith(path and f"{path}.") for path in paths)
    )
    if not found:
        return ""
    return (
        f"the example's call does not run {shortened(found)}: calls that run them may fail, or compute "
        "something else, in the smaller network; pass an example whose call runs them."
    )
