"""Files of a sparse network: its tensors in safetensors, and its layers in plain JSON.

A weight is stored as its nonzeros, if they take fewer bytes: `stored_weights` has the form. A weight that all kernels
of its layer round has values of int8. Everything is checked when it is loaded, field by field, because the C kernels
trust what they are given: a damaged file, and a field that no layer can have, are refused.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from pruning.catalogue.kernels import DENSE, KERNELS
from pruning.compact.fused_layers import SparseLstm
from pruning.compact.stored_weights import bytes_in, parts_of, taken
from pruning.graph.input_guard import InputGuard
from pruning.graph.tracing import first_line
from pruning.kernels.byte_kernels import rounded
from pruning.kernels.compiling import KernelsUnavailable
from pruning.kernels.dense_steps import LARGEST_NUMBER, OPERATIONS, DenseStep, StepPlan
from pruning.kernels.library import library
from pruning.kernels.sparse_layer import KernelChoice, SparseLayer, kernel_named, kernels_of
from pruning.kernels.sparse_sequence import MOST_LAYERS, SparseSequence, Wiring
from pruning.kernels.sparse_weight import LARGEST, ByteScale, LayerShape, SparseWeight

MOST_STEPS = 2**15
"""Largest kernel size, stride, padding and dilation."""
MOST_CHOICES, MOST_PRODUCTS = 64, 1024
SHAPE_FIELDS = frozenset(LayerShape.__dataclass_fields__)
CHOICE_FIELDS = frozenset(KernelChoice.__dataclass_fields__)


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


def read_layer(name: str, held: Any) -> tuple[LayerShape, tuple[KernelChoice, ...]]:
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
    return shape, tuple(_choice(fields(each, CHOICE_FIELDS, where), shape, where) for each in choices)


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


def sequence_record(sequence: SparseSequence) -> dict[str, Any]:
    """Return the names of a sequence's layers, and what they read, as plain JSON."""
    return {"layers": list(sequence._modules), **asdict(sequence.wiring)}


def read_sequence(name: str, held: Any, found: Mapping[str, Any]) -> SparseSequence:
    """Return a sequence of layers from plain JSON and the layers in a file.

    Raises:
        Damaged: a field is missing, unknown, or its layers read what nothing computes before them.
    """
    where = f"sequence {name[:80]!r}"
    held = fields(held, {"layers", "given", "reads", "returned"}, where)
    names, given, reads = held["layers"], whole(held["given"], 1, MOST_PRODUCTS, f"`given` of {where}"), held["reads"]
    if not isinstance(names, list) or not isinstance(reads, list) or not 1 <= len(names) == len(reads) <= MOST_LAYERS:
        raise Damaged(f"`layers` and `reads` of {where} must be lists of one length, at most {MOST_LAYERS}")
    own = [(str(each), found.get(f"{name}.{each}")) for each in names]
    layers = {each: layer for each, layer in own if isinstance(layer, SparseLayer | DenseStep)}
    if len(layers) != len(names) or len(names) != sum(each.startswith(f"{name}.") for each in found):
        raise Damaged(f"`layers` of {where} must be the names of all its layers, each once")
    wiring = Wiring(
        given,
        tuple(
            _read(each, layer, given + place - 1, where)
            for place, (layer, each) in enumerate(zip(layers.values(), reads, strict=True))
        ),
        wholes(held["returned"], None, given, given + len(names) - 1, f"`returned` of {where}"),
    )
    if set(wiring.last_reads()) != set(range(given + len(names))) or len({*wiring.returned}) < len(wiring.returned):
        raise Damaged(f"{where} must read or return each tensor, and return none twice")
    try:
        return SparseSequence(layers, wiring)
    except (KeyError, TypeError) as error:
        raise Damaged(f"a name of a layer of {where} is taken or has a dot") from error


def _read(held: Any, layer: SparseLayer | DenseStep, largest: int, where: str) -> tuple[int, ...]:
    """Return the numbers of a layer's inputs and of the tensor that is added, or of a step's inputs."""
    what = f"`reads` of {where}"
    counts = (1, 2) if isinstance(layer, SparseLayer) else (OPERATIONS[layer.plan.operation].inputs,)
    if isinstance(held, list) and held[1:] == [None]:  # version 4, where nothing is added
        held = held[:1]
    if not isinstance(held, list) or len(held) not in counts:
        raise Damaged(f"{what} must hold one or two numbers for each layer, and as many as it has inputs for each step")
    return wholes(held, None, 0, largest, what)


