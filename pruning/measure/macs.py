"""Multiply-accumulates (MACs) of one forward pass, layer by layer, for all weights and for unmasked weights.

A weight takes part in one multiplication for each position where it is applied, so the count of a layer is

    MACs = sum over its weights of (applications of the weight),      remaining = the same sum over unmasked weights

The count includes Linear, Bilinear, convolutions (also transposed), transformers' Conv1D, RNN, LSTM, GRU and their
cells, and MultiheadAttention. It also includes matrix products and convolutions in other forwards, counted for the
module that computes them. The most important are the two products of attention: queries by keys, and attention weights
by values, for every pair of query and key, even if an attention mask hides the pair. A product of two activations has
no weights: it remains, unless pruning made one factor all 0, for example the queries or values of a removed head.
Biases, normalisation, activations and embeddings are not counted.

Experts whose matrices are stacked in one parameter count by what is routed to them, whichever implementation computes
them: tokens times experts of a token, each time one matrix. What remains is the mean over the experts that are left. A
removed expert, whose matrices and rows of the router are masked, takes nothing from it: its tokens go to others.

A weight in such a product is recognised by its storage, or as a copy, such as one that autocast or einsum makes. For a
subclass of one of the layers above, only the layer's own product is counted, and no other product in its forward. If a
forward multiplies by a tensor that it computes from the weight, and that has fewer zeros than the mask, as after
centring or with an adapter, the zeros of that tensor count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from pruning.holding.parameter import check_has_shape, first_names, joined, plain_modules, plain_parameters, unwrapped
from pruning.holding.reparam import held
from pruning.layouts import (
    ATTENTION,
    BILINEAR,
    CONVOLUTION,
    LINEAR,
    RECURRENT,
    RECURRENT_CELL,
    TRANSPOSED_CONVOLUTION,
    TRANSPOSED_LINEAR,
    LayerKind,
    kind_of,
    layout_of,
)
from pruning.masks.mask_set import MaskSet
from pruning.mixtures.finding import experts_left, mixtures
from pruning.mixtures.routing import routed_of
from pruning.mixtures.survivors import routing_among_all

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Inputs of one forward call as (args, kwargs)."""


class Use(NamedTuple):
    """Use of a weight, or of some of its rows: how often each entry is applied in one call.

    With `experts`, the weight stacks the matrices of so many experts, and `times` counts applications of a matrix.
    Those of experts without an entry in any of `stacks` (names of tensors of that many parts) go to the others.
    """

    weight: str
    times: int
    rows: slice = slice(None)
    experts: int = 1
    stacks: tuple[str, ...] = ()

    def alive(self, masks: Mapping[str, Tensor]) -> int | Tensor:
        """Return the number of experts that are left under masks; at least 1."""
        return 1 if self.experts == 1 else experts_left(self.experts, self.stacks, masks)


@dataclass(frozen=True)
class Call:
    """Call of a layer: positional arguments, keyword arguments, and output."""

    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Any

    def argument(self, position: int, name: str) -> Any:
        return self.inputs[position] if position < len(self.inputs) else self.keywords[name]


Rule = Callable[[Any, Call], list[Use]]
"""(layer, call) -> uses of its weights."""


