"""Label rules of all operations but products, and the labelling of a traced network with all of them.

Layers and normalisations compute each output from several inputs. Other operations move entries, join tensors, or work
on each entry or channel alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from pruning.graph.constant_tensors import Constants, constant_along, flat
from pruning.graph.label_flow import (
    FIXED,
    NAN,
    ONLY_ONE,
    Fields,
    Flow,
    Rule,
    Site,
    along,
    covered,
    covering,
    pin_inputs,
    raised,
)
from pruning.graph.operations import (
    CHANNELWISE_NORMALISATIONS,
    CONVOLUTIONS,
    FILLED,
    GROUPED_PRODUCT,
    MOVES,
    PRODUCTS,
    RECURRENCES,
    REDUCTIONS,
    SOFTMAXES,
    SPATIAL,
    Recurrence,
    arguments,
    described,
    name_of,
    read_for_labels,
    read_for_values,
)
from pruning.graph.product_rules import attention, grouped_product, product
from pruning.graph.tracing import Traced


def _foldable(flow: Flow, constant: Tensor, weight: Any, bias: Any) -> Tensor:
    """Return the constants that may be added to a bias, NaN for the others.

    0 is always allowed. Other constants are allowed if the graph reads the weight, and the bias if there is one, only
    once, and both are parameters.
    """
    once = flow.reads(weight) == 1 and (bias is None or flow.reads(bias) == 1)
    return constant if once else torch.where(constant == 0, constant, NAN)


def _linear(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    return _dense(flow, node, given["input"], given["weight"], given["bias"], 1)


def _addmm(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    """Linear layer whose weight has shape (inputs, outputs), like `Conv1D` of transformers."""
    bias, source, weight = given["self"], given["mat1"], given["mat2"]
    plain = given["alpha"] == 1 and given["beta"] == 1 and flow.value(bias).ndim == 1
    if not plain or weight.op != "get_attr":
        return pin_inputs(flow, node, given)
    return _dense(flow, node, source, weight, bias, 0)


def _dense(flow: Flow, node: fx.Node, source: fx.Node, weight: fx.Node, bias: Any, inputs_dim: int) -> Fields:
    values = flow.value(weight) if inputs_dim else flow.value(weight).T
    why = f"{described(node)} reads it"
    last = flow.value(source).ndim - 1
    own = flow.labels_along(flow.of(weight), inputs_dim, values.shape[1], why)
    read = flow.tied(flow.one_dim(flow.of(source), last, why), own, why)
    written = flow.labels_along(flow.of(weight), 1 - inputs_dim, len(values), why)
    if isinstance(bias, fx.Node):
        written = flow.tied(
            written, flow.labels_along(flow.of(bias), 0, len(values), why), f"the bias of {described(node)} stays"
        )
    live = values.isnan() | (values != 0)
    constant = _foldable(flow, constant_along(flow.value(source), last), weight, bias)
    flow.sites.append(Site(node, read, written, live, constant, why, None, weight, bias))
    left = [field for field in flow.of(source) if last not in covered(field)]
    return flow.labels.packed([*left, along(written, last, last + 1)], why)


def _convolution(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    source, weight, bias = given["input"], given["weight"], given["bias"]
    transposed = "transpose" in str(node.target) or bool(given.get("transposed"))
    groups, values = int(given["groups"]), flow.value(weight)
    why = f"{described(node)} reads it"
    if flow.value(source).ndim != values.ndim or (groups > 1 and weight.op != "get_attr"):
        fields = [*flow.of(source), *flow.of(weight), *flow.of(bias)]
        flow.pin(fields, f"{described(node)} has no batch, or weights that are computed")
        return []
    flow.pin([field for field in flow.of(weight) if max(covered(field)) > 1], why)
    rows, columns = _weight_labels(flow, weight, values.shape, groups, why)
    inputs, outputs = (rows, columns) if transposed else (columns, rows)
    read = flow.tied(flow.one_dim(flow.of(source), 1, why), inputs.flatten(), why).reshape(groups, -1)
    if isinstance(bias, fx.Node):
        own = flow.labels_along(flow.of(bias), 0, outputs.numel(), why)
        outputs = flow.tied(outputs.flatten(), own, f"the bias of {described(node)} stays").reshape(groups, -1)
    if groups > 1:
        if read.shape[1] == 1:
            flow.labels.tie(read, outputs, why)
        else:
            flow.shapes.grids.extend([read, outputs])
            flow.shapes.same.append((read, outputs))
    flow.sites.append(_convolution_site(flow, node, given, read, outputs, transposed))
    whole = flow.labels.packed(flow.of(source), why)
    flow.pin([field for field in whole if max(covered(field)) > 1], why)
    return flow.labels.packed([along(outputs.flatten(), 1, values.ndim)], why)


def _weight_labels(flow: Flow, weight: Any, shape: torch.Size, groups: int, why: str) -> tuple[Tensor, Tensor]:
    """Return the labels of a weight's first and second dimension, each of shape (groups, size per group)."""
    first, second = shape[:2]
    fields = flow.of(weight)
    if groups == 1:
        known = [flow.labels_along(fields, dim, shape[dim], why)[None] for dim in (0, 1)]
        return known[0], known[1]
    rows = next((field for field in fields if covered(field) == {0}), None)
    both = next((field for field in fields if covered(field) == {0, 1}), None)
    labels = torch.full((first,), FIXED) if rows is None else rows.flatten()
    if second == 1:
        return labels.reshape(groups, -1), labels.reshape(groups, -1)[:, :1]
    columns = torch.full((groups, second), FIXED)
    if both is not None:
        columns = both.reshape(groups, first // groups, second)[:, 0]
    return labels.reshape(groups, -1), columns


def _convolution_site(
    flow: Flow, node: fx.Node, given: dict[str, Any], read: Tensor, written: Tensor, transposed: bool
) -> Site:
    groups, weight = len(read), flow.value(given["weight"])
    live = (weight.isnan() | (weight != 0)).flatten(2).any(2)
    reads = torch.zeros(written.numel(), read.numel(), dtype=torch.bool)
    rows = len(weight) // groups
    for group in range(groups):
        block = live[group * rows : (group + 1) * rows]
        block = block.T if transposed else block
        outputs, inputs = written.shape[1], read.shape[1]
        reads[group * outputs : (group + 1) * outputs, group * inputs : (group + 1) * inputs] = block
    source = flow.value(given["input"])
    constant = _foldable(flow, constant_along(source, 1), given["weight"], given["bias"])
    bordered = constant.isfinite() & (constant != 0) & (transposed or _pads(given.get("padding", 0)))
    bordered |= constant.isnan() & ~source.isnan().transpose(0, 1).flatten(1).any(1)
    constant = torch.where(bordered, NAN, constant)
    why = f"{described(node)} reads it"
    return Site(node, read.flatten(), written.flatten(), reads, constant, why, bordered, given["weight"], given["bias"])


def _pads(padding: Any) -> bool:
    if isinstance(padding, str):
        return padding != "valid"
    return any(padding) if isinstance(padding, list | tuple) else bool(padding)


def _normalised(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Any:
    """LayerNorm and RMSNorm: each output reads all inputs of its token."""
    source = given["input"]
    shape, size = flow.value(source).shape, len(given["normalized_shape"])
    why = f"{described(node)} counts it in its statistics"
    fields = flow.of(source)
    last = len(shape) - 1
    params = [given[name] for name in ("weight", "bias") if isinstance(given.get(name), fx.Node)]
    inside = [field for field in fields if covered(field) & set(range(len(shape) - size, len(shape)))]
    if size > 1 or len(inside) > 1:
        flow.pin([*inside, *(field for each in params for field in flow.of(each))], why)
        left = [field for field in fields if not any(field is each for each in inside)]
    else:
        for each in params:
            fields = flow.tie(fields, flow.of(each), shape, flow.value(each).shape, why)
        left = fields
        if covering(fields, last) is not None:
            labels = flow.one_dim(fields, last, why)
            assert labels is not None
            flow.sites.append(Site(node, labels, labels, None, torch.full((len(labels),), NAN).double(), why))
            left = flow.labels.packed(left, why)
    return left if isinstance(flow.constants.values[node], Tensor) else [left, [], []]


def _with_parameter(flow: Flow, fields: Fields, parameter: fx.Node, shape: torch.Size, why: str) -> Fields:
    """Tie the fields of a tensor (batch, channels, positions ...) to those of a parameter per channel; return them."""
    own = [along(field.flatten(), 1, len(shape)) for field in flow.of(parameter)]
    return flow.tie(fields, own, shape, [shape[1] if dim == 1 else 1 for dim in range(len(shape))], why)


def _group_norm(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Any:
    source, groups = given["input"], int(given.get("num_groups") or given["group"])
    shape = flow.value(source).shape
    why = f"{described(node)} counts it in its statistics"
    fields = flow.of(source)
    for each in (given["weight"], given["bias"]):
        if isinstance(each, fx.Node):
            fields = _with_parameter(flow, fields, each, shape, why)
    labels = flow.one_dim(fields, 1, why)
    if labels is not None:
        size = math.ceil(len(labels) / groups)
        if size > 1:
            blocks = torch.eye(groups, dtype=torch.bool).repeat_interleave(size, 0).repeat_interleave(size, 1)
            constant = torch.full((len(labels),), NAN).double()
            flow.sites.append(Site(node, labels, labels, blocks, constant, why))
        flow.shapes.grids.append(labels.reshape(groups, -1))
    fields = flow.labels.packed(fields, why)
    return fields if isinstance(flow.constants.values[node], Tensor) else [fields, [], []]


def _embedding(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    weight = given["weight"]
    flow.pin([field for field in flow.of(weight) if 0 in covered(field)], f"{described(node)} finds it by its number")
    ndim = flow.value(node).ndim
    return [along(field.flatten(), ndim - 1, ndim) for field in flow.of(weight) if covered(field) == {1}]


def _entrywise(flow: Flow, node: fx.Node, _given: dict[str, Any]) -> Fields:
    tensors = [each for each in read_for_labels(node) if isinstance(flow.constants.values[each], Tensor)]
    fields, shape = flow.of(tensors[0]), tuple(flow.value(tensors[0]).shape)
    for each in tensors[1:]:
        other = tuple(flow.value(each).shape)
        why = f"{described(node)} puts it together with what stays"
        fields = flow.tie(fields, flow.of(each), shape, other, why)
        shape = tuple(torch.broadcast_shapes(shape, other))  # type: ignore[no-untyped-call]
    return fields


def _moved(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Any:
    """Run the operation on the labels, so that each label moves where its entry moves."""
    source = next(each for each in node.all_input_nodes if flow.of(each))
    changing = any(each in flow.constants.varying for each in read_for_values(node))
    if node.args[0] is not source or (changing and name_of(node) not in ("index", "index_select")):
        return pin_inputs(flow, node, given)
    by_index = _by_index(flow, node, given)
    fields = [each for each in flow.of(source) if not (changing and covered(each) & by_index)]
    flow.pin([each for each in flow.of(source) if covered(each) & by_index], f"{described(node)} reads it by its place")
    if not fields:
        return []
    shape = flow.value(source).shape
    rest, options = tree_map(
        lambda each: flow.constants.values[each] if isinstance(each, fx.Node) else each, (node.args[1:], node.kwargs)
    )
    target = torch.ops.aten.reshape.default if name_of(node) in ("view", "_unsafe_view") else node.target
    results = [target(field.expand(shape).double(), *rest, **options) for field in fields]  # type: ignore[operator]
    why = f"{described(node)} does not keep it apart"
    if name_of(node) in ("slice", "narrow") and _is_table(source):
        for field, left in zip(fields, results, strict=True):
            flow.labels.pin(field[~torch.isin(field, left.long())], f"{described(node)} reads it for longer inputs")
    if isinstance(results[0], Tensor):
        fields = _with_grids(flow, flow.labels.packed([each.long() for each in results], why))
        if "other" in given:  # gives the shape
            size = flow.value(node).shape
            fields = flow.tie(fields, flow.of(given["other"]), size, size, f"{described(node)} gives it its size")
        return fields
    return [
        _with_grids(flow, flow.labels.packed([each.long() for each in piece], why))
        for piece in zip(*results, strict=True)
    ]


def _is_table(node: fx.Node) -> bool:
    """Return whether slices of a parameter or buffer begin at one place, as of positions up to a length."""
    while name_of(node) in ("slice", "narrow") and _begin_alike(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "get_attr" and _begin_alike(node)


def _begin_alike(node: fx.Node) -> bool:
    """Return whether all that read a node are slices with one beginning."""
    given = [arguments(user) if name_of(user) in ("slice", "narrow") else {} for user in node.users]
    return all(given) and len({(each["dim"], each["start"] or 0) for each in given}) == 1


def _by_index(flow: Flow, node: fx.Node, given: dict[str, Any]) -> set[int]:
    """Return the dimensions that an operation indexes by fixed numbers, which `rewriting` does not change."""
    name, ndim = name_of(node), flow.value(node.args[0]).ndim  # type: ignore[arg-type]
    if name == "index":
        return _indexed(flow, given["indices"])
    if name == "slice" and given["step"] != 1:
        return set() if _in_whole_steps(flow, node, given) else {int(given["dim"]) % ndim}
    if name == "roll":
        return {dim % ndim for dim in given["dims"]} or set(range(ndim))
    if name in ("index_select", "unfold", "gather"):
        return {int(given["dim"] if "dim" in given else given["dimension"]) % ndim}
    return set(range(ndim)) if name in ("im2col", "channel_shuffle", "native_channel_shuffle") else set()


def _indexed(flow: Flow, indices: Sequence[fx.Node | None]) -> set[int]:
    """Return the dimensions that indices stand for: a mask for as many as it has."""
    found, first = set[int](), 0
    for each in indices:
        place = None if each is None else flow.value(each)
        last = first + (place.ndim if place is not None and place.dtype is torch.bool else 1)
        found |= set() if place is None else {*range(first, last)}
        first = last
    return found


def _in_whole_steps(flow: Flow, node: fx.Node, given: dict[str, Any]) -> bool:
    """Tie the channels of each step of a slice of every nth channel, which then holds for a smaller tensor too."""
    dim, step = int(given["dim"]), int(given["step"])
    size = flow.value(given["self"]).shape[dim]
    labels = flow.one_dim(flow.of(given["self"]), dim, f"{described(node)} reads it by its place")
    whole = size % step == 0 and 0 <= (given["start"] or 0) < step and (given["end"] is None or given["end"] >= size)
    if labels is not None and whole:
        steps = labels.reshape(-1, step)
        flow.labels.tie(steps, steps[:, :1], f"{described(node)} reads it with what stays")
    return whole


def _with_grids(flow: Flow, fields: Fields) -> Fields:
    """Record fields over several dimensions as grids, and return all fields."""
    flow.shapes.grids.extend(field for field in fields if len(covered(field)) > 1)
    return fields


def _joined(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    """Concatenate labels as the operation concatenates entries; a part without labels gets `FIXED`."""
    every: list[fx.Node] = list(given["tensors"])
    parts = [part for part in every if flow.value(part).shape != (0,)] or every  # torch.cat skips these
    shapes = [list(flow.value(part).shape) for part in parts]
    ndim = len(shapes[0])
    dim = int(given["dim"]) % ndim
    why = f"{described(node)} puts it beside what stays"
    across = [covering(flow.of(part), dim) for part in parts]
    kept: Fields = [field for field in flow.of(parts[0]) if field is not across[0]]
    flat = [1 if d == dim else size for d, size in enumerate(shapes[0])]
    for part, own in zip(parts[1:], across[1:], strict=True):
        kept = flow.tie(kept, [field for field in flow.of(part) if field is not own], flat, flat, why)
    if all(field is None for field in across):
        return kept
    spread = set[int]().union(*[covered(field) for field in across if field is not None])
    pieces = []
    for field, shape in zip(across, shapes, strict=True):
        wide = [shape[d] if d in spread else 1 for d in range(ndim)]
        pieces.append((torch.full([1] * ndim, FIXED) if field is None else field).expand(wide))
    return flow.labels.packed([*kept, torch.cat(pieces, dim)], why)


def _padded(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    """Padding: new labels for zeros along a labelled dimension, so that the zeros can be removed too."""
    source, pad = given["self"], list(given["pad"])
    fields, ndim = list(flow.of(source)), flow.value(source).ndim
    for index in range(len(pad) // 2):
        dim, (before, after) = ndim - 1 - index, pad[2 * index : 2 * index + 2]
        field = covering(fields, dim)
        if field is None or not (before or after):
            continue
        others = [each for each in fields if each is not field]
        if len(covered(field)) > 1 or min(before, after) < 0 or given.get("mode", "constant") != "constant":
            flow.pin([field], f"{described(node)} pads it")
            fields = others
        else:
            ends = [along(flow.labels.fresh(size), dim, ndim) for size in (before, after)]
            fields = [*others, torch.cat([ends[0], field, ends[1]], dim)]
    return fields


def _by_channel(flow: Flow, node: fx.Node, _given: dict[str, Any]) -> Any:
    """Pooling, resizing and padding of channels one by one; a second result holds indices and has no labels."""
    source = node.all_input_nodes[0]
    ndim = flow.value(source).ndim
    positions = set(range(ndim - next(int(each) for each in name_of(node) if each.isdigit()), ndim))
    fields = [field for field in flow.of(source) if not covered(field) & positions]
    flow.pin([field for field in flow.of(source) if covered(field) & positions], f"{described(node)} reads it")
    return fields if isinstance(flow.constants.values[node], Tensor) else [fields, []]


def _reduced(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    """Reductions, and operations whose results depend on all entries along a dimension."""
    source = given["self"]
    ndim = flow.value(source).ndim
    dims = given.get("dim")
    listed = range(ndim) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {dim % ndim for dim in listed}
    why, left = f"{described(node)} is over all of them", []
    for field in flow.of(source):
        for dim in covered(field) & gone if covered(field) - gone else ():
            flow.labels.tie(field, field.narrow(dim, 0, 1), why)
            field = field.narrow(dim, 0, 1)
        if covered(field) & gone:
            flow.pin([field], why)
        else:
            left.append(field)
    if given.get("keepdim", name_of(node) in SOFTMAXES):
        return left
    return [field.reshape([size for dim, size in enumerate(field.shape) if dim not in gone]) for field in left]


def _channelwise(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Any:
    """BatchNorm and other operations with a parameter per channel; input (batch, channels, positions ...)."""
    source = given["input"] if "input" in given else given["self"]
    shape = flow.value(source).shape
    fields = flow.of(source)
    for name in ("weight", "bias", "running_mean", "running_var"):
        own = given.get(name)
        if isinstance(own, fx.Node) and flow.value(own).numel() > 1:
            fields = _with_parameter(flow, fields, own, shape, f"{described(node)} is on what stays")
    if given.get("training") or given.get("use_input_stats"):
        inside = [field for field in fields if covered(field) - {1}]
        flow.pin(inside, f"{described(node)} counts it in its statistics")
    return fields if isinstance(flow.constants.values[node], Tensor) else [fields, [], []]


def _recurrent(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Any:
    """RNN, or one step of it: a unit has a row in each gate, a column in the recurrent weight, and its states.

    All layers and directions of one operation keep as many units.
    """
    if "input" not in given:
        return pin_inputs(flow, node, given)
    results, last = flow.constants.values[node], flow.value(given["input"]).ndim - 1
    values = flat(results)
    why = f"{described(node)} reads it"
    flow.pin([field for field in flow.of(given["input"]) if last not in covered(field)], why)
    read, constant = flow.one_dim(flow.of(given["input"]), last, why), constant_along(flow.value(given["input"]), last)
    layers, directions = Recurrence.all_of(given), 1 + bool(given.get("bidirectional"))
    steps, labels = "params" not in given, list[tuple[Tensor, Tensor]]()
    silent = [(value == 0).reshape(len(layers), -1, value.shape[-1]).all(1) for value in values[not steps :]]
    for first in range(0, len(layers), directions):
        own = range(first, first + directions)
        labels += [_units(flow, node, layers[n], (read, constant), [each[n] for each in silent]) for n in own]
        read = torch.cat([labels[n][0] for n in own])
        constant = torch.where(torch.cat([silent[0][n] for n in own]), 0.0, NAN)
    grids = [torch.stack(each) for each in zip(*labels, strict=True)]
    if len(layers) > 1:
        flow.shapes.grids.extend(grids)
    fields: list[Fields] = []
    for grid, value, state in zip(grids, values[not steps :], flat(given["hx"]), strict=False):
        shape = (len(layers), *[1] * (value.ndim - 2), grid.shape[1]) if not steps else (-1,)
        fields.append(_state(flow, state, grid.reshape(shape), f"{described(node)} begins with it"))
    if not steps:
        assert read is not None
        fields.insert(0, flow.labels.packed([along(read, last, last + 1)], ONLY_ONE))
    return fields if isinstance(results, list) else fields[0]


def _units(
    flow: Flow, node: fx.Node, layer: Recurrence, read: tuple[Tensor | None, Tensor], silent: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Label a layer of an RNN, and return the labels of its outputs and of its units."""
    why = f"{described(node)} reads it"
    weights = [each for each in layer[:4] if each is not None]
    size = flow.value(layer.states if layer.projection is None else layer.projection).shape[1]
    rows = [flow.labels_along(flow.of(each), 0, len(flow.value(each)), why).reshape(-1, size) for each in weights]
    units = rows[0][0]
    for each in rows:
        flow.labels.tie(each, units[None], f"{described(node)} has a gate that stays")
    outputs = units.clone()
    if layer.projection is not None:
        reads = flow.value(layer.projection) != 0
        flow.labels.tie(flow.labels_along(flow.of(layer.projection), 1, size, why), units, why)
        outputs = flow.labels_along(flow.of(layer.projection), 0, len(reads), why)
        flow.sites.append(Site(node, units, outputs, reads, torch.where(silent[1], 0.0, NAN).double(), why))
    columns = [flow.labels_along(flow.of(each), 1, flow.value(each).shape[1], why) for each in weights[:2]]
    flow.labels.tie(columns[1], outputs, why)
    constant = _foldable(flow, read[1], layer.inputs, layer.input_bias)
    if layer.input_bias is None:
        constant = torch.where(constant == 0, constant, NAN)
    live = [
        (flow.value(each) != 0).reshape(-1, size, len(own)).any(0) for each, own in zip(weights, columns, strict=False)
    ]
    inputs, zero = flow.tied(read[0], columns[0], why), torch.where(silent[0], 0.0, NAN).double()
    flow.sites.append(Site(node, inputs, units, live[0], constant, why, None, layer.inputs, layer.input_bias))
    flow.sites.append(Site(node, outputs.clone(), units, live[1], zero, why))
    return outputs, units


def _state(flow: Flow, state: fx.Node, field: Tensor, why: str) -> Fields:
    """Tie the first state of an RNN, (..., units), to its units; return the last state's fields."""
    shape, last = flow.value(state).shape, flow.value(state).ndim - 1
    field = raised(field, len(shape))
    if state in flow.made and name_of(state) in FILLED and len(state.users) == 1:
        flow.fields[state] = [field]
        return flow.labels.packed([field], ONLY_ONE)
    fields = [each for each in flow.of(state) if last in covered(each)]
    flow.pin([each for each in flow.of(state) if last not in covered(each)], why)
    alike = [max((each.shape[dim] for each in fields), default=1) for dim in range(last)]
    flow.tie([field], fields, shape, [*alike, shape[-1]], why)
    return flow.labels.packed([field], ONLY_ONE)


def _sized(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    """Size of a tensor that depends on values, such as the number of entries that a mask selects."""
    dim = int(given["dim"]) % flow.value(given["self"]).ndim
    flow.pin([each for each in flow.of(given["self"]) if dim in covered(each)], f"{described(node)} reads its size")
    return []


RULES: Mapping[str, Rule] = {
    "sym_size": _sized,
    "linear": _linear,
    "addmm": _addmm,
    GROUPED_PRODUCT: grouped_product,
    "embedding": _embedding,
    **dict.fromkeys(["layer_norm", "rms_norm", "native_layer_norm"], _normalised),
    **dict.fromkeys(["group_norm", "native_group_norm"], _group_norm),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(MOVES, _moved),
    **dict.fromkeys(SPATIAL, _by_channel),
    **dict.fromkeys([*REDUCTIONS, *SOFTMAXES], _reduced),
    **dict.fromkeys([*CHANNELWISE_NORMALISATIONS, "prelu", "_prelu_kernel"], _channelwise),
    **dict.fromkeys(["constant_pad_nd", "pad"], _padded),
    "cat": _joined,
    "entrywise": _entrywise,
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(PRODUCTS, product),
    **dict.fromkeys(RECURRENCES, _recurrent),
}
"""Name of an operation -> its rule."""


def flow_of(trace: Traced) -> Flow:
    """Label every tensor of a traced network."""
    return Flow(trace, Constants(trace), RULES)