def step_record(step: DenseStep) -> dict[str, Any]:
    """Return a step's numbers as plain JSON."""
    return asdict(step.plan)


def read_step(name: str, held: Any, tensors: dict[str, Tensor]) -> DenseStep:
    """Return a step from plain JSON, and take its weight and bias out of the tensors in a file.

    Raises:
        Damaged: a field is missing, unknown, or has a value that no step can have.
    """
    where = f"step {name[:80]!r}"
    held = fields(held, frozenset(StepPlan.__dataclass_fields__), where)
    if not isinstance(held["operation"], str) or held["operation"] not in OPERATIONS:
        raise Damaged(f"`operation` of {where} must be one of {', '.join(OPERATIONS)}")
    number = held["number"]
    if type(number) not in (int, float) or not abs(number) <= LARGEST_NUMBER:
        raise Damaged(f"`number` of {where} must be a number of at most {LARGEST_NUMBER:.0e}")
    plan = StepPlan(held["operation"], whole(held["heads"], 1, LARGEST, f"`heads` of {where}"), float(number))
    own = [tensors.pop(f"{name}.{each}", None) for each in ("weight", "bias") if OPERATIONS[plan.operation].arrays]
    given = [each for each in own if each is not None and each.dtype is torch.float32 and each.ndim == 1]
    if len(given) != len(own) or len({len(each) for each in given}) > 1:
        raise Damaged(f"weight and bias of {where} must be float32 rows of one length")
    return DenseStep(plan, *given)


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

    counts = {"kernel": (2, 1), "stride": (2, 1), "padding": (4, 0), "dilation": (2, 1)}
    numbers: dict[str, Any] = {
        name: wholes(held[name], count, low, MOST_STEPS, f"`{name}` of {where}")
        for name, (count, low) in counts.items()
    }
    for name in ("inputs", "outputs", "groups"):
        numbers[name] = whole(held[name], 1, LARGEST, f"`{name}` of {where}")
    numbers |= {name: _byte_scale(held[name], f"`{name}` of {where}") for name in ("rounding", "added", "made")}
    if type(held["takes_bytes"]) is not bool or held["takes_bytes"] > (numbers["rounding"] is not None):
        raise Damaged(f"`takes_bytes` of {where} must be true or false, and true only with a `rounding`")
    for name, unbounded in (("low", -math.inf), ("high", math.inf)):
        numbers[name] = _bound(held[name], unbounded, where)
    layer = LayerShape(kind=held["kind"], flat=held["flat"], takes_bytes=held["takes_bytes"], **numbers)
    _check_geometry(layer, where)
    return layer


def _check_geometry(layer: LayerShape, where: str) -> None:
    plain = LayerShape(layer.kind, layer.inputs, layer.outputs)
    of_convolutions = ("flat", "kernel", "stride", "padding", "dilation", "groups", "added")
    if layer.kind == "linear" and any(getattr(layer, name) != getattr(plain, name) for name in of_convolutions):
        raise Damaged(f"{where} is linear, and must have the default numbers of a convolution")
    if layer.inputs % layer.groups or layer.outputs % layer.groups:
        raise Damaged(f"`groups` of {where} must divide its inputs and outputs")
    if layer.takes_bytes and layer.groups > 1 and layer.inputs // layer.groups % 4:
        raise Damaged(f"{where} takes bytes, and must have a multiple of four channels in each group")
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


def _byte_scale(held: Any, what: str) -> ByteScale | None:
    if held is None:
        return None
    held = fields(held, {"scale", "zero"}, what)
    if type(held["scale"]) not in (int, float) or not 1e-37 <= held["scale"] <= 1e37:
        raise Damaged(f"the scale in {what} must be a number from 1e-37 to 1e37")
    return ByteScale(float(held["scale"]), whole(held["zero"], 0, 255, f"the zero in {what}"))


