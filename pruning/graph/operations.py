"""ATen operations, classified by their effect on the positions of a tensor, and their arguments by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


ENTRYWISE = _names(
    "hardswish dropout feature_dropout alpha_dropout to _to_copy clone contiguous alias detach detach_ type_as "
    "log_sigmoid prelu _prelu_kernel copy lift_fresh_copy lift_fresh selu celu silu mish softplus"
)
"""Entrywise operations that torch does not tag as pointwise."""

MOVES = _names(
    "view reshape _unsafe_view permute transpose t flatten unflatten squeeze unsqueeze expand slice select split "
    "split_with_sizes chunk unbind pixel_shuffle pixel_unshuffle channel_shuffle expand_as view_as narrow "
    "swapaxes movedim numpy_T mT repeat_interleave repeat unfold im2col index index_select flip roll "
    "native_channel_shuffle"
)
"""Operations that move, repeat or drop entries."""

SPATIAL = _names(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d max_pool2d_with_indices max_pool3d_with_indices "
    "_adaptive_avg_pool2d upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d "
    "upsample_linear1d _upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad1d reflection_pad2d "
    "replication_pad1d replication_pad2d _upsample_nearest_exact2d max_pool1d_with_indices"
)
"""Operations on each channel separately; input (batch, channels, positions ...)."""

REDUCTIONS = _names("mean sum amax amin std var prod logsumexp norm linalg_vector_norm all any")
"""Reductions over dimensions."""

CONVOLUTIONS = _names("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")
PRODUCTS = _names("matmul bmm mm")
NORMALISATIONS = _names("layer_norm rms_norm group_norm native_layer_norm native_group_norm")
CHANNELWISE_NORMALISATIONS = _names("batch_norm instance_norm _native_batch_norm_legit_no_training")
SOFTMAXES = _names("softmax _softmax log_softmax _log_softmax cumsum")


def name_of(node: fx.Node) -> str:
    """Return the name of a node's ATen operation, without the final _ of an in-place one; "" for other nodes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    name = str(target.overloadpacket.__name__)
    return name[:-1] if target._schema.is_mutable and name.endswith("_") else name


def is_entrywise(node: fx.Node) -> bool:
    """Return whether an operation works on each entry separately."""
    target = node.target
    return name_of(node) in ENTRYWISE or (
        isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    )


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an ATen operation by their names in its schema, including defaults."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    given: dict[str, Any] = {}
    for index, each in enumerate(target._schema.arguments):
        if index < len(node.args) and not each.kwarg_only:
            given[each.name] = node.args[index]
        else:
            given[each.name] = node.kwargs.get(each.name, each.default_value if each.has_default_value() else None)
    return given


def in_module(node: fx.Node) -> str:
    """Return the path of the innermost module whose forward made a node; "" for the network itself."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if isinstance(path, str) and not path.startswith("_empty")]
    return paths[-1] if paths else ""


def described(node: fx.Node) -> str:
    """Return a node's name in reports: module path and operation."""
    path, name = in_module(node), name_of(node) or str(node.target)
    return f"`{path}` ({name})" if path else f"`{name}`"
