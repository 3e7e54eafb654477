"""`to_sparse` joins layers to sequences of one call that have their outputs, and files say what they read."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_sparse_files import changed
from torch import Tensor, nn

import pruning
from pruning.catalogue.kernels import DENSE
from pruning.compact import layer_sequences, sparse_graph, sparse_network
from pruning.compact.sparse_files import LAYERS, layers_of, load_layers, save_layers, steps_of, tensors_of
from pruning.compact.sparse_network import SparseNetwork
from pruning.kernels.sparse_layer import KernelChoice, _candidates
from pruning.kernels.sparse_sequence import SparseSequence
from pruning.kernels.sparse_weight import LayerShape, SparseWeight

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _kernels_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw a sparse kernel for each layer, whatever the machine's timer says."""
    draw = random.Random(0)

    def drawn(weight: SparseWeight, layer: LayerShape, bias: Tensor, x: Tensor, added: Tensor | None) -> KernelChoice:
        offers = [(name, dict(given)) for name, given, _ in _candidates(weight, layer, bias, x) if name != DENSE]
        return KernelChoice(layer.examples(x.shape), *draw.choice(offers), 1.0, 1.0)

    monkeypatch.setattr(sparse_graph, "chosen", drawn)
    monkeypatch.setattr(sparse_network, "NOISE", 0.0)
    monkeypatch.setattr(sparse_network, "TURNS", 1)


class Attention(nn.Module):
    """Attention, and a residual block of two linear layers with a dropout, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.5)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(y))
        found: Tensor = self.norm(x + self.drop(self.down(self.up(x).relu())))
        return found


def test_attention_between_dense_layers_is_a_call_of_its_own() -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        for layer in (model.up, model.down):
            layer.weight[torch.rand_like(layer.weight) < 0.8] = 0
    sparse = sparse_of(model, x)

    assert next(iter(sequences_of(sparse).values())) == ["sparse_attention_0"], "PyTorch is faster than a step outside"
    for given in (x, torch.randn(3, 7, 16)):
        with torch.no_grad():
            assert torch.allclose(sparse(given), model(given), atol=1e-5)


class Masked(Attention):
    """Attention with a mask, or to earlier places alone, and a block with another activation."""

    def __init__(self, *, causal: bool, activation: nn.Module) -> None:
        super().__init__()
        self.causal, self.activation = causal, activation

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mask = None if self.causal else x[:, None, None, :, 0] > -1
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        found: Tensor = self.norm(x + self.down(self.activation(self.up(x))))
        return found


class Towers(nn.Module):
    """Convolutions in two towers that are added and returned, and a number of calls that may be counted."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.stem, self.left, self.right = (nn.Conv2d(*size, 3, padding=1) for size in ((3, 8), (8, 8), (8, 8)))
        self.last, self.counts = nn.Conv2d(8, 8, 3, padding=1), counts
        self.inner = nn.Module()
        self.inner.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        calls = self.inner.get_buffer("calls")
        if self.counts:
            calls += 1
        stem = self.stem(x).relu()
        left = self.left(stem).relu()
        right = (self.right(stem) + left).relu()
        return self.last(right), right.sigmoid() + calls


def pruned(model: nn.Module) -> nn.Module:
    pruning.prune(model.eval(), "l1_unstructured", sparsity=0.7)
    pruning.remove_all(model)
    return model


def sparse_of(model: nn.Module, x: Tensor, **more: Any) -> SparseNetwork:
    found = pruning.to_sparse(model, x, **more)
    assert isinstance(found, SparseNetwork), found.report()  # type: ignore[operator]
    return found


def sequences_of(network: nn.Module) -> dict[str, list[str]]:
    return {name: list(each._modules) for name, each in network.named_children() if isinstance(each, SparseSequence)}


def built(kind: type[nn.Module], **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return pruned(kind(**more))


def test_a_block_of_a_transformer_is_one_call() -> None:
    model, x = built(Attention), torch.randn(2, 5, 16)
    sparse = sparse_of(model, x)

    first, *middle, last = sequences_of(sparse)["sparse_sequence_0"]
    assert (first, last.startswith("sparse_norm_")) == ("sparse_norm", True), "one normalisation, applied twice"
    layers = ["query", "key", "value", "attention_0", "out", "up", "down"]
    assert middle == [f"sparse_{each}" for each in layers]
    assert len([node for node in sparse.graph.nodes if node.op.startswith("call")]) == 1, "dropouts and additions, too"
    for given in (x, torch.randn(3, 7, 16)):
        with torch.no_grad():
            assert torch.allclose(sparse(given), model(given), atol=1e-5)


ACTIVATIONS = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "silu in place": nn.SiLU(inplace=True),
}


