"""SynFlow: what flows through a network of magnitudes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from pruning.scores.data import Batches, Loss, Size, tensors
from pruning.scores.network import Masks, Network, network

NOT_HOMOGENEOUS = frozenset(
    {
        *("erf", "exp", "expm1", "log", "sin", "softsign", "tanh", "tanhshrink"),
        *("gelu", "silu", "mish", "softplus", "sigmoid", "logsigmoid", "softmax", "log_softmax"),
        *("hardsigmoid", "hardswish", "hardtanh", "relu6"),
        *("group_norm", "instance_norm", "layer_norm", "local_response_norm", "normalize", "rms_norm"),
        *("scaled_dot_product_attention", "multi_head_attention_forward"),
    }
)
"""Functions that do not scale with their input where that is positive."""


def synflow(
    model: nn.Module,
    batches: Batches = None,
    loss: Loss = None,
    *,
    size: Size = None,
    generator: torch.Generator | None = None,
    masks: Masks | None = None,
    parameters: Iterable[str] | None = None,
    bias: bool = False,
) -> dict[str, Tensor]:
    """Score each entry by its part in what flows through a network of magnitudes (Tanaka 2020, arXiv 2006.05467).

        score_i = |v_i| dR/d|v_i|,      R = sum of the outputs for one input of ones, every weight being |v|

    In float64. BatchNorm scales by |gamma| / sqrt(running variance + eps) and shifts nothing. No data is read: the
    first batch says the shape of an input only.

    Args and errors: see `pruning.scores`; `loss`, `size` and `generator` are unused. `batches` may be None where the
    first layer is linear.

    Args:
        bias: whether biases flow in, as |b| (the authors' code does so); else they are 0, as in the paper.

    Raises:
        ValueError: the network has activations or normalisations that do not scale with their input (GELU, sigmoid,
            LayerNorm), for which the laws of SynFlow do not hold; no input shape is known, or inputs are not real.
    """

    def magnitude(module: nn.Module, leaf: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        is_bias = leaf.endswith("bias") and (isinstance(module, _BatchNorm) or not bias)
        return torch.zeros_like(value, dtype=torch.float64) if is_bias else value.to(torch.float64, copy=True).abs_()

    with network(model, masks, parameters, value=magnitude) as net:
        net.model.double()
        _scale_only(net.model)
        device = next(iter(net.parameters.values())).device
        ones = torch.ones(1, *_input_shape(model, batches), dtype=torch.float64, device=device)
        with _Homogeneous(type(model).__name__):
            outputs = net.model(ones)
        return _scores(net, outputs)


def _scores(net: Network, outputs: Any) -> dict[str, Tensor]:
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"`model` (which returned {type(outputs).__name__}) must return a tensor for `synflow`; "
            "wrap it in a module that does."
        )
    flows = torch.autograd.grad(outputs.sum(), list(net.parameters.values()), allow_unused=True, materialize_grads=True)
    return {name: flow.mul_(p.detach()) for (name, p), flow in zip(net.parameters.items(), flows, strict=True)}


def _input_shape(model: nn.Module, batches: Batches) -> tuple[int, ...]:
    """Return the shape of one input without the batch."""
    first = None if batches is None else next(iter(batches), None)
    example = None if first is None else next(tensors(first), None)
    if example is not None:
        if not example.is_floating_point():
            raise ValueError(
                f"`batches` (of {example.dtype}) must begin with real-valued inputs for `synflow`, whose input is all "
                "ones; choose another score for a network of tokens."
            )
        return tuple(example.shape[1:])
    leaves = (module for module in model.modules() if not list(module.children()) and list(module.parameters()))
    layer = next(leaves, None)
    if isinstance(layer, nn.Linear):
        return (layer.in_features,)
    raise ValueError(
        "`batches` (=None) must hold a batch for `synflow` to see the shape of an input; pass one, of any values."
    )


def _scale_only(model: nn.Module) -> None:
    """Let BatchNorm scale by |gamma| / sqrt(var + eps), without a shift."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            if module.running_var is None:
                module.running_var = torch.full((module.num_features,), 1 - module.eps, dtype=torch.float64)
            module.running_mean = torch.zeros_like(module.running_var)


class _Homogeneous(TorchFunctionMode):
    """Refuses functions that do not scale with their input, called by layers or by a forward itself."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").rstrip("_")
        if name in NOT_HOMOGENEOUS:
            raise ValueError(
                f"`model` ({self.model}, which applies {name}) must be made of functions that scale with their input, "
                "such as ReLU and BatchNorm, for the laws of `synflow`; choose another score."
            )
        return func(*args, **(kwargs or {}))
