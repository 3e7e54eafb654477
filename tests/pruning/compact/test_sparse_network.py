"""`pruning.to_sparse` computes what the dense network computes, on any kernel, in any use of the network."""

from __future__ import annotations

import copy
import io
import pickle
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampling import sampled
from sparse_networks import case
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import pruning
from pruning.catalogue.kernels import DENSE
from pruning.compact import sparse_graph, sparse_network
from pruning.compact.sparse_network import Sparse
from pruning.kernels.sparse_layer import KernelChoice, SparseLayer, _candidates
from pruning.kernels.sparse_weight import LayerShape, SparseWeight

NETWORKS, FEW = 100, 6
"""Random networks in the slow suite, and by default."""
BATCHES = (1, 2, 7, 33, 70)


@pytest.fixture(autouse=True)
def _drawn_kernels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Draw a sparse kernel for each layer instead of measuring, so that a test runs on all of them."""
    if "measured" in request.node.name:
        return
    draw = random.Random(request.node.name)

    def drawn(weight: SparseWeight, layer: LayerShape, bias: Tensor, x: Tensor, added: Tensor | None) -> KernelChoice:
        found = [(name, setting) for name, setting, _ in _candidates(weight, layer, bias, x) if name != DENSE]
        name, setting = draw.choice(found) if found else (DENSE, {})
        return KernelChoice(layer.examples(x.shape), name, dict(setting), 1.0, 1.0)

    monkeypatch.setattr(sparse_graph, "chosen", drawn)
    monkeypatch.setattr(sparse_graph, "LEAST_SPARSITY", 0.0)
    monkeypatch.setattr(sparse_network, "NOISE", 0.0)
    monkeypatch.setattr(sparse_network, "TURNS", 1)
    monkeypatch.setattr(sparse_network, "TURN", 0.0)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def outputs(model: nn.Module, given: Any) -> list[Tensor]:
    args, kwargs = (
        ((given,), {}) if isinstance(given, Tensor) else (given, {}) if isinstance(given, tuple) else ((), given)
    )
    with torch.no_grad():
        return tree_leaves(model(*args, **kwargs))


def wide(given: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, given
    )


def agree(sparse: nn.Module, model: nn.Module, given: Any, bound: float = 1e-4) -> None:
    """Hold the outputs to those of the dense network in float64."""
    targets = outputs(copy.deepcopy(model).double(), wide(given))
    found = outputs(sparse, given)
    assert len(found) == len(targets)
    for one, other in zip(found, targets, strict=True):
        assert one.shape == other.shape
        scale = other.abs().max().clamp_min(1e-30) if other.numel() else 1
        assert not other.numel() or float((one - other).abs().max() / scale) <= bound


def report_of(model: nn.Module) -> Sparse:
    found = model.sparse
    assert isinstance(found, Sparse)
    assert found.reason == ""
    return found


def layers(model: nn.Module) -> list[SparseLayer]:
    return [module for module in model.modules() if isinstance(module, SparseLayer)]


def laid_out(given: Any, kind: str) -> Any:
    """Return inputs of equal values in another layout."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim < 2:
            return leaf
        if kind == "channels_last" and leaf.ndim == 4:
            return leaf.to(memory_format=torch.channels_last)
        if kind == "strided":
            return torch.stack([leaf, leaf], -1)[..., 0]
        return leaf.transpose(0, 1).contiguous().transpose(0, 1)

    return tree_map(change, given)


def hold(number: int) -> set[str]:
    """Hold a random network to its laws; return the kernels that it used."""
    model, inputs = case(number)
    before = copy.deepcopy(model.state_dict())
    draw = random.Random(number)
    batch = draw.choice(BATCHES)
    sparse = pruning.to_sparse(model, inputs(batch), examples=[inputs(draw.choice(BATCHES)) for _ in range(2)])
    report = report_of(sparse)
    assert report.error < 1e-5
    for size in (batch, *BATCHES):
        given = inputs(size)
        agree(sparse, model, given)
        for kind in ("channels_last", "strided", "transposed"):
            agree(sparse, model, laid_out(given, kind))
    if all(choice.kernel != DENSE for layer in report.layers for choice in layer.choices) and number % 5 in (1, 3):
        found = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(outputs(sparse, given))
        assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return {choice.kernel for layer in report.layers for choice in layer.choices}


def test_random_networks_compute_what_dense_ones_do() -> None:
    assert {"rows", "columns", "pixels"} <= set().union(*(hold(number) for number in range(FEW)))