@pytest.mark.parametrize(("activation", "causal"), list(zip(ACTIVATIONS, (False, True, False, True), strict=True)))
def test_attention_with_a_mask_stays_that_of_pytorch(activation: str, causal: bool) -> None:
    model, x = built(Masked, causal=causal, activation=ACTIVATIONS[activation]), torch.randn(2, 5, 16)
    sparse = sparse_of(model, x)

    last = sequences_of(sparse)["sparse_sequence_1"]
    norms = [] if "place" in activation else ["sparse_norm"]  # what a graph writes might be a normalisation's weight
    assert last == ["sparse_out", "sparse_up", "sparse_activation", "sparse_down", *norms]
    assert "scaled_dot_product_attention" in sparse.code
    for given in (x, torch.randn(3, 7, 16)):
        with torch.no_grad():
            assert torch.allclose(sparse(given), model(given), atol=1e-5)


class Odd(nn.Module):
    """Operations that look like those of a sequence, and are others."""

    def __init__(self, *, case: str) -> None:
        super().__init__()
        self.case, self.one, self.two = case, nn.Linear(16, 16), nn.Linear(16, 16)
        self.plain, self.wide = nn.LayerNorm(16, elementwise_affine=False), nn.LayerNorm((5, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        if self.case == "read again":
            z = F.silu(y.clone(), inplace=True) + F.silu(y, inplace=True) * y
        elif self.case == "without weights":
            z = self.plain(y)
        elif self.case == "of two dimensions":
            z = self.wide(y)
        else:
            q = y.unflatten(-1, (2, 8)).transpose(1, 2)
            heads = {
                "heads joined in another order": lambda: (
                    F.scaled_dot_product_attention(q, q, q).flatten(1, 2).flatten(1)
                ),
                "not swapped": lambda: F.scaled_dot_product_attention(*[y.unflatten(-1, (2, 8))] * 3).flatten(2),
                "of values of another width": lambda: (
                    F.scaled_dot_product_attention(q, q, y[..., :8].unflatten(-1, (2, 4)).transpose(1, 2))
                    .transpose(1, 2)
                    .flatten(2)
                    .repeat(1, 1, 2)
                ),
                "of shared keys": lambda: (
                    F.scaled_dot_product_attention(
                        q, *[y[..., :8].unflatten(-1, (1, 8)).transpose(1, 2)] * 2, enable_gqa=True
                    )
                    .transpose(1, 2)
                    .flatten(2)
                ),
                "read twice": lambda: F.scaled_dot_product_attention(q, q, q),
            }[self.case]()
            if self.case == "read twice":
                heads = heads.transpose(1, 2).flatten(2) + heads.sum()
            z = heads.reshape(x.shape)
        found: Tensor = self.two(z)
        return found


CASES = [
    "read again",
    "without weights",
    "of two dimensions",
    "heads joined in another order",
    "not swapped",
    "of values of another width",
    "of shared keys",
    "read twice",
]


@pytest.mark.parametrize("case", CASES)
def test_operations_that_look_alike_compute_what_they_did(case: str) -> None:
    model, x = built(Odd, case=case), torch.randn(2, 5, 16)
    sparse = sparse_of(model, x)
    with torch.no_grad():
        assert torch.allclose(sparse(x), model(x), atol=1e-5)


class Written(nn.Module):
    """A normalisation whose weight the forward writes, and attention whose heads are turned when sizes are equal."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.one, self.two, self.turned = nn.Linear(16, 16), nn.Linear(16, 16), turned
        self.register_buffer("weight", torch.ones(16))
        self.register_buffer("bias", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        if self.turned:
            q = y.unflatten(-1, (2, 8)).transpose(1, 2)
            found: Tensor = self.two(F.scaled_dot_product_attention(q, q, q).mT.transpose(1, 2).flatten(2))
            return found
        found = self.two(F.layer_norm(y, (16,), self.get_buffer("weight"), self.get_buffer("bias")))
        self.get_buffer("weight").add_((x.amax() > 10).float())
        return found


@pytest.mark.parametrize(("turned", "scales"), [(True, [1]), (False, [1, 20, 1, 1])])
def test_what_a_graph_writes_or_turns_is_left_to_pytorch(turned: bool, scales: list[float]) -> None:
    model = built(Written, turned=turned)
    x = torch.randn(2, 8, 16) if turned else torch.randn(2, 16)
    sparse = sparse_of(model, x)
    with torch.no_grad():
        for scale in scales:
            assert torch.allclose(sparse(scale * x), model(scale * x), atol=1e-4)


class Scaled(nn.Module):
    """Attention with a scale of its own, or that depends on the length."""

    def __init__(self, *, scale: float | None) -> None:
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(16, 16), nn.Linear(16, 16), scale

    def forward(self, x: Tensor) -> Tensor:
        q = self.one(x).unflatten(-1, (2, 8)).transpose(1, 2)
        scale = x.shape[1] ** -0.5 if self.scale is None else self.scale
        found: Tensor = self.two(F.scaled_dot_product_attention(q, q, q, scale=scale).transpose(1, 2).flatten(2))
        return found


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e31, None])
def test_scales_of_attention_are_saved(scale: float | None, tmp_path: Path) -> None:
    model, x = built(Scaled, scale=scale), torch.randn(2, 5, 16)
    sparse = sparse_of(model, x)
    save_layers(sparse, tmp_path)
    with torch.no_grad():
        assert scale == 1e31 or torch.allclose(sparse(x), model(x), atol=1e-5)
        assert torch.equal(loaded(tmp_path, sparse)(x), sparse(x))


def test_two_towers_return_two_outputs_of_one_call() -> None:
    model, x = built(Towers), torch.randn(2, 3, 6, 6)
    sparse = sparse_of(model, x)

    assert list(sequences_of(sparse).values()) == [["sparse_stem", "sparse_left", "sparse_right", "sparse_last"]]
    for given in (x, torch.randn(5, 3, 6, 6)):
        with torch.no_grad():
            for found, target in zip(sparse(given), model(given), strict=True):
                assert torch.allclose(found, target, atol=1e-5)


class Branches(nn.Module):
    """Layers that read one input, or each another one."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.layers, self.apart = nn.ModuleList(nn.Linear(16, 16) for _ in range(7)), apart

    def forward(self, x: Tensor) -> Tensor:
        found = [layer(x * float(place + 1) if self.apart else x).sin() for place, layer in enumerate(self.layers)]
        return torch.stack(found).sum(0)


@pytest.mark.parametrize(("apart", "lengths"), [(True, []), (False, [4, 3])])
def test_branches_keep_few_tensors_alive(apart: bool, lengths: list[int]) -> None:
    model, x = built(Branches, apart=apart), torch.randn(3, 16)
    sparse = sparse_of(model, x)

    assert [len(each) for each in sequences_of(sparse).values()] == lengths
    with torch.no_grad():
        assert torch.allclose(sparse(x), model(x), atol=1e-5)


def test_long_chains_are_several_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_sequences, "MOST_LAYERS", 3)
    torch.manual_seed(0)
    model, x = pruned(nn.Sequential(*(nn.Linear(16, 16) for _ in range(7)))), torch.randn(3, 16)
    sparse = sparse_of(model, x)

    assert [len(each) for each in sequences_of(sparse).values()] == [3, 3]
    with torch.no_grad():
        assert torch.allclose(sparse(x), model(x), atol=1e-5)


def test_a_network_that_writes_keeps_its_order() -> None:
    model, x = built(Towers, counts=True), torch.randn(2, 3, 6, 6)
    sparse = sparse_of(model, x)
    with torch.no_grad():
        first, again = sparse(x)[1], sparse(x)[1]

    assert torch.allclose(again - first, torch.ones(()))
    assert torch.allclose(first, model(x)[1], atol=1e-5)


def test_linear_layers_add_floats_where_neighbours_are_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    first, second = (pruned(nn.Linear(16, 16)) for _ in range(2))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            found: Tensor = (self.second(y) + y).relu()
            return found

    def rounds(weight: SparseWeight, layer: LayerShape, bias: Tensor, x: Tensor, added: Tensor | None) -> KernelChoice:
        offers = [(name, dict(given)) for name, given, _ in _candidates(weight, layer, bias, x) if "int8" in name]
        return KernelChoice(layer.examples(x.shape), *offers[0], 1.0, 1.0)

    monkeypatch.setattr(sparse_graph, "chosen", rounds)
    model = Residual()
    sparse = sparse_of(model, x, int8=True)
    with torch.no_grad():
        off = (sparse(x) - model(x)).abs().max() / model(x).abs().max()
    assert 0 < off < 0.02


@cache
def block() -> tuple[SparseNetwork, Tensor]:
    """Return a sparse block of a transformer, made once, and an input."""
    model, x = built(Attention), torch.randn(2, 5, 16)
    return sparse_of(model, x), x


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, SparseNetwork, Tensor]:
    sparse, x = block()
    save_layers(sparse, tmp_path)
    return tmp_path, sparse, x