def _choice(held: Mapping[str, Any], layer: LayerShape, where: str) -> KernelChoice:
    name, setting = held["kernel"], held["setting"]
    if name not in (known := kernels_of(layer)):
        raise Damaged(f"`kernel` of {where} must be one of {', '.join(known)}")
    if not isinstance(setting, dict) or len(setting) > 16:
        raise Damaged(f"`setting` of {where} must be an object")
    for each in ("seconds", "dense_seconds"):
        if type(held[each]) not in (int, float) or not 0 < held[each] < 1e9:
            raise Damaged(f"`{each}` of {where} must be a positive number of seconds")
    return KernelChoice(
        whole(held["examples"], 1, LARGEST, f"`examples` of {where}"),
        name,
        {key: whole(value, 0, LARGEST, f"`{key[:20]}` of {where}") for key, value in setting.items()},
        float(held["seconds"]),
        float(held["dense_seconds"]),
    )


STEM = "sparse_network"
TENSORS, LAYERS = f"{STEM}.safetensors", f"{STEM}.json"
OLDER = ("layers", "lstms", "nonzeros", "tied")
VERSION = 5
PARTS = {2: OLDER, 3: OLDER, 4: ("sequences", *OLDER), VERSION: ("sequences", "steps", *OLDER)}
"""Version that is read -> its objects; version 2 has neither blocks nor bits."""
NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
EXPANDED, SPARSEST = 2**28, 1000
"""Largest size of all stored nonzeros as dense weights: bytes, or multiple of the file's bytes, whichever is more."""


def tensors_of(network: fx.GraphModule) -> dict[str, Tensor]:
    """Return name -> tensor that the operations between layers read."""
    names = (str(node.target) for node in network.graph.find_nodes(op="get_attr"))
    return {name: attrgetter(name)(network) for name in names}


def layers_of(network: nn.Module) -> dict[str, SparseLayer]:
    """Return name -> sparse layer of a network."""
    return {name: module for name, module in network.named_modules() if isinstance(module, SparseLayer)}


def steps_of(network: nn.Module) -> dict[str, DenseStep]:
    """Return name -> step of a network."""
    return {name: module for name, module in network.named_modules() if isinstance(module, DenseStep)}


def save_layers(network: fx.GraphModule, folder: Path, stem: str = STEM) -> None:
    """Write the layers and tensors of a network that `to_sparse` returned into two files of a folder.

    The operations between them are in the network's graph, which the caller writes as code; `load_layers` puts layers
    and tensors into a module with this code as its `forward`.

    Raises:
        ValueError: the network was itself loaded from files.
    """
    from safetensors.torch import save

    layers = layers_of(network)
    held: dict[str, Tensor] = {}
    nonzeros: dict[str, list[int]] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in tensors_of(network).items():
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
            continue
        _store(name, tensor.detach(), held, nonzeros)
    for name, layer in layers.items():
        weight = layer.weight().dense()
        if all(choice.rounds for choice in layer.plan.choices):
            whole_numbers, held[f"{name}.weight.scales"] = rounded(weight)
            weight = whole_numbers.to(torch.int8)
        _store(f"{name}.weight", weight, held, nonzeros)
        held[f"{name}.bias"] = layer.get_buffer("bias").clone()
    steps = steps_of(network)
    held |= {f"{name}.{each}": own.clone() for name, step in steps.items() for each, own in step.named_buffers()}
    (folder / f"{stem}.safetensors").write_bytes(save(held))
    modules = dict(network.named_modules())
    sequences = {name: each for name, each in modules.items() if isinstance(each, SparseSequence)}
    content = {
        "version": VERSION,
        "layers": {name: layer_record(layer) for name, layer in layers.items()},
        "lstms": {name: lstm_record(each) for name, each in modules.items() if isinstance(each, SparseLstm)},
        "sequences": {name: sequence_record(each) for name, each in sequences.items()},
        "steps": {name: step_record(each) for name, each in steps.items()},
        "nonzeros": nonzeros,
        "tied": tied,
    }
    (folder / f"{stem}.json").write_text(json.dumps(content, allow_nan=False) + "\n")