@pytest.mark.slow
@pytest.mark.many
@pytest.mark.parametrize("part", range(5))
def test_many_random_networks_compute_what_dense_ones_do(part: int) -> None:
    for number in range(FEW + part, FEW + NETWORKS, 5):
        hold(number)


class Shortcut(nn.Module):
    """Convolutions, a shortcut, a normalisation that stays, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.two, self.rows = nn.Conv2d(16, 16, 3, padding=1), nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.one(x)))
        x = F.relu(self.two(x) + x)
        found: Tensor = self.head(self.rows(x.mean((2, 3))))
        return found


def small(batch: int = 3) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Shortcut().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter[torch.rand_like(parameter) < 0.8] = 0
    x = torch.randn(batch, 3, 9, 7)
    return model, pruning.to_sparse(model, x), x


def test_measured_kernels_keep_the_outputs_and_the_report_is_a_table() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(9216, 10)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter[torch.rand_like(parameter) < 0.95] = 0
    examples = [torch.randn(batch, 8, 14, 14) for batch in (1, 4)]
    sparse = pruning.to_sparse(model, examples[1], examples=examples)
    for x in (*examples, torch.randn(70, 8, 14, 14)):
        agree(sparse, model, x)
    report, lines = sparse.sparse, sparse.report().splitlines()  # type: ignore[operator]
    assert isinstance(report, Sparse)
    assert lines[0].split() == ["layer", "sparsity", "rows", "kernel", "speed-up"]
    assert [(layer.name, [each.examples for each in layer.choices]) for layer in report.layers] == [
        ("0", [1, 4]),
        ("2", [1, 4]),
        ("4", [1, 4]),
    ]
    assert len(lines) == 1 + 6 + 1 + bool(report.reason)
    assert lines[7].startswith("whole network: ")
    assert set(report.speedups) == {1, 4}
    assert all(layer.sparsity == pytest.approx(0.95, abs=0.02) for layer in report.layers)


def test_an_addition_a_normalisation_and_a_clamp_are_computed_with_their_layer() -> None:
    model, sparse, x = small()
    called = [node for node in sparse.graph.nodes if node.op.startswith("call")]  # type: ignore[union-attr]
    assert [node.op == "call_module" for node in called] == [True, False, True]
    assert sparse.sparse_sequence_0.wiring.reads == ((0,), (1, 1))  # type: ignore[union-attr]
    agree(sparse, model, x, 1e-5)


def test_copies_and_files_are_the_same_network() -> None:
    model, sparse, x = small()
    saved = io.BytesIO()
    torch.save(sparse, saved)
    saved.seek(0)
    target = outputs(sparse, x)[0]
    copies = [copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse)), torch.load(saved, weights_only=False)]
    for each in [*copies, copy.deepcopy(copies[2]), pickle.loads(pickle.dumps(copies[0]))]:
        assert torch.equal(outputs(each, x)[0], target)
        assert each.report() == sparse.report()  # type: ignore[operator]
        assert each.sparse == sparse.sparse
        assert not each.training
    state = {name: value * 2 if "norm" in name else value for name, value in sparse.state_dict().items()}
    copies[0].load_state_dict(state)
    assert torch.equal(outputs(copies[0], x)[0], target)
    assert torch.equal(outputs(sparse, x)[0], target)
    agree(sparse, model, x)


@sampled(2)
@pytest.mark.parametrize("convert", ["double", "half", "meta", "to_empty"])
def test_a_refused_conversion_leaves_the_whole_network_unharmed(convert: str) -> None:
    _, sparse, x = small()
    target, calls = (
        outputs(sparse, x)[0],
        {"meta": lambda m: m.to("meta"), "to_empty": lambda m: m.to_empty(device="cpu")},
    )
    for each in (sparse, copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        with pytest.raises(ValueError, match=r"a sparse layer .*(must stay float32 on the CPU|positions)"):
            calls.get(convert, lambda m: getattr(m, convert)())(each)
        assert torch.equal(outputs(each, x)[0], target)
    for harmless in (sparse.float, sparse.cpu, sparse.share_memory, sparse.eval, sparse.zero_grad):
        harmless()
        assert torch.equal(outputs(sparse, x)[0], target)


def test_no_mode_of_gradients_is_needed_and_none_is_computed() -> None:
    _, sparse, x = small()
    target = outputs(sparse, x)[0]
    assert torch.equal(sparse(x), target)
    assert not sparse(x).requires_grad
    with torch.inference_mode():
        assert torch.equal(sparse(x), target)
    with pytest.raises(RuntimeError, match=r"run it under torch\.no_grad"):
        sparse(x.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(sparse(x.clone().requires_grad_()), target)


def test_unfit_inputs_are_refused_and_an_empty_batch_is_not() -> None:
    model, sparse, x = small()
    agree(sparse, model, x[:0])
    for bad in (x[:, :2], torch.ones(3, 4, 9, 7), x[0], x[None], x[..., 0], x[:, :, :0]):
        with pytest.raises((ValueError, RuntimeError), match=r"`x` \(of shape .*must be of shape \(any, 3, 9, 7\)"):
            outputs(sparse, bad)
    with pytest.raises(ValueError, match="must be float32 as in the example"):
        outputs(sparse, x.double())
    agree(sparse, model, x)


@pytest.mark.parametrize("dynamic", [pytest.param(True, marks=pytest.mark.slow), None])
def test_torch_compile_sees_one_graph(dynamic: bool | None) -> None:
    model, sparse, _ = small()
    torch._dynamo.reset()
    compiled = torch.compile(sparse, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (2, 7, 1, 33):
        agree(compiled, model, torch.randn(batch, 3, 9, 7))  # type: ignore[arg-type]
    torch._dynamo.reset()


def test_torch_export_keeps_any_batch() -> None:
    model, sparse, x = small()
    batch = torch.export.Dim("batch", max=1000)
    program = torch.export.export(sparse, (x,), dynamic_shapes=({0: batch},))
    for size in (2, 7, 70):
        agree(program.module(), model, torch.randn(size, 3, 9, 7))


def test_threads_may_use_one_network() -> None:
    model, sparse, x = small()
    target, found, start = outputs(sparse, x)[0], list[bool](), threading.Barrier(8)

    def call(number: int) -> None:
        start.wait()
        for _ in range(10):
            found.append(torch.equal(outputs(sparse, torch.cat([x] * (1 + number % 3)))[0][:3], target))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80
    agree(sparse, model, x)


class Written(nn.Module):
    """Writes to tensors that its convolution reads, or adds to."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.conv, self.kind, self.norm = nn.Conv2d(3, 3, 3, padding=1), kind, nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Any:
        more = x * 2
        if self.kind == 0:  # the input changes between the convolution and its ReLU
            found = self.conv(more)
            more.add_(1)
            return F.relu(found) + more
        if self.kind == 1:  # the addition writes to its other operand
            other = more
            other += self.conv(x)
            return more * 3, F.relu(more)
        if self.kind == 2:  # the ReLU writes to the output itself
            found = self.conv(more)
            F.relu_(found)
            return found
        view = more.view(-1)
        more += self.norm(self.conv(x))
        return F.relu(more), view.sum()