def _features_last(_module: Any, call: Call) -> list[Use]:
    read = _first_tensor(
        (*call.inputs, *call.keywords.values())
    )  # a derived layer, such as a router, may return several
    return [Use("weight", read.numel() // max(1, read.shape[-1]))]


def _convolution(module: Any, call: Call) -> list[Use]:
    return [Use("weight", _first_tensor(call.output).numel() // module.out_channels)]


def _first_tensor(values: Any) -> Tensor:
    return next(each for each in tree_leaves(values) if isinstance(each, Tensor))


def _transposed_convolution(module: Any, call: Call) -> list[Use]:
    return [Use("weight", call.argument(0, "input").numel() // module.in_channels)]


def _recurrent(module: Any, call: Call) -> list[Use]:
    sequence = call.argument(0, "input")
    entries = sequence.data.numel() if isinstance(sequence, PackedSequence) else sequence.numel()
    names = [leaf for leaf, _ in plain_parameters(module) if layout_of(module, leaf) is not None]
    return [Use(name, entries // module.input_size) for name in names]


def _attention(module: nn.MultiheadAttention, call: Call) -> list[Use]:
    query, key, value = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    size = module.embed_dim
    queries, keys, values = query.numel() // size, key.numel() // module.kdim, value.numel() // module.vdim
    if module._qkv_same_embed_dim:
        starts = zip((0, size, 2 * size), (queries, keys, values), strict=True)
        uses = [Use("in_proj_weight", times, slice(start, start + size)) for start, times in starts]
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        uses = [Use(name, times) for name, times in zip(names, (queries, keys, values), strict=True)]
    return [*uses, Use("out_proj.weight", queries)]


RULES: Mapping[LayerKind, Rule] = {
    **dict.fromkeys((LINEAR, TRANSPOSED_LINEAR, BILINEAR), _features_last),
    CONVOLUTION: _convolution,
    TRANSPOSED_CONVOLUTION: _transposed_convolution,
    **dict.fromkeys((RECURRENT, RECURRENT_CELL), _recurrent),
    ATTENTION: _attention,
}
"""Kind of layer -> rule; products of other layers are counted as they are computed."""


def rule_of(module: nn.Module) -> Rule | None:
    kind = kind_of(module)
    return None if kind is None else RULES.get(kind)


FIRST = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "addmv": 1, "baddbmm": 1, "addbmm": 1}
"""Operation -> index of its first factor among the arguments; the second factor comes next."""
ATTENTION_KERNELS = ("_scaled_dot_product_", "flex_attention")
"""Name prefixes of attention kernels, which take queries, keys and values, each (..., heads, tokens, features)."""


class Product(NamedTuple):
    """Two factors, and the multiply-accumulates of their product; every entry of a factor is used equally often.

    The factors of a convolution are its input and weight; its border counts like its inside. Only the kernel of
    attention knows the attention weights, so for their product with the values both factors are the values.
    `is_batched`: the factors hold as many matrices, each multiplied by the one at its place.
    """

    one: Tensor
    other: Tensor
    macs: int
    is_batched: bool = False


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that sees each operation of torch without importing torch's compiler."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: with True, torch imports its compiler at the first operation, which costs 2 s and 80 MB."""
        return False


Made: TypeAlias = Callable[[tuple[Any, ...], Tensor], None]
"""(arguments of an operation that is no product, its first result) -> None."""


class Products(Watching):
    """Dispatch mode that calls `seen` with each product that is computed, and `made` with other tensors."""

    def __init__(self, seen: Callable[[Product], None] = lambda _: None, made: Made = lambda *_: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._made = seen, made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, decomposed if it is composite, and report its products."""
        named = dict(kwargs or {})
        if isinstance(func, OpOverload):
            with self:  # under inference_mode composite operations arrive whole
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        result = func(*args, **named)
        self.note(args, result, [*_products(func, args, result)])
        return result

    def note(self, args: tuple[Any, ...], result: Any, products: Sequence[Product]) -> None:
        """Report an operation, which computed these products or none."""
        for product in products:
            self._seen(product)
        first = result[0] if isinstance(result, tuple) and result else result
        if not products and isinstance(first, Tensor):
            self._made(args, first)


def _products(func: Any, args: tuple[Any, ...], result: Any) -> Iterator[Product]:
    if isinstance(func, OpOverload) and func.namespace != "aten":
        return
    name = str(func.overloadpacket.__name__ if isinstance(func, OpOverload) else func.name())
    if name in FIRST:
        one, other = args[FIRST[name] :][:2]
        yield Product(one, other, other.numel() * (one.shape[-2] if one.ndim > 1 else 1), one.ndim == 3)
    elif name == "convolution":
        inputs, weight, transposed = args[0], args[1], args[6]
        yield Product(inputs, weight, weight.numel() * ((inputs if transposed else result).numel() // weight.shape[0]))
    elif name.startswith(ATTENTION_KERNELS):
        queries, keys, values = (each.flatten(0, -3) for each in args[:3])
        keys, values = (each.repeat_interleave(len(queries) // len(each), 0) for each in (keys, values))
        yield Product(queries, keys, queries.numel() * keys.shape[1], is_batched=True)
        yield Product(values, values, values.numel() * queries.shape[1], is_batched=True)


COMPILING = {"torch._dynamo", "torch.nn.attention.flex_attention"}
"""Modules of which one is imported if a forward is compiled, or compiles; importing the first takes a second."""


@dataclass(frozen=True)
class LayerMacs:
    """Multiply-accumulates of one layer: for all its weights, and for its unmasked weights."""

    total: int
    remaining: int


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates by qualified layer name, in the order of the first call.

    `computed` names the layers that multiply by a tensor computed from their weight, in which masked entries are not 0,
    and the weights from which another module computes such a tensor.
    """

    layers: Mapping[str, LayerMacs]
    computed: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Multiply-accumulates of the dense model."""
        return sum(layer.total for layer in self.layers.values())

    @property
    def remaining(self) -> int:
        """Multiply-accumulates of unmasked weights: the work of a kernel that skips every zero."""
        return sum(layer.remaining for layer in self.layers.values())


def macs(model: nn.Module, example: Any, masks: MaskSet | None = None) -> Macs:
    """Count the multiply-accumulates of `model(example)`.

    The model runs once, in evaluation mode and without gradients, and is not changed. For a subclass of a layer, only
    the layer's own product is counted.

    Args:
        model: any module.
        example: input of the model; a plain tuple is unpacked to positional arguments, a dict to keyword arguments.
            Pass a batch of one example for the count of one example.
        masks: masks that say which weights are unmasked; None: the masks of the model. Masked weights must be 0 in the
            model, so that products of activations that became 0 are recognised.
    """
    counter = counted(model, example, MaskSet.collect(model) if masks is None else masks)
    return Macs(counter.layers, tuple(counter.computed))


def counted(model: nn.Module, example: Any, masks: MaskSet) -> Counter:
    """Run `model(example)` once under a counter, and return the counter; see `macs`."""
    counter = Counter(model, masks)
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        for path, module in counter.modules.items():
            enter, leave = partial(counter.enter, path), partial(counter.leave, path)
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)  # the fast path calls no layers
        stack.enter_context(sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]))  # others pad features
        stack.enter_context(eagerly())  # a dispatch mode does not see the products of compiled code
        stack.enter_context(in_mode(model, training=False))
        stack.enter_context(routing_among_all(model))  # routers have a product for each expert, masked or not
        with torch.no_grad(), Products(counter.product, counter.made):
            called(unwrapped(model), arguments_on(model, example), "example")
    return counter


def called(model: nn.Module, given: Inputs, name: str) -> Any:
    """Return the outputs of a network.

    Raises:
        ValueError: the network does not run on the inputs, which the caller passed as `name`.
    """
    args, kwargs = given
    try:
        return model(*args, **kwargs)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a forward may raise anything
        kinds = (f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
        raise ValueError(
            f"`{name}` ({', '.join(kinds)}) must be an input of {type(model).__name__}, which failed with "
            f"{type(error).__name__}: {error}; pass one that the network runs on."
        ) from error


def arguments_of(example: Any) -> Inputs:
    """Return an example as (args, kwargs): a plain tuple is unpacked, and a mapping, by keyword."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if type(example) is tuple else (example,)), {}


def arguments_on(model: nn.Module, example: Any) -> Inputs:
    """Return an example as (args, kwargs), with its tensors on the device of the model's first parameter."""
    given, first = arguments_of(example), next(model.parameters(), None)
    return given if first is None else on_device(given, first.device)


def on_device(given: Inputs, device: torch.device, name: str = "example") -> Inputs:
    """Return (args, kwargs) of an example with their tensors on a device; `name` is the argument that gave it.

    Raises:
        ValueError: a tensor is on the meta device, where tensors have no values, or all tensors are empty.
    """
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    if device.type != "meta" and any(leaf.is_meta for leaf in tensors):
        raise ValueError(f"`{name}` (with a tensor on the meta device) must have values; pass tensors of the CPU.")
    if tensors and not any(leaf.numel() for leaf in tensors):
        raise ValueError(f"`{name}` (of shape {tuple(tensors[0].shape)}) must hold numbers; pass one row or more.")
    found: Inputs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, given)
    return found


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled modules as they were written: compiled code calls no hooks and hides its products."""
    with torch.compiler.set_stance("force_eager") if COMPILING & sys.modules.keys() else nullcontext():
        yield


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set every module to training or evaluation mode, and restore the modes afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, reparam in held(model):
            reparam.refresh_between(module)  # a run without gradients leaves pruned tensors without a history


class Counter:
    """Counter of multiply-accumulates; hooks call `enter` and `leave` around each module's forward.

    `layers` holds the counts by layer, `uses` the uses of each weight that a layer or a product applies, `activations`
    the counts of products of two activations by module, and `computed` the nonzero entries of the tensor that a layer,
    or another module, computes from a masked weight, if the mask keeps fewer.
    """

    def __init__(self, model: nn.Module, masks: MaskSet) -> None:
        self.layers: dict[str, LayerMacs] = {}
        self.uses: dict[str, list[Use]] = {}
        self.computed: dict[str, int] = {}
        self.activations: dict[str, int] = {}
        own = [(joined(path, n), p) for path, each in plain_modules(model) for n, p in plain_parameters(each)]
        for name, parameter in own:
            check_has_shape(name, parameter)
        self._weights = {p.untyped_storage().data_ptr(): (n, p) for n, p in reversed(own)}  # first names
        self._sizes = {weight.numel() for _, weight in self._weights.values()}
        self._copies: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        """Tensor -> name of the whole weight that it copies, or is computed from."""
        self._mixtures = {mixture.experts: mixture for mixture in mixtures(model)}
        self.modules, self._masks, self._masked = dict(plain_modules(model)), masks, masks.sparsity() > 0
        named = dict(unwrapped(model).named_parameters(remove_duplicate=False))
        self._by_parameter = {id(named[name]): mask for name, mask in masks.items() if name in named}
        """Masks by parameter: a shared one has its mask under any of its names."""
        self._running: list[tuple[str, nn.Module, bool]] = []

    def enter(self, path: str, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Record a module whose forward begins, and count the products of experts from their arguments."""
        times = self._times_of_experts(path, inputs, keywords)
        for name in self._mixtures[path].stacks if times is not None else ():
            if layout_of(module, name.removeprefix(f"{path}.")) is not None:
                self._use_experts(path, name, times or 0)
        self._running.append((path, module, times is not None or rule_of(module) is not None))

    def leave(
        self, path: str, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        """Count the multiply-accumulates of a layer whose forward ends."""
        while self._running.pop()[1] is not module:  # modules inside whose error was caught never call `leave`
            pass
        rule = rule_of(module)
        for use in rule(module, Call(inputs, keywords, output)) if rule else []:
            self._use(path, module, use)

    def _use(self, path: str, module: nn.Module, use: Use) -> None:
        """Count a use of a module's weight."""
        weight, name = attrgetter(use.weight)(module), joined(path, use.weight)
        size, mask = weight[use.rows].numel(), self._by_parameter.get(id(weight), self._masks.get(name))
        kept = size if mask is None else max(int(mask[use.rows].count_nonzero()), self.computed.get(path, 0))
        self.uses.setdefault(name, []).append(use)
        self._add(path, use.times * size // use.experts, use.times * kept // int(use.alive(self._masks)))

    def _times_of_experts(self, path: str, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> int | None:
        """Return how often a call of experts applies a matrix; None for another module or form of call."""
        if path not in self._mixtures:
            return None
        try:
            chosen = routed_of(inputs, keywords).experts
        except ValueError:
            return None
        return chosen.numel() if chosen.is_meta else int((chosen < self._mixtures[path].count).sum())

    def _use_experts(self, path: str, name: str, times: int) -> None:
        """Count applications of the matrices of experts, which a weight stacks."""
        mixture = self._mixtures[path]
        use = Use(name.removeprefix(f"{path}."), times, experts=mixture.count, stacks=mixture.removable)
        self._use(path, self.modules[path], use)

    def _is_of_all_experts(self, product: Product) -> bool:
        """Count a product of all experts' matrices; rows of zeros are tokens that are routed to other experts."""
        path, module, _ = self._running[-1]
        for name in self._mixtures[path].stacks if path in self._mixtures else ():
            whole = getattr(module, name.removeprefix(f"{path}."))
            for factor, other, dim in ((product.one, product.other, -2), (product.other, product.one, -1)):
                same = factor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
                if same and factor.numel() == whole.numel() and not factor.is_meta:
                    tokens = other.any(max(dim, -other.ndim))
                    times = product.macs * self._mixtures[path].count // max(1, factor.numel() * tokens.numel())
                    self._use_experts(path, name, times * int(tokens.sum()))
                    return True
        return False

    def product(self, product: Product) -> None:
        """Count a product that no layer rule counts."""
        layer = next((each[:2] for each in self._running if each[2]), None)
        if layer is None:
            if not self._is_of_all_experts(product):
                self._add_product(self._running[-1][0], product)
        elif isinstance(layer[1], nn.MultiheadAttention) and _is_of_heads(product):
            self._add(layer[0], product.macs, self._remaining(product))
        elif self._masked and (kind := kind_of(layer[1])) is not None and kind.by_call:
            self._note_computed(*layer, product.other)

    def made(self, args: tuple[Any, ...], result: Tensor) -> None:
        """Note a tensor that is made from a whole weight, or from such a tensor."""
        for given in args if result.numel() in self._sizes and not result.is_meta else ():
            if isinstance(given, Tensor) and given.layout is torch.strided and given.numel() == result.numel():
                name, weight = self._weight_of(given)
                if name and (weight is None or weight.numel() == result.numel()):
                    self._copies[result] = name

    def _weight_of(self, factor: Tensor) -> tuple[str, Tensor | None]:
        """Return the name of the weight that a factor is made from, "" for others, and the weight if it is a view."""
        place = factor.untyped_storage().data_ptr()
        for name in self._masks:
            path, _, leaf = name.rpartition(".")
            tensor = getattr(self.modules.get(path), leaf, None)
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() == place:
                return name, tensor
        return self._weights.get(place) or (self._copies.get(factor, ""), None)

    def _add_product(self, path: str, product: Product) -> None:
        """Count a product in a module that is no layer."""
        is_of_weight = False
        for factor in product[:2]:
            name, weight = ("", None) if factor.is_meta else self._weight_of(factor)
            if name:
                is_of_weight, times = True, product.macs // max(1, factor.numel())
                rows = slice(None) if weight is None else _rows(factor, weight)
                self.uses.setdefault(name, []).append(Use(name, times, rows))
        self.activations[path] = self.activations.get(path, 0) + (0 if is_of_weight else product.macs)
        self._add(path, product.macs, self._remaining(product))

    def _note_computed(self, path: str, layer: nn.Module, factor: Tensor) -> None:
        """Note a factor that is no view of its layer's weight, and keeps more entries than the weight's mask."""
        weight, mask = getattr(layer, "weight", None), self._masks.get(joined(path, "weight"))
        if mask is None or not isinstance(weight, Tensor) or factor.is_meta or factor.numel() != mask.numel():
            return
        is_view = factor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        if not is_view and (nonzero := int(factor.count_nonzero())) > int(mask.count_nonzero()):
            self.computed[path] = nonzero

    def _add(self, path: str, total: int, remaining: int) -> None:
        earlier = self.layers.get(path, LayerMacs(0, 0))
        self.layers[path] = LayerMacs(earlier.total + total, earlier.remaining + remaining)

    def _remaining(self, product: Product) -> int:
        """Return the multiply-accumulates of a product that belong to unmasked weights, or to heads that are not 0."""
        one, other, total, is_batched = product
        if not self._masked or one.is_meta:
            return total
        for factor in (one, other):
            if (kept := self._kept(factor)) is not None:
                return total // max(1, factor.numel()) * kept
        if not is_batched:
            return total if one.any() and other.any() else 0
        alive = one.any(-1).any(-1) & other.any(-1).any(-1)
        return total // max(1, len(one)) * int(alive.sum())

    def _kept(self, factor: Tensor) -> int | None:
        """Count the entries that pruning leaves in a view, copy or function of a masked weight; None for other factors.

        The nonzero entries of a function of the weight count, if the mask keeps fewer.
        """
        name, weight = self._weight_of(factor)
        mask = self._masks.get(name)
        if mask is None:
            return None
        if weight is not None:
            laid_out = torch.empty_strided(weight.shape, weight.stride(), dtype=torch.bool).copy_(mask)
            start = factor.storage_offset() - weight.storage_offset()
            return int(laid_out.as_strided(factor.shape, factor.stride(), start).count_nonzero())
        nonzero, kept = int(factor.count_nonzero()), int(mask.count_nonzero())
        self.computed |= {name: nonzero} if nonzero > kept else {}
        return max(nonzero, kept)


def _rows(view: Tensor, whole: Tensor) -> slice:
    """Return the rows of a weight that a view is of; all of them for other views."""
    row, reach = whole[:1].numel(), sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    start = view.storage_offset() - whole.storage_offset()
    if not row or not whole.is_contiguous() or reach != view.numel() - 1 or start % row or view.numel() % row:
        return slice(None)
    return slice(start // row, (start + view.numel()) // row)


def _is_of_heads(product: Product) -> bool:
    """Return whether both factors are activations: a weight has no batch dimension, or is expanded over it."""
    return all(factor.ndim == 3 and factor.stride(0) > 0 for factor in product[:2])


@dataclass(frozen=True)
class WeightMacs:
    """Multiply-accumulates of one forward pass, and how often each entry of each weight is applied in it.

    Args:
        total: multiply-accumulates of the dense network.
        uses: first name of a parameter -> its uses, in all modules that share it.
        first_names: further name of a shared parameter -> its first name.
    """

    total: int
    uses: Mapping[str, tuple[Use, ...]]
    first_names: Mapping[str, str] = field(default_factory=dict)

    def remaining(self, masks: Mapping[str, Tensor]) -> Tensor:
        """Return the multiply-accumulates of unmasked weights, as a float64 tensor on the device of the masks.

            remaining = total - sum over masked entries of (applications of the entry)

        Products of two activations remain, even where pruning made one factor all 0.

        Args:
            masks: name -> bool tensor, True where an entry is kept; a shared parameter under any of its names.
        """
        found = torch.tensor(float(self.total), dtype=torch.float64)
        first = {self.first_names.get(name, name): mask for name, mask in masks.items()}
        for name, mask in first.items():
            for use in self.uses.get(name, ()):
                part = mask[use.rows]
                kept = torch.count_nonzero(part).double()
                lost = part.numel() - kept if use.experts == 1 else part.numel() / use.experts - kept / use.alive(first)
                found = found.to(mask.device) - use.times * lost
        return found


def weight_macs(model: nn.Module, example: Any) -> WeightMacs:
    """Count the multiply-accumulates of `model(example)` by weight; see `macs`.

    Args:
        model: any module; it runs once, and is not changed.
        example: input of the model, as for `macs`.
    """
    counter = counted(model, example, MaskSet({}))
    names = first_names(dict(unwrapped(model).named_parameters(remove_duplicate=False)))
    uses: dict[str, list[Use]] = {}
    for name, own in counter.uses.items():
        uses.setdefault(names.get(name, name), []).extend(own)
    total = sum(layer.total for layer in counter.layers.values())
    shared = {name: own for name, own in names.items() if name != own}
    return WeightMacs(total, {name: tuple(own) for name, own in uses.items()}, shared)
