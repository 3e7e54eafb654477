"""Scores without data: magnitude, LAMP, BatchNorm scales, distances of filters, random scores, and synaptic flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from pruning.holding.parameter import place
from pruning.scores.gradients import batch_norm_scales
from pruning.scores.readings.network import Masks, Network, Weight, network, weights_of
from pruning.scores.readings.scoring_data import Batches, ScoringInput, gradients, refuse_inference_mode, tensors
from pruning.selection.channel_masks import check_dim


def magnitude(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each entry by its magnitude (Han et al. 2015, arXiv 1506.02626).

    score_i = |v_i|         0 for pruned entries
    """
    return {name: weight.value.abs() for name, weight in given.weights().items()}


def random(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each entry by a number drawn uniformly from [0, 1), in the order of the model's parameters.

    `generator` must be on the CPU. None draws the next numbers of torch's default generator without advancing it, so
    that the next call draws the same numbers.
    """
    generator = given.generator
    if generator is None:
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
    return {
        name: torch.rand(weight.parameter.shape, generator=generator, dtype=torch.float64).to(weight.parameter.device)
        for name, weight in given.weights().items()
    }


def lamp(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each entry by its share of the squares of its tensor that are not smaller (Lee 2021, arXiv 2010.07611).

        score_i = v_i^2 / (sum of v_j^2 over all j of the same or a higher rank)        0 for 0 / 0

    Ranking these scores globally prunes each tensor by magnitude and also decides each tensor's density. The largest
    entry of a tensor scores 1. Entries of equal magnitude rank by index.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    return {name: _lamp(name, weight.value) for name, weight in given.weights().items()}


def _lamp(name: str, value: Tensor) -> Tensor:
    magnitudes = value.abs().to(torch.float64).flatten()
    if magnitudes.numel() and not magnitudes.max().isfinite():
        raise ValueError(f"`{name}` holds NaN or infinity and must be finite for `lamp`; repair the tensor.")
    ordered, order = magnitudes.sort(stable=True)
    squares = ordered.square_()
    above = squares.flip(0).cumsum(0).flip(0)
    shares = torch.where(above > 0, squares / above, 0.0)
    return torch.empty_like(shares).scatter_(0, order, shares).view(value.shape)


def bn_scale(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each channel by the scale of the BatchNorm after it: network slimming (Liu 2017, arXiv 1708.06519).

        score_c = |gamma_c|

    The scales separate channels only after training with a penalty on them. The names in the result are those of the
    scales, such as "bn1.weight".

    Raises:
        ValueError: the network has no BatchNorm with a scale.
    """
    names = batch_norm_scales(given.model, given.parameters, "bn_scale")
    return {name: weight.value.abs() for name, weight in weights_of(given.model, given.masks, names).items()}


def fpgm(
    given: ScoringInput,
    *,
    dim: int = 0,
) -> dict[str, Tensor]:
    """Score each filter by its distances from the others: FPGM (He et al. 2019, arXiv 1811.00250).

        score_i = sum over j of ||W_i - W_j||_2,        i and j the filters of a tensor with any nonzero entry

    The filter nearest to the geometric median of all filters is pruned first. Pruned filters score 0. Scores compare
    only within a tensor. Each tensor of scores has shape (filters,).

    Args:
        dim: the dimension that counts the filters.
    """
    return {name: _distances(weight, dim) for name, weight in given.weights().items()}


def _distances(weight: Weight, dim: int) -> Tensor:
    dim = check_dim(weight.value, dim)
    filters = weight.value.movedim(weight.layout.dim(dim) if weight.layout else dim, 0).flatten(1)
    filters = (torch.view_as_real(filters).flatten(1) if filters.is_complex() else filters).to(torch.float64)
    alive = (filters != 0).any(1)
    scores = filters.new_zeros(len(filters))
    survivors = filters[alive]
    # The matrix product form of distances loses precision by cancellation for filters near each other.
    scores[alive] = torch.cdist(survivors, survivors, compute_mode="donot_use_mm_for_euclid_dist").sum(1)
    return scores


NOT_HOMOGENEOUS = frozenset(
    {
        *("erf", "exp", "expm1", "log", "sin", "softsign", "tanh", "tanhshrink"),
        *("gelu", "silu", "mish", "softplus", "sigmoid", "logsigmoid", "softmax", "log_softmax"),
        *("hardsigmoid", "hardswish", "hardtanh", "relu6"),
        *("group_norm", "instance_norm", "layer_norm", "local_response_norm", "normalize", "rms_norm"),
        *("scaled_dot_product_attention", "multi_head_attention_forward"),
    }
)
"""Functions that do not scale with a positive input: f(a x) != a f(x)."""


def synflow(
    given: ScoringInput,
    *,
    bias: bool = False,
) -> dict[str, Tensor]:
    """Score each entry by its share of the flow through a network of magnitudes (Tanaka 2020, arXiv 2006.05467).

        score_i = |v_i| dR/d|v_i|,      R = sum of the outputs for one input of ones, every weight being |v|

    All computation is in float64. BatchNorm scales by |gamma| / sqrt(running variance + eps), without a shift. The
    values of the data are not used: the first batch only gives the shape of an input, and `batches` may be None if the
    first layer is linear.

    Args:
        bias: True adds biases as |b|, as the authors' code does; False sets them to 0, as the paper does.

    Raises:
        ValueError: the network has activations or normalisations that do not scale with their input (GELU, sigmoid,
            LayerNorm), for which the laws of SynFlow do not hold; the input shape is unknown; or inputs are not real.
    """
    return Flow(given, bias=bias).scores()


class Flow:
    """SynFlow scores of one network, computed again and again under shrinking masks from one copy of the network.

    See `synflow` for args and errors. The weights are copied: later changes of the model do not affect the scores.
    """

    def __init__(
        self,
        given: ScoringInput,
        *,
        bias: bool = False,
    ) -> None:
        def magnitude(module: nn.Module, leaf: str, value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value
            is_bias = leaf.endswith("bias") and (isinstance(module, _BatchNorm) or not bias)
            return (
                torch.zeros_like(value, dtype=torch.float64) if is_bias else value.to(torch.float64, copy=True).abs_()
            )

        model = given.model
        with network(model, given.masks, given.parameters, value=magnitude) as net:
            self.net = net
            net.model.double()
            _scale_only(net.model)
            device = next(iter(net.parameters.values())).device
            self.ones = torch.ones(1, *_input_shape(model, given.batches), dtype=torch.float64, device=device)
            with _Homogeneous(type(model).__name__), torch.no_grad():
                _refuse_other_laws(net, self.ones, type(model).__name__)
        self.factors: dict[str, Tensor] = {}

    def scores(self, masks: Masks | None = None) -> dict[str, Tensor]:
        """Return name -> scores, float64. Entries that `masks` prune become 0, and stay 0 in later calls."""
        for name, mask in (masks or {}).items():
            module, leaf = place(self.net.model, name, mask.shape)
            parameter = module.get_parameter(leaf)
            if name not in self.factors:
                self.factors[name] = torch.empty_like(parameter, requires_grad=False)
            keeps = mask if mask.dtype == torch.bool else mask != 0
            # torch converts bytes several times as fast as bools.
            parameter.detach().mul_(self.factors[name].copy_(keeps.view(torch.uint8)))
        with torch.enable_grad():
            flow = _outputs(self.net, self.ones).sum()
        parameters = self.net.parameters
        slopes = gradients(flow, list(parameters.values()))
        return {name: g.mul_(p.detach()) for (name, p), g in zip(parameters.items(), slopes, strict=True)}


def _outputs(net: Network, ones: Tensor) -> Tensor:
    outputs = net.model(ones)
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"`model` (which returned {type(outputs).__name__}) must return a tensor for `synflow`; "
            "wrap it in a module that does."
        )
    return outputs


def _refuse_other_laws(net: Network, ones: Tensor, model: str) -> None:
    """Refuse a network whose outputs do not scale with its input when biases are 0; powers of 2 are exact."""
    biases = [p for name, p in net.model.named_parameters() if name.endswith("bias")]
    kept = [bias.clone() for bias in biases]
    for bias in biases:
        bias.zero_()
    at_one = _outputs(net, ones)
    for scale in (2.0, 2.0**20, 2.0**-20):
        scaled = _outputs(net, ones * scale)
        if scaled.isfinite().all() and not torch.allclose(scaled, at_one * scale, rtol=1e-9, atol=0):
            raise ValueError(
                f"`model` ({model}, whose outputs for {scale:g} times an input are not {scale:g} times as large) "
                "must be made of functions that scale with their input, such as ReLU and BatchNorm, for the laws of "
                "`synflow`; choose another score."
            )
    for bias, values in zip(biases, kept, strict=True):
        bias.copy_(values)


def _input_shape(model: nn.Module, batches: Batches) -> tuple[int, ...]:
    """Return the shape of one input without the batch."""
    refuse_inference_mode("synflow")
    first = None if batches is None else next(iter(batches), None)
    example = None if first is None else next(tensors(first), None)
    if example is not None:
        if not example.is_floating_point():
            raise ValueError(
                f"`batches` (of {example.dtype}) must begin with real-valued inputs for `synflow`, which feeds an "
                "input of ones; choose another score for a network that takes tokens."
            )
        return tuple(example.shape[1:])
    leaves = (module for module in model.modules() if not list(module.children()) and list(module.parameters()))
    layer = next(leaves, None)
    if isinstance(layer, nn.Linear):
        return (layer.in_features,)
    raise ValueError(
        "`batches` (=None) must hold a batch, from which `synflow` takes the input shape; pass one batch of any values."
    )


def _scale_only(model: nn.Module) -> None:
    """Make BatchNorm layers scale by |gamma| / sqrt(var + eps), or by |gamma| without statistics, and add no shift."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            if module.running_var is None:
                module.running_var = torch.full((module.num_features,), 1 - module.eps, dtype=torch.float64)
            module.running_mean = torch.zeros_like(module.running_var)


class _Homogeneous(TorchFunctionMode):
    """Refuses functions that do not scale with their input, in layers and in `forward` methods."""

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