@sampled(2)
@pytest.mark.parametrize("kind", range(4))
def test_operations_that_write_to_their_inputs_keep_their_order(kind: int) -> None:
    torch.manual_seed(0)
    model = Written(kind).eval()
    sparse = pruning.to_sparse(model, torch.randn(2, 3, 5, 5))
    report_of(sparse)
    agree(sparse, model, torch.randn(7, 3, 5, 5))


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, end: int) -> Tensor:
        return torch.cat([x[:, :end], self.linear(x)], 1)[: x.shape[0]]


@sampled(2)
@pytest.mark.parametrize("end", [0, 3, 2**63 - 1])
def test_slices_keep_their_ends(end: int) -> None:
    torch.manual_seed(0)
    model, inputs = Sliced().eval(), (torch.randn(3, 8), end)
    sparse = pruning.to_sparse(model, inputs)
    report_of(sparse)
    for batch in (3, 9):
        agree(sparse, model, (torch.randn(batch, 8), end))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: list[Tensor], y: dict[str, Tensor], z: float = 2.0) -> dict[str, Any]:
        return {"sum": self.linear(x[0]) * z - y["b"], "parts": (y["a"].relu(), [self.linear(y["b"])])}


def test_inputs_and_outputs_may_be_nested_and_named_in_any_order() -> None:
    model = Nested().eval()

    def made(batch: int, *, turned: bool = False) -> dict[str, Any]:
        found = {"x": [torch.randn(batch, 8)], "y": {"a": torch.randn(batch, 2), "b": torch.randn(batch, 8)}}
        return dict(reversed(found.items())) if turned else found

    sparse = pruning.to_sparse(model, made(3), examples=[made(5, turned=True), made(1)])
    report_of(sparse)
    for batch in (3, 1, 33):
        agree(sparse, model, made(batch, turned=batch == 33))
    found = sparse(**made(3))
    assert list(found) == ["sum", "parts"]
    assert isinstance(found["parts"], tuple)