def loaded(folder: Path, sparse: SparseNetwork) -> nn.Module:
    shell = nn.Module()
    run = type(sparse).forward.__wrapped__  # type: ignore[attr-defined]  # without the guard of inputs
    shell.forward = lambda x: run(shell, x)  # type: ignore[method-assign]
    return load_layers(folder, shell, [*layers_of(sparse), *steps_of(sparse), *tensors_of(sparse)])


def test_files_hold_sequences(saved: tuple[Path, SparseNetwork, Tensor]) -> None:
    folder, sparse, x = saved
    again = loaded(folder, sparse)

    assert sequences_of(again) == sequences_of(sparse)
    with torch.no_grad():
        assert torch.equal(again(x), sparse(x))
        assert torch.equal(copy.deepcopy(again.get_submodule("sparse_sequence_0"))(x), sparse.sparse_sequence_0(x))


def test_a_sequence_has_all_layers_under_its_name(saved: tuple[Path, SparseNetwork, Tensor]) -> None:
    folder, sparse, _ = saved
    changed(folder, *SEQUENCE, "layers", to=["sparse_norm", "sparse_up"])
    changed(folder, *SEQUENCE, "reads", to=[[0], [1]])
    changed(folder, *SEQUENCE, "returned", to=[2])

    with pytest.raises(ValueError, match="must be the names of all its layers"):
        loaded(folder, sparse)


