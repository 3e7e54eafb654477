"""Kinds of the ATen operations of a traced graph, what they read, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


ENTRYWISE = _names(
    "hardswish dropout feature_dropout alpha_dropout to _to_copy clone contiguous alias detach detach_ type_as "
    "log_sigmoid prelu _prelu_kernel copy lift_fresh_copy lift_fresh selu celu silu mish softplus where masked_fill "
    "expand_as fill zero absolute negative fix divide true_divide multiply subtract rsub greater greater_equal less "
    "less_equal not_equal floor_divide real special_expit special_erf"
)
"""Entrywise operations that torch does not tag as pointwise, or of which it does not tag all forms."""

MOVES = _names(
    "view reshape _unsafe_view permute transpose t flatten unflatten squeeze unsqueeze expand slice select split "
    "split_with_sizes chunk unbind pixel_shuffle pixel_unshuffle channel_shuffle view_as reshape_as narrow "
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

FILLED = _names("zeros ones full empty new_zeros new_ones new_full new_empty")
"""Factories of tensors of equal entries, or of entries written later; the argument `size` gives their shape."""

CONVOLUTIONS = _names("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")
PRODUCTS = _names("matmul bmm mm")
GROUPED_PRODUCT = "_grouped_mm"
NORMALISATIONS = _names("layer_norm rms_norm group_norm native_layer_norm native_group_norm")
CHANNELWISE_NORMALISATIONS = _names("batch_norm instance_norm _native_batch_norm_legit_no_training")
RECURRENCES = _names("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
SOFTMAXES = _names("softmax _softmax log_softmax _log_softmax cumsum")
COMPARISONS = _names(
    "eq ne lt le gt ge equal not_equal less less_equal greater greater_equal logical_not logical_and logical_or "
    "logical_xor"
)
"""Operations that return truth values; in place, they keep the dtype of what they write to."""
NEW_RESULTS = CONVOLUTIONS | PRODUCTS | NORMALISATIONS | CHANNELWISE_NORMALISATIONS | SPATIAL | _names("linear")
"""Operations whose result is a tensor of its own, although their schema need not say so."""


def name_of(node: fx.Node) -> str:
    """Return the name of a node's ATen operation, without the final _ of an in-place one; "" for other nodes.

    An operation of another library with the arguments of a product in groups, whose last rows are `offs`, is one, too.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    if target.namespace != "aten":
        read = [each.name for each in target._schema.arguments]
        return GROUPED_PRODUCT if len(read) == 3 and read[2] == "offs" else ""
    name = str(target.overloadpacket.__name__)
    return name[:-1] if target._schema.is_mutable and name.endswith("_") else name


class Recurrence(NamedTuple):
    """One layer and direction of an RNN: its weights as nodes or as values; None for those that it lacks."""

    inputs: Any
    states: Any
    input_bias: Any
    state_bias: Any
    projection: Any

    @classmethod
    def all_of(cls, given: Mapping[str, Any]) -> list[Recurrence]:
        """Return all directions of all layers, in the order of the states, from an operation's arguments."""
        if "params" not in given:
            return [cls(given["w_ih"], given["w_hh"], given["b_ih"], given["b_hh"], None)]
        weights = list(given["params"])
        size = len(weights) // (given["num_layers"] * (1 + given["bidirectional"]))
        parts = [weights[first : first + size] for first in range(0, len(weights), size)]
        biases = 2 * bool(given["has_biases"])
        return [cls(*(*part[: 2 + biases], None, None)[:4], *(*part[2 + biases :], None)[:1]) for part in parts]


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


def read_for_values(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node whose values it reads, and not those that give only a shape, dtype or device.

    An operation's schema tells them apart: a factory takes `self` for its form (`zeros_like`, `new_full`), and so does
    a view with `other` (`expand_as`, `to.other`).
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.all_input_nodes
    schema, name = target._schema, name_of(node)
    if is_factory(node) or name in ("fill", "zero", "copy"):  # these write over `self`
        unread = "self"
    elif name.endswith("_as") or (not schema.is_mutable and any(each.alias_info for each in schema.returns)):
        unread = "other"
    else:
        return node.all_input_nodes
    given = [value for key, value in arguments(node).items() if key != unread]
    return [each for each in node.all_input_nodes if any(each is leaf for leaf in tree_leaves(given))]


def read_for_labels(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node whose values or shape the result has, and not those that give only a dtype."""
    return read_for_values(node) if name_of(node) in ("to", "type_as") else node.all_input_nodes


def is_factory(node: fx.Node) -> bool:
    """Return whether an operation makes a tensor and reads no values of other tensors."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema.arguments
    names = {each.name for each in schema}
    tensors = [each.name for each in schema if "Tensor" in str(each.type)]
    return "pin_memory" in names and "non_blocking" not in names and tensors in ([], ["self"])


def in_module(node: fx.Node) -> str:
    """Return the path of the innermost module whose forward made a node; "" for the network itself."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if isinstance(path, str) and not path.startswith("_empty")]
    return paths[-1] if paths else ""


def described(node: fx.Node) -> str:
    """Return a node's name in reports: module path and operation."""
    path, name = in_module(node), name_of(node) or str(node.target)
    return f"`{path}` ({name})" if path else f"`{name}`"


def is_in_place(node: fx.Node) -> bool:
    """Return whether an operation of the graph writes to its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def may_alias(target: Any) -> bool:
    """Return whether a result may share memory with an input; composite operations need not declare it."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target._name, "CompositeImplicitAutograd")
    declared = target.is_view or any(each.alias_info is not None for each in target._schema.returns)
    return declared or (composite and target.overloadpacket.__name__ not in NEW_RESULTS)