class Told(nn.Module):
    """A network whose outputs depend on a value, on the batch size, and on sizes of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, factor: int = 1) -> Tensor:
        self.calls.add_(1)
        x.mul_(1.0)
        found: Tensor = self.linear(x) * factor / x.shape[1]
        return found * 2 if x.shape[0] <= 3 else found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")  # torch's own, on unpickling a traced graph
def test_a_call_that_the_trace_does_not_cover_is_refused() -> None:
    model, x = Told().eval(), torch.randn(2, 5, 16)
    sparse = pruning.to_sparse(model, (x, 2))

    assert float(sparse.calls) == 0.0  # type: ignore[arg-type]
    assert float(model.calls) == 0.0  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.allclose(sparse(x, 2), model(x, 2), atol=1e-5)
        for copied in (sparse, copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
            with pytest.raises(ValueError, match=r"`factor` \(=3\) must be 2 as in the example"):
                copied(x, 3)
            assert torch.allclose(copied(x[:, :4], 2), model(x[:, :4], 2), atol=1e-5)
            with pytest.raises(ValueError, match=r"inputs of shapes \(4, 5, 16\) must fulfil x.shape\[0\] <= 3"):
                copied(torch.randn(4, 5, 16), 2)


@pytest.mark.slow
def test_an_example_stays_and_wrong_ones_are_refused_in_a_sentence() -> None:
    model, x = Told().eval(), torch.randn(2, 5, 16)
    before = x.clone()
    pruning.to_sparse(model, x)

    assert torch.equal(x, before)
    for example, said in (
        (torch.zeros(2, 5), "RuntimeError"),
        (x.double(), "Double"),
    ):
        with pytest.raises(ValueError, match=f"`example` .* must be an input of Told .*{said}"):
            pruning.to_sparse(model, example)
        with pytest.raises(ValueError, match=r"`examples` "):
            pruning.to_sparse(model, x, examples=[x, example])
    with pytest.raises(ValueError, match=r"`example` \(of shape \(0, 5, 16\)\) must hold numbers; pass one row"):
        pruning.to_sparse(model, torch.zeros(0, 5, 16))
    with pytest.raises(ValueError, match=r"`examples\[0\]` \(of shape \(0, 5, 16\)\) must hold numbers"):
        pruning.to_sparse(model, x, examples=[torch.zeros(0, 5, 16)])
    with pytest.raises(TypeError, match="must be a list of inputs"):
        pruning.to_sparse(model, x, examples=x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`int8` \(='yes'\) must be True or False"):
        pruning.to_sparse(model, x, int8="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is sparse already"):
        pruning.to_sparse(pruning.to_sparse(model, x), x)


@pytest.mark.slow
def test_autocast_does_not_reach_the_choice_of_kernels_and_functorch_takes_the_operator() -> None:
    model, sparse, x = small()
    with torch.no_grad():
        assert torch.equal(torch.func.functionalize(sparse)(x), sparse(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = pruning.to_sparse(model, x)
    agree(again, model, x)


def test_names_that_are_taken_or_no_identifiers_are_replaced() -> None:
    model = nn.ModuleDict({"a-b": nn.Linear(8, 8), "sparse_a_b": nn.LayerNorm(8), "a_b": nn.Linear(8, 8)})
    model.register_parameter("sparse_a_b_2", nn.Parameter(torch.ones(8)))

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model
            self.register_parameter("sparse_parts_a_b", nn.Parameter(torch.ones(8)))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.parts["a_b"](self.parts["sparse_a_b"](self.parts["a-b"](x))) * self.sparse_parts_a_b
            return found

    network = Named().eval()
    agree(pruning.to_sparse(network, torch.randn(3, 8)), network, torch.randn(5, 8))


class Several(nn.Module):
    """A network that takes any number of inputs, and one by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, *inputs: Tensor, other: Tensor | None = None) -> Tensor:
        found: Tensor = self.linear(inputs[0]) + inputs[1]
        return found if other is None else found + other


def test_any_number_of_inputs_keeps_the_batch_free() -> None:
    model, x, y = Several().eval(), torch.randn(2, 16), torch.randn(7, 16)
    sparse = pruning.to_sparse(model, (x, x))
    with torch.no_grad():
        assert torch.allclose(sparse(y, -y), model(y, -y), atol=1e-5)