def _store(name: str, weight: Tensor, held: dict[str, Tensor], nonzeros: dict[str, list[int]]) -> None:
    """Add a tensor to those of the file, in parts if these take fewer bytes."""
    if weight.dtype not in (torch.float32, torch.int8) or weight.ndim < 2 or not 0 < weight.numel() <= LARGEST:
        held[name] = weight.contiguous().clone()
        return
    parts = parts_of(weight)
    if weight.dtype is torch.float32 and bytes_in(parts) >= weight.nbytes:
        held[name] = weight.contiguous().clone()
        return
    nonzeros[name] = list(weight.shape)
    held |= {f"{name}.{part}": tensor for part, tensor in parts.items()}


def load_layers(
    folder: Path | str,
    network: nn.Module,
    names: Collection[str],
    guard: InputGuard | None = None,
    stem: str = STEM,
) -> nn.Module:
    """Put the layers and tensors of a folder into a module, under their names; return it in evaluation mode.

    A layer whose kernel this machine cannot run takes another one, or PyTorch's dense operation, with a warning.

    Args:
        folder: has the files that `save_layers` wrote.
        network: a module without layers and tensors.
        names: names of the layers, steps and tensors that its `forward` reads.
        guard: inputs that its `forward` takes; others are refused at each call.
        stem: the name of the files, without their endings.

    Raises:
        ValueError: a file is damaged, or does not belong to the network.
        OSError: a file cannot be read.
    """
    held, size = _tensors(Path(folder, f"{stem}.safetensors"))
    file = Path(folder, f"{stem}.json")
    text = file.read_bytes()
    try:
        content = _content(text, file.name)
        found = dict(_loaded(content, held, max(EXPANDED, SPARSEST * size)))
        joined: dict[str, nn.Module] = {
            _name(name): read(name, record, found)
            for part, read in (("lstms", read_lstm), ("sequences", read_sequence))
            for name, record in content[part].items()
        }
        if set(found) != set(names):
            odd = sorted(set(found) ^ set(names))
            raise Damaged(f"layers and tensors do not agree with the network's code, such as {odd[0][:80]!r}")
    except Damaged as error:
        raise ValueError(
            f"{folder} holds no sparse network, or a damaged one: {error}; export the network again."
        ) from error
    for name, each in found.items():
        _place(network, name, each)
    if guard is not None:
        network.register_forward_pre_hook(guard.hook, with_kwargs=True)
    for name, module in joined.items():
        parent, _, leaf = name.rpartition(".")
        network.get_submodule(parent).add_module(leaf, module)
    return network.eval()


def _tensors(file: Path) -> tuple[dict[str, Tensor], int]:
    """Return the tensors in a file, as copies that a later change of the file does not reach, and its bytes."""
    from safetensors.torch import load

    content = file.read_bytes()
    try:
        return load(content), len(content)
    except Exception as error:  # safetensors raises many types
        raise ValueError(f"{file} is damaged ({first_line(error)}); export the network again.") from error


def _loaded(
    content: Mapping[str, Any], held: dict[str, Tensor], most: int
) -> Iterator[tuple[str, Tensor | SparseLayer | DenseStep]]:
    """Yield the name of each layer, step and tensor, with it; `most`: bytes of weights as dense ones."""
    nonzeros = _nonzeros(content["nonzeros"], held, most)
    replaced: list[str] = []
    exact = False
    for name, record in content["layers"].items():
        layer, choices = read_layer(_name(name), record)
        weight, bias = _weight(f"{name}.weight", layer, held, nonzeros), held.pop(f"{name}.bias", None)
        if bias is None or bias.shape != (layer.outputs,) or bias.dtype is not torch.float32:
            raise Damaged(f"the bias of layer {name!r} must have {layer.outputs} float32 entries")
        own = tuple(_runnable(choice, weight, layer) for choice in choices)
        kernels, wanted = ([(each.kernel, each.setting) for each in which] for which in (own, choices))
        replaced += [name] * (kernels != wanted)
        exact |= any(one.rounds and not each.rounds for one, each in zip(choices, own, strict=True))
        yield name, SparseLayer(layer, weight, bias, own, keep=False)
    if replaced:
        _warn(replaced, exact)
    for name, record in content["steps"].items():
        yield name, read_step(_name(name), record, held)
    tensors = {name: weight.dense() for name, weight in nonzeros.items()} | held
    for name, other in content["tied"].items():
        if not isinstance(other, str) or other not in tensors or name in tensors:
            raise Damaged(f"tensor {name[:80]!r} is tied to an unknown one")
        yield _name(name), tensors[other]
    for name, tensor in tensors.items():
        yield _name(name), tensor


