"""Sparse layers as plain JSON: written from layers, and checked field by field when they are read.

The C kernels trust what they are given, so a field that no layer can have is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pruning.catalogue.kernels import KERNELS
from pruning.compact.sparse_lstm import SparseLstm
from pruning.kernels.sparse_layer import Choice, SparseLayer
from pruning.kernels.sparse_weight import LARGEST, LayerShape

MOST_STEPS = 2**15
"""Largest kernel size, stride, padding and dilation."""
MOST_CHOICES, MOST_PRODUCTS = 64, 1024
SHAPE_FIELDS = frozenset(LayerShape.__dataclass_fields__)
CHOICE_FIELDS = frozenset(Choice.__dataclass_fields__)


class Damaged(ValueError):
    """A field of a file that no sparse network can have."""


def layer_record(layer: SparseLayer) -> dict[str, Any]:
    """Return a layer's numbers and choices as plain JSON; null stands for outputs without a bound."""
    shape = asdict(layer.plan.layer)
    for name in ("low", "high"):
        shape[name] = shape[name] if math.isfinite(shape[name]) else None
    choices = [asdict(choice) for choice in layer.plan.choices]
    for choice in choices:
        choice |= {name: float(f"{choice[name]:.3g}") for name in ("seconds", "dense_seconds")}
    return {"shape": shape, "choices": choices}


def read_layer(name: str, held: Any) -> tuple[LayerShape, tuple[Choice, ...]]:
    """Return a layer's numbers and choices from plain JSON.

    Raises:
        Damaged: a field is missing, unknown, or has a value that no layer can have.
    """
    where = f"layer {name!r}"
    held = fields(held, {"shape", "choices"}, where)
    shape = _shape(fields(held["shape"], SHAPE_FIELDS, where), where)
    choices = held["choices"]
    if not isinstance(choices, list) or not 1 <= len(choices) <= MOST_CHOICES:
        raise Damaged(f"`choices` of {where} must hold 1 to {MOST_CHOICES} choices")
    return shape, tuple(_choice(fields(each, CHOICE_FIELDS, where), shape.kind, where) for each in choices)


def lstm_record(lstm: SparseLstm) -> dict[str, Any]:
    """Return an LSTM's numbers as plain JSON; its products are layers, `NAME.products.0` and so on."""
    return {"products": len(lstm.products), "directions": lstm.directions, "batch_first": lstm.batch_first}


def read_lstm(name: str, held: Any, found: Mapping[str, Any]) -> SparseLstm:
    """Return an LSTM from plain JSON and the layers in a file.

    Raises:
        Damaged: a field is missing, unknown, or its products do not fit together.
    """
    where = f"LSTM {name[:80]!r}"
    held = fields(held, {"products", "directions", "batch_first"}, where)
    count = whole(held["products"], 2, MOST_PRODUCTS, f"`products` of {where}")
    directions = whole(held["directions"], 1, 2, f"`directions` of {where}")
    products = [found.get(f"{name}.products.{place}") for place in range(count)]
    layers = [each for each in products if isinstance(each, SparseLayer) and each.plan.layer.kind == "linear"]
    if len(layers) != count or count % (2 * directions) or not isinstance(held["batch_first"], bool):
        raise Damaged(f"{where} must have two linear layers for each cell")
    shapes = [each.plan.layer for each in layers]
    hidden = shapes[1].inputs
    for place, (inputs, states) in enumerate(zip(shapes[::2], shapes[1::2], strict=True)):
        before = shapes[0].inputs if place < directions else directions * hidden
        if (inputs.inputs, inputs.outputs, states.inputs, states.outputs) != (before, 4 * hidden, hidden, 4 * hidden):
            raise Damaged(f"the layers of {where} do not fit together")
    return SparseLstm(layers, directions, held["batch_first"])