@pytest.mark.parametrize(("version", "said"), [(3, "tied"), (4, "sequences, tied")])
def test_older_versions_have_fewer_objects(saved: tuple[Path, SparseNetwork, Tensor], version: int, said: str) -> None:
    folder, sparse, _ = saved
    changed(folder, "version", to=version)

    with pytest.raises(
        ValueError, match=f"must have the fields layers, lstms, nonzeros, {said}, version and no others"
    ):
        loaded(folder, sparse)


def test_version_4_says_that_nothing_is_added(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = pruned(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))), torch.randn(3, 16)
    sparse = sparse_of(model, x)
    save_layers(sparse, tmp_path)
    changed(tmp_path, "sequences", "sparse_sequence_0", "reads", to=[[0, None], [1, None], [2, None]])
    content = json.loads((tmp_path / LAYERS).read_text())
    del content["steps"]
    (tmp_path / LAYERS).write_text(json.dumps({**content, "version": 4}))

    assert torch.equal(loaded(tmp_path, sparse)(x), sparse(x))


SEQUENCE, NORM = ("sequences", "sparse_sequence_0"), ("steps", "sparse_sequence_0.sparse_norm")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ((*SEQUENCE, "given"), 0, "`given` of sequence 'sparse_sequence_0' must be a whole number"),
        ((*SEQUENCE, "given"), 3, "must read or return each tensor"),
        ((*SEQUENCE, "reads", 0), [4], "`reads` of sequence 'sparse_sequence_0' must be a whole number from 0"),
        ((*SEQUENCE, "reads", 0), [0, 0], "must hold one or two numbers for each layer, and as many as it has inputs"),
        ((*SEQUENCE, "reads", 4), [2, 3], "must hold one or two numbers for each layer, and as many as it has inputs"),
        ((*SEQUENCE, "reads", 1), [1, 0, 0], "must hold one or two numbers for each layer, and as many as"),
        ((*SEQUENCE, "reads", 1), [], "must hold one or two numbers for each layer, and as many as"),
        ((*SEQUENCE, "reads", 7), [6], "must read or return each tensor"),
        ((*SEQUENCE, "reads"), [], "must be lists of one length"),
        ((*SEQUENCE, "returned"), [0], "`returned` of sequence 'sparse_sequence_0' must be a whole number from 1"),
        ((*SEQUENCE, "returned"), [9, 9], "return none twice"),
        ((*NORM, "operation"), "tan", "`operation` of step 'sparse_sequence_0.sparse_norm' must be one of gelu, "),
        ((*NORM, "operation"), [], "`operation` of step 'sparse_sequence_0.sparse_norm' must be one of gelu, "),
        ((*NORM, "operation"), "gelu", "must be the names of all its layers, each once"),
        (
            (*NORM, "number"),
            1e31,
            "`number` of step 'sparse_sequence_0.sparse_norm' must be a number of at most 1e[+]30",
        ),
        ((*NORM, "heads"), 0, "`heads` of step 'sparse_sequence_0.sparse_norm' must be a whole number from 1"),
        (("steps", "sparse_sequence_0.sparse_attention_0", "operation"), "layer_norm", "weight and bias of step"),
        ((*SEQUENCE, "layers", 1), "sparse_out", "must be the names of all its layers, each once"),
        ((*SEQUENCE, "layers", 1), 7, "must be the names of all its layers, each once"),
        ((*SEQUENCE, "more"), 7, "must have the fields given, layers, reads, returned and no others"),
        (("layers", "sparse_sequence_0.sparse_up", "shape", "added"), {"scale": 1.0, "zero": 0}, "is linear, and must"),
    ],
)
def test_damaged_sequences_are_refused(
    saved: tuple[Path, SparseNetwork, Tensor], path: tuple[Any, ...], value: Any, said: str
) -> None:
    folder, sparse, _ = saved
    changed(folder, *path, to=value)

    with pytest.raises(ValueError, match=said):
        loaded(folder, sparse)