def _content(text: bytes, name: str) -> Mapping[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        held = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is no JSON ({str(error)[:80]})") from error
    if not isinstance(held, dict) or type(held.get("version")) is not int or held["version"] not in PARTS:
        raise Damaged(f"{name} must have the version {' or '.join(map(str, PARTS))}")
    parts = PARTS[held["version"]]
    content = fields(held, {"version", *parts}, name)
    if not all(isinstance(content[each], dict) for each in parts):
        raise Damaged(f"{', '.join(parts)} of {name} must be objects")
    return {"sequences": {}, "steps": {}, **content}


def _name(name: str) -> str:
    if not NAME.fullmatch(name) or len(name) > 500:
        raise Damaged(f"{name[:80]!r} is no name of a layer or tensor")
    return name


def _nonzeros(shapes: Mapping[str, Any], held: dict[str, Tensor], most: int) -> dict[str, SparseWeight]:
    """Take the weights in parts out of a file's tensors, and check them; `most`: bytes of all as dense ones."""
    found: dict[str, SparseWeight] = {}
    for name, given in shapes.items():
        shape = wholes(given, None, 1, LARGEST, f"the shape of {name[:80]!r}")
        try:
            found[name] = taken(name, shape, held, most)
        except ValueError as error:
            raise Damaged(f"{name[:80]!r}: {str(error).rstrip('.')}") from error
        most -= 4 * math.prod(shape)
    return found


def _weight(name: str, layer: LayerShape, held: dict[str, Tensor], nonzeros: dict[str, SparseWeight]) -> SparseWeight:
    """Take a layer's weight out of the file's tensors."""
    shape = weight_shape(layer)
    dense, weight = held.pop(name, None), nonzeros.pop(name, None)
    if dense is not None and dense.dtype is torch.float32 and dense.shape == shape and dense.numel() <= LARGEST:
        return SparseWeight.of(dense)
    if weight is None or weight.shape != shape:
        raise Damaged(f"{name[:80]!r} must have the shape {shape} in float32")
    return weight


def _runnable(choice: KernelChoice, weight: SparseWeight, layer: LayerShape) -> KernelChoice:
    """Return a choice if its kernel offers this setting here; else the first offer of it, or of another kernel.

    Kernels that round as the choice does come first: their outputs have its bits.
    """
    try:
        library()
    except KernelsUnavailable:
        return KernelChoice(choice.examples, DENSE, {}, choice.dense_seconds, choice.dense_seconds)
    names = sorted(kernels_of(layer), key=lambda name: (name == DENSE, KERNELS[name].rounds != choice.rounds))
    for name in dict.fromkeys((choice.kernel, *names)):
        offered = [dict(each) for each in kernel_named(name).settings(weight, layer, choice.examples)]
        if name == choice.kernel and choice.setting in offered:
            return choice
        if offered:
            return KernelChoice(choice.examples, name, offered[0], choice.seconds, choice.dense_seconds)
    raise AssertionError("PyTorch's operation computes every layer")


def _warn(names: list[str], exact: bool) -> None:
    try:
        library()
        reason = "this machine or release does not offer the kernels that were chosen where the file was written"
    except KernelsUnavailable as error:
        reason = str(error).rstrip(".")
    count = f"{len(names)} layers run" if len(names) > 1 else f"layer {names[0]} runs"
    change = "perhaps slower" + ", and in float32 in place of 8 bits" * exact
    warnings.warn(f"{count} on other kernels, {change}: {reason}.", stacklevel=4)


def _place(network: nn.Module, name: str, each: Tensor | SparseLayer | DenseStep) -> None:
    """Register a layer, step or tensor in a module under a name with dots."""
    *path, leaf = name.split(".")
    for step in path:
        if step not in network._modules:
            network.add_module(step, nn.Module())
        network = network.get_submodule(step)
        assert not isinstance(network, SparseLayer | DenseStep), "names agree with the network's code"
    if isinstance(each, nn.Module):
        network.add_module(leaf, each)
    else:
        network.register_buffer(leaf, each)