def weight_shape(layer: LayerShape) -> tuple[int, ...]:
    """Return the shape of a layer's dense weight."""
    if layer.kind == "linear":
        return layer.outputs, layer.inputs
    return (layer.outputs, layer.inputs // layer.groups, *layer.kernel[1 if layer.flat else 0 :])


def fields(held: Any, names: set[str] | frozenset[str], where: str) -> Mapping[str, Any]:
    """Return a JSON object; raise Damaged unless it has exactly these fields."""
    if not isinstance(held, dict) or set(held) != names:
        raise Damaged(f"{where} must have the fields {', '.join(sorted(names))} and no others")
    return held


def whole(value: Any, low: int, high: int, what: str) -> int:
    """Return a whole number; raise Damaged if it is anything else or outside `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise Damaged(f"{what} must be a whole number from {low} to {high}")
    return value


def wholes(value: Any, count: int | None, low: int, high: int, what: str) -> tuple[int, ...]:
    """Return a list of whole numbers, `count` of them if it is given."""
    if not isinstance(value, list) or not value or (count is not None and len(value) != count):
        raise Damaged(f"{what} must be a list of {'whole' if count is None else count} numbers")
    return tuple(whole(each, low, high, what) for each in value)


def _shape(held: Mapping[str, Any], where: str) -> LayerShape:
    if held["kind"] not in ("linear", "convolution") or type(held["flat"]) is not bool:
        raise Damaged(f"`kind` or `flat` of {where} is unknown")

    def steps(name: str, count: int, low: int) -> tuple[Any, ...]:
        return wholes(held[name], count, low, MOST_STEPS, f"`{name}` of {where}")

    def size(name: str) -> int:
        return whole(held[name], 1, LARGEST, f"`{name}` of {where}")

    layer = LayerShape(
        held["kind"],
        size("inputs"),
        size("outputs"),
        held["flat"],
        kernel=steps("kernel", 2, 1),
        stride=steps("stride", 2, 1),
        padding=steps("padding", 4, 0),
        dilation=steps("dilation", 2, 1),
        groups=size("groups"),
        low=_bound(held["low"], -math.inf, where),
        high=_bound(held["high"], math.inf, where),
    )
    _check_geometry(layer, where)
    return layer


def _check_geometry(layer: LayerShape, where: str) -> None:
    plain = LayerShape(layer.kind, layer.inputs, layer.outputs, low=layer.low, high=layer.high)
    if layer.kind == "linear" and layer != plain:
        raise Damaged(f"{where} is linear, and must have the default numbers of a convolution")
    if layer.inputs % layer.groups or layer.outputs % layer.groups:
        raise Damaged(f"`groups` of {where} must divide its inputs and outputs")
    down = (layer.kernel[0], layer.stride[0], layer.dilation[0], layer.padding[0], layer.padding[2])
    if layer.flat and down != (1, 1, 1, 0, 0):
        raise Damaged(f"{where} has one dimension, and must have the default numbers down")
    if not layer.low <= layer.high:
        raise Damaged(f"`low` of {where} must be at most `high`")


def _bound(value: Any, unbounded: float, where: str) -> float:
    if value is None:
        return unbounded
    if type(value) not in (int, float) or not abs(value) <= 1e30:
        raise Damaged(f"`low` and `high` of {where} must be null or numbers of at most 1e30")
    return float(value)


def _choice(held: Mapping[str, Any], kind: str, where: str) -> Choice:
    name, setting = held["kernel"], held["setting"]
    if not isinstance(name, str) or name not in KERNELS or kind not in KERNELS[name].kinds:
        known: Sequence[str] = [each for each, row in KERNELS.items() if kind in row.kinds]
        raise Damaged(f"`kernel` of {where} must be one of {', '.join(known)}")
    if not isinstance(setting, dict) or len(setting) > 16:
        raise Damaged(f"`setting` of {where} must be an object")
    for each in ("seconds", "dense_seconds"):
        if type(held[each]) not in (int, float) or not 0 < held[each] < 1e9:
            raise Damaged(f"`{each}` of {where} must be a positive number of seconds")
    return Choice(
        whole(held["examples"], 1, LARGEST, f"`examples` of {where}"),
        name,
        {key: whole(value, 0, LARGEST, f"`{key[:20]}` of {where}") for key, value in setting.items()},
        float(held["seconds"]),
        float(held["dense_seconds"]),
    )
