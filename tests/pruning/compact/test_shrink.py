"""`pruning.shrink`: outputs stay equal, empty channels are removed, and the report gives reasons for kept ones."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from generated_networks import network
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import pruning
from pruning.graph.constant_tensors import Constants
from pruning.graph.label_rules import flow_of
from pruning.graph.tracing import output_difference, traced
from pruning.measure.latency import calling

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "shrink.md").read_text()


def agree(smaller: nn.Module, model: nn.Module, *inputs: Tensor, within: float = 1e-10) -> None:
    with torch.no_grad():
        expected = model(*inputs)
        assert float((smaller(*inputs) - expected).abs().max()) <= within * float(expected.abs().max())


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def zero(*tensors: Tensor) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()


class Small(nn.Module):
    """Convolutions with a residual, then linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 6, 1, bias=False)
        self.hidden, self.out = nn.Linear(6 * 16, 10), nn.Linear(10, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.third(x + self.second(x))
        return self.out(F.relu(self.hidden(x.flatten(1))))


def small() -> Small:
    torch.manual_seed(0)
    return Small().double().eval()


def test_what_masks_have_emptied_goes_through_residuals_norms_and_flatten() -> None:
    model = small()
    zero(model.first.weight[:2], model.second.weight[:2], model.second.bias[:2], model.third.weight[4])

    smaller = pruning.shrink(model, torch.randn(2, 3, 4, 4).double())

    assert isinstance(smaller, Small)
    assert shapes(smaller) == {
        "first.weight": (6, 3, 3, 3), "norm.weight": (6,), "norm.bias": (6,),
        "second.weight": (6, 6, 3, 3), "second.bias": (6,), "third.weight": (5, 6, 1, 1),
        "hidden.weight": (10, 80), "hidden.bias": (10,), "out.weight": (3, 10),
    }  # fmt: skip
    assert (smaller.first.out_channels, smaller.norm.num_features, smaller.hidden.in_features) == (6, 6, 80)
    agree(smaller, model, torch.randn(5, 3, 4, 4).double())
    assert smaller.shrunk.left.keys() == smaller.shrunk.removed.keys()
    for name, left in smaller.shrunk.left.items():
        whole, part = model.state_dict()[name], smaller.state_dict()[name]
        assert torch.equal(whole[left.expand(whole.shape)], part.flatten())
    smaller.train()(torch.randn(2, 3, 4, 4).double()).sum().backward()
    assert smaller.shrunk.removed["norm.running_var"] == ((8,), (6,))
    assert smaller.shrunk.after == sum(p.numel() for p in smaller.parameters())


def test_a_constant_is_folded_where_that_is_exact_and_kept_at_a_padded_border() -> None:
    model = small()
    zero(model.first.weight[0], model.hidden.weight[:4])
    zero(model.second.weight[0], model.second.bias[0])
    with torch.no_grad():
        model.norm.bias[0] = 2.0

    smaller = pruning.shrink(model, torch.randn(2, 3, 4, 4).double())

    assert shapes(smaller)["first.weight"][0] == 8
    assert smaller.shrunk.kept["first.weight"] == {
        "`second` (conv2d) reads a constant that is left of it, with zeros at the border": 1
    }
    assert shapes(smaller)["out.weight"] == (3, 6)
    assert shapes(smaller)["out.bias"] == (3,)  # a new bias
    assert 0 < smaller.shrunk.folded["out.bias"] <= 4
    agree(smaller, model, torch.randn(5, 3, 4, 4).double())


class Twice(nn.Module):
    """A weight without a bias, read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(4, 6)
        self.down = nn.Linear(6, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.left(x))) + self.down(F.relu(self.right(x)))


def test_a_constant_is_folded_into_no_bias_that_would_be_added_twice() -> None:
    torch.manual_seed(0)
    model = Twice().double().eval()
    for layer in (model.left, model.right):
        zero(layer.weight[:2], layer.bias[1])
        layer.bias.data[0] = 1.0

    smaller = pruning.shrink(model, torch.randn(2, 4).double())

    assert (smaller.shrunk.form, smaller.shrunk.folded) == ("module", {})
    assert shapes(smaller)["down.weight"] == (2, 5)
    agree(smaller, model, torch.randn(3, 4).double())


class InPlace(nn.Module):
    """Activations that are read before they are written to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.before, self.after = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        before = self.before(hidden)
        return before + self.after(hidden.relu_())


def test_a_constant_is_what_it_was_before_it_is_written_to() -> None:
    torch.manual_seed(0)
    model = InPlace().double().eval()
    zero(model.up.weight[0])
    model.up.bias.data[0] = -1.0

    smaller = pruning.shrink(model, torch.randn(2, 4).double())

    assert shapes(smaller)["up.weight"] == (5, 4)
    assert smaller.shrunk.folded == {"before.bias": 1}
    agree(smaller, model, torch.randn(3, 4).double())


class Scaled(nn.Module):
    """Channels that a parameter scales, as LayerScale does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(4, 6), nn.Parameter(torch.ones(6)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.up(x) * self.scale)
        return found


def test_what_is_multiplied_by_0_goes() -> None:
    torch.manual_seed(0)
    model = Scaled().double().eval()
    zero(model.scale[:2])

    smaller = pruning.shrink(model, torch.randn(2, 4).double())

    assert (shapes(smaller)["up.weight"], shapes(smaller)["scale"], shapes(smaller)["down.weight"]) == (
        (4, 4),
        (4,),
        (2, 4),
    )
    agree(smaller, model, torch.randn(3, 4).double())


class Products(nn.Module):
    """Attention of one head as two products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.query(x) @ self.key(x).mT, -1) @ self.value(x)


def test_a_feature_goes_from_both_factors_of_a_product_where_one_of_them_is_0() -> None:
    torch.manual_seed(0)
    model = Products().double().eval()
    zero(model.query.weight[0], model.query.bias[0], model.key.weight[1], model.key.bias[1])

    smaller = pruning.shrink(model, torch.randn(2, 5, 6).double())

    assert [len(layer.weight) for layer in (smaller.query, smaller.key, smaller.value)] == [2, 2, 3]
    agree(smaller, model, torch.randn(3, 5, 6).double())


def test_a_held_network_is_left_as_it_is_and_what_is_frozen_stays_frozen() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    model[2].weight.requires_grad_(False)
    pruning.ln_structured(model[0], "weight", 0.5, 2, 0)
    before = copy.deepcopy(model.state_dict())

    smaller = pruning.shrink(model, torch.randn(2, 6))

    assert shapes(smaller) == {"0.weight": (4, 6), "0.bias": (4,), "2.weight": (2, 4), "2.bias": (2,)}
    assert not smaller[2].weight.requires_grad
    assert smaller[0].weight.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert smaller.shrunk.form == "module"
    assert max(smaller.shrunk.error.values()) < 1e-5
    agree(smaller, model, torch.randn(7, 6), within=1e-5)


class Block(nn.Module):
    """Attention and an MLP, as in vision transformers."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.attn_dim = width
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        parts = self.qkv(self.norm(x)).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, self.attn_dim)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(x)))


def test_heads_go_and_the_module_is_told() -> None:
    torch.manual_seed(0)
    model = Block().double().eval()
    zero(model.proj.weight[:, 4:8], model.up.weight[:6], model.up.bias[:6], model.down.weight[3])

    smaller = pruning.shrink(model, torch.randn(2, 5, 12).double())

    assert isinstance(smaller, Block)
    assert (smaller.num_heads, smaller.head_dim, smaller.attn_dim) == (2, 4, 8)
    assert shapes(smaller)["qkv.weight"] == (24, 12)
    assert shapes(smaller)["proj.weight"] == (12, 8)
    assert shapes(smaller)["up.weight"] == (18, 12)
    assert list(smaller.shrunk.kept) == ["down.weight"]  # the empty row writes to the residual stream
    agree(smaller, model, torch.randn(3, 5, 12).double())


class Tied(nn.Module):
    """An embedding and a head with one tied weight, around torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 12), nn.Linear(12, 20, bias=False)
        self.head.weight = self.embed.weight
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.slow
def test_an_embedding_is_narrowed_where_it_is_tied_and_a_forward_that_does_not_take_it_becomes_a_graph() -> None:
    torch.manual_seed(0)
    model = Tied().double().eval()
    attention = model.attention
    zero(model.embed.weight[:, 3], attention.out_proj.weight[3], attention.out_proj.bias[3])
    zero(attention.in_proj_weight[24:28], attention.in_proj_bias[24:28])

    smaller = pruning.shrink(model, torch.randint(20, (2, 7)))

    assert smaller.shrunk.form == "graph", smaller.shrunk.tried
    assert isinstance(smaller, torch.fx.GraphModule)
    assert "embed_dim" in smaller.shrunk.tried[0]
    assert smaller.get_parameter("attention.in_proj_weight").shape == (24, 11)
    assert smaller.get_parameter("embed.weight").shape == (20, 11)
    agree(smaller, model, torch.randint(20, (5, 7)))


class OptionA(nn.Module):
    """A shortcut that pads the channels equally on both sides, as the ResNet paper does for small images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.third = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.third(F.relu(self.second(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))))
        return x + torch.ones(1).to(x.device, x.dtype)


def test_a_graph_calls_torchs_own_functions_and_can_be_saved_whole() -> None:
    torch.manual_seed(0)
    model = OptionA().double().eval()
    zero(model.second.weight[:2], model.second.bias[:2], model.second.weight[6], model.second.bias[6])

    smaller = pruning.shrink(model, torch.randn(2, 3, 8, 8).double())

    assert smaller.shrunk.form == "graph", smaller.shrunk.tried
    assert set(re.findall(r"torch\.ops\.aten\.(\w+)", str(smaller.code))) <= {"ones", "to"}, "no method takes a layout"
    assert smaller.get_parameter("second.weight").shape == (5, 4, 3, 3)
    agree(smaller, model, torch.randn(3, 3, 8, 8).double())
    agree(pickle.loads(pickle.dumps(smaller)), model, torch.randn(3, 3, 8, 8).double())


class Shared(nn.Module):
    """Attention with four query heads, where two query heads share one head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(6, 12), nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x).unflatten(-1, (-1, 3)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*parts, enable_gqa=True).transpose(1, 2).flatten(2))


def test_heads_that_share_keys_and_values_go_together() -> None:
    torch.manual_seed(0)
    model, x = Shared().double().eval(), torch.randn(2, 5, 6).double()
    zero(model.out.weight[:, :3])
    assert pruning.shrink(model, x).shrunk.removed == {}
    (group,) = pruning.dependency_groups(model, x)
    assert (group.units, group.width) == (2, 3)
    zero(model.out.weight[:, :6])

    smaller = pruning.shrink(model, x)

    assert isinstance(smaller, Shared)
    assert [len(layer.weight) for layer in (smaller.query, smaller.key, smaller.value)] == [6, 3, 3]
    agree(smaller, model, torch.randn(3, 4, 6).double())


class NormedHeads(nn.Module):
    """Attention whose queries and keys are normalised for each head, as in Qwen3."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.out = (nn.Linear(12, 12, bias=False) for _ in range(4))
        self.norm = nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        def heads(layer: nn.Linear) -> Tensor:
            return layer(x).view(*x.shape[:-1], -1, 4)

        def scaled(layer: nn.Linear) -> Tensor:
            found = heads(layer)
            return (self.norm.weight * (found * (found.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt())).transpose(1, 2)

        found = F.scaled_dot_product_attention(
            scaled(self.queries), scaled(self.keys), heads(self.values).transpose(1, 2)
        )
        return self.out(found.transpose(1, 2).reshape(*x.shape[:-1], -1))


def test_normalised_heads_are_all_kept() -> None:
    smaller: Any = pruning.shrink(NormedHeads(), torch.randn(2, 5, 12))
    assert (smaller.shrunk.form, smaller.shrunk.tried) == ("module", ())


def test_groups_of_a_convolution_lose_as_many_inputs_each() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=2)).double()
    zero(model[0].weight[0], model[0].weight[4:6])

    smaller = pruning.shrink(model, torch.randn(2, 3, 4, 4).double())

    assert (shapes(smaller)["0.weight"], shapes(smaller)["2.weight"]) == ((6, 3, 1, 1), (8, 3, 1, 1))
    agree(smaller, model, torch.randn(3, 3, 4, 4).double())


class Positions(nn.Module):
    """Features of tokens, with positions added, that one layer reads together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.position = nn.Linear(4, 6), nn.Parameter(torch.randn(5, 6))
        self.hidden, self.out = nn.Linear(30, 7), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(F.relu(self.hidden((self.up(x) + self.position).flatten(1))))
        return found


def test_features_that_are_flattened_together_with_what_stays_are_kept_and_said() -> None:
    torch.manual_seed(0)
    model = Positions().double().eval()
    zero(model.up.weight[0], model.up.bias[0], model.position[:, 0], model.hidden.weight[:2], model.hidden.bias[:2])

    smaller = pruning.shrink(model, torch.randn(2, 5, 4).double())

    assert (shapes(smaller)["up.weight"], shapes(smaller)["hidden.weight"]) == ((6, 4), (5, 30))
    assert list(smaller.shrunk.kept["up.weight"]) == ["`flatten` does not keep it apart"]
    agree(smaller, model, torch.randn(3, 5, 4).double())


class Reflected(nn.Module):
    """Features with others of them around, which are no zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(4, 6), nn.Linear(8, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(F.relu(self.down(F.pad(self.up(x), (1, 1), mode="reflect"))))
        return found


def test_features_that_others_are_copied_beside_are_kept_and_said() -> None:
    torch.manual_seed(0)
    model = Reflected().double().eval()
    zero(model.up.weight[:2], model.up.bias[:2], model.down.weight[0], model.down.bias[0])

    smaller = pruning.shrink(model, torch.randn(2, 3, 4).double())

    assert (shapes(smaller)["up.weight"], shapes(smaller)["down.weight"]) == ((6, 4), (4, 8))
    assert smaller.shrunk.kept == {"up.weight": {"`pad` pads it": 2}}
    agree(smaller, model, torch.randn(3, 3, 4).double())


class Cast(nn.Module):
    """A network that sums in float32 for any input dtype, like norms and rotary embeddings of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 640), nn.Linear(640, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up(x)).to(torch.float32)
        return F.linear(hidden, self.down.weight.to(torch.float32)).to(x.dtype)


def test_a_network_that_casts_to_float32_is_held_to_what_that_can_say() -> None:
    torch.manual_seed(0)
    model = Cast().eval()
    zero(model.up.weight[::3], model.up.bias[::3])

    smaller = pruning.shrink(model, torch.randn(2, 4))

    assert shapes(smaller)["down.weight"] == (3, 426)
    assert 1e-10 < smaller.shrunk.error["float64"] < 1e-5
    agree(smaller, model, torch.randn(3, 4), within=1e-5)


class MakesConstant(nn.Module):
    """A network that multiplies by a constant of a fixed dtype, whatever the dtype of the network."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down, self.dtype = nn.Linear(4, 6), nn.Linear(6, 3), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x))) @ torch.eye(3, dtype=self.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_that_runs_in_one_type_alone_is_held_to_its_outputs_in_that(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MakesConstant(dtype).to(dtype).eval()
    zero(model.up.weight[::3], model.up.bias[::3])

    smaller = pruning.shrink(model, torch.randn(2, 4, dtype=dtype))

    assert shapes(smaller)["down.weight"] == (3, 4)
    assert list(smaller.shrunk.error) == [str(dtype).removeprefix("torch.")]
    agree(smaller, model, torch.randn(3, 4, dtype=dtype), within=1e-6)


def test_a_network_that_runs_in_no_type_it_can_be_checked_in_is_told() -> None:
    model = MakesConstant(torch.bfloat16).bfloat16().eval()
    with pytest.raises(
        ValueError, match=r"^MakesConstant runs neither in float32 nor in float64 \(.*same dtype.*create"
    ):
        pruning.shrink(model, torch.randn(2, 4).bfloat16())


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.sort(self.second(self.norm(self.first(x)))).values)


def test_what_statistics_count_and_unknown_operations_read_is_kept_and_said() -> None:
    torch.manual_seed(0)
    model = Odd().double().eval()
    zero(model.first.weight[0], model.first.bias[0], model.second.weight[1], model.second.bias[1])

    smaller = pruning.shrink(model, torch.randn(2, 4).double())

    assert smaller.shrunk.after == smaller.shrunk.before
    assert smaller.shrunk.kept == {
        "first.weight": {"`norm` (layer_norm) counts it in its statistics": 1},
        "second.weight": {"`sort` is an operation without a rule": 1},
    }
    agree(smaller, model, torch.randn(3, 4).double())


def test_empty_outputs_of_a_computed_weight_and_an_only_output_are_kept_and_said() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    zero(model[0].parametrizations.weight.original0[1:3], model[2].weight[4:], model[2].bias[4:], model[4].weight)

    smaller = pruning.shrink(model, torch.randn(2, 4).double())

    assert smaller.shrunk.kept == {
        "`0` (linear)": {"its weight is computed in each forward, as under a parametrization": 2},
        "4.weight": {"it is the only one": 1},
    }
    assert shapes(smaller)["4.weight"] == (1, 1)  # the empty output reads no input
    agree(smaller, model, torch.randn(3, 4).double())


@pytest.mark.parametrize("transposed", [False, True])
def test_a_grouped_convolution_whose_weight_is_computed_keeps_its_bias_while_others_shrink(transposed: bool) -> None:
    torch.manual_seed(0)
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = nn.Sequential(
        weight_norm(kind(4, 4, 3, groups=2)), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.Conv2d(6, 2, 1)
    ).double()  # fmt: skip
    zero(model[2].weight[:2], model[2].bias[:2])

    smaller = pruning.shrink(model, torch.randn(2, 4, 5, 5).double())

    assert smaller.shrunk.tried == ()
    assert (shapes(smaller)["0.bias"], shapes(smaller)["3.weight"]) == ((4,), (2, 4, 1, 1))
    agree(smaller, model, torch.randn(3, 4, 5, 5).double())


class Noting(nn.Module):
    """A network that stores its activations, and has a weight that a hook computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(self.third)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.first(x).relu()
        self.others = {"second": self.second(self.hidden).relu()}
        return self.third(self.others["second"])


@pytest.mark.parametrize("runs_before", [False, True])
def test_tensors_with_a_history_do_not_keep_a_network_from_being_copied(runs_before: bool) -> None:
    torch.manual_seed(0)
    model = Noting().double()
    zero(model.first.weight[:2], model.first.bias[:2])
    inputs = torch.randn(3, 4).double()
    if runs_before:
        model(inputs)

    smaller = pruning.shrink(model, inputs)

    assert (smaller.shrunk.form, shapes(smaller)["second.weight"]) == ("module", (5, 4))
    agree(smaller, model, inputs)
    calling(model, inputs)()()


def test_what_the_page_shows_runs() -> None:
    shown = dict(re.findall(r"^```python (\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
    namespace: dict[str, Any] = {"print": lambda *_: None}

    exec(shown["shrink"], namespace)

    assert shapes(namespace["smaller"])["3.weight"] == (25, 8 * 36)
    exec(shown["groups"], namespace)
    shrunk = namespace["smaller"].shrunk
    assert 1 - shrunk.after / shrunk.before == namespace["decided"].details["removed"] >= 0.6


class Transposed(nn.Module):
    """Layers whose weights have shape (inputs, outputs), and constants computed without gradients, as transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.shift = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))
        self.down, self.last = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.arange(3).float().cos().to(x.dtype)
        hidden = torch.addmm(self.shift, x, self.up).relu()
        hidden = torch.cat([torch.tensor([]).to(x.dtype), hidden], 0)  # a cache starts empty
        return torch.addmm(self.last, hidden, self.down) * scale


def test_layers_of_transformers_are_followed() -> None:
    torch.manual_seed(0)
    model = Transposed().double()
    zero(model.up[:, :4])

    smaller = pruning.shrink(model, torch.randn(2, 4).double())

    assert shapes(smaller) == {"up": (4, 2), "shift": (2,), "down": (2, 3), "last": (3,)}
    agree(smaller, model, torch.randn(3, 4).double())


class Weighed(Transposed):
    """A last layer that takes its bias twice."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.last, torch.addmm(self.shift, x, self.up).relu(), self.down, beta=2.0)


def test_a_layer_that_weighs_its_bias_is_not_followed() -> None:
    torch.manual_seed(0)
    model = Weighed().double()
    zero(model.up[:, :2])
    model.shift.data[:2] = 1.0

    smaller = pruning.shrink(model, torch.randn(2, 4).double())

    assert (shapes(smaller)["up"], smaller.shrunk.folded) == ((4, 6), {})
    assert smaller.shrunk.kept == {"up": {"`addmm` is an operation without a rule": 2}}
    agree(smaller, model, torch.randn(3, 4).double())


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"in": nn.Linear(3, 4), "out": nn.Linear(4, 2)})

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers["out"](self.layers["in"](x))
        return found


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_a_network_that_cannot_be_traced_and_a_wrong_example_are_told() -> None:
    with pytest.raises(
        ValueError, match=r"^Branching cannot be traced by torch.export .*remove control flow that depends on data"
    ):
        pruning.shrink(Branching(3, 3), torch.randn(2, 3))
    with pytest.raises(
        ValueError, match=r"^Keywords cannot be traced .*: the name of its module `layers.in` contains a Py"
    ):
        pruning.shrink(Keywords(), torch.randn(2, 3))
    with pytest.raises(TypeError, match=r"`example` \(a list\) must be the network's input"):
        pruning.shrink(nn.Linear(3, 3), [torch.randn(2, 3)])


@pytest.mark.parametrize("seed", [0, 1])
def test_networks_drawn_at_random_compute_what_they_did(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.many
@pytest.mark.parametrize("first", range(2, 202, 20))
def test_many_networks_drawn_at_random_compute_what_they_did(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)


def check(seed: int) -> None:
    model = network(seed)

    smaller = pruning.shrink(model, torch.randn(2, 3, 8, 8).double())

    assert smaller.shrunk.form != "unchanged", (seed, smaller.shrunk.tried)
    agree(smaller, model, torch.randn(3, 3, 8, 8).double())


def test_outputs_differ_by_a_part_of_the_largest_or_altogether() -> None:
    nan, inf = float("nan"), float("inf")
    one = [torch.tensor([4.0, -8.0, nan]), torch.tensor([1, 2])]
    assert output_difference([torch.tensor([4.0, -6.0, nan]), torch.tensor([1, 2])], one) == 0.25
    assert output_difference([torch.tensor([4.0, -8.0, 0.0]), torch.tensor([1, 2])], one) == inf
    assert output_difference([torch.tensor([4.0, -8.0, nan]), torch.tensor([1, 3])], one) == inf
    assert output_difference([torch.tensor([[4.0, -8.0, nan]]), torch.tensor([1, 2])], one) == inf
    assert output_difference(one[:1], one) == inf
    assert output_difference([torch.tensor([nan])], [torch.tensor([nan])]) == 0
    assert output_difference([torch.tensor([4.0 - 6.0j]).conj()], [torch.tensor([4.0 + 8.0j])]) == 0.25
    assert output_difference([torch.tensor([4.0])], [torch.tensor([4.0 + 0.0j])]) == inf


def test_labels_and_parameters_take_no_memory_by_the_entry() -> None:
    network = nn.Sequential(nn.Linear(48, 64), nn.Unflatten(2, (4, 16)), nn.Flatten(2), nn.Linear(64, 48))
    trace = traced(network, torch.randn(2, 200, 48))
    flow = flow_of(trace)
    parameters = {each.untyped_storage().data_ptr() for each in trace.model.parameters()}
    own = {value.untyped_storage().data_ptr() for value in flow.constants.values.values() if isinstance(value, Tensor)}

    assert parameters <= own, "no copies"
    fields = [field for each in flow.fields.values() for field in each if isinstance(field, Tensor)]
    assert len(fields) >= 10
    assert max(field.untyped_storage().nbytes() for field in fields) <= 64 * 8, "a label for each channel"


def test_values_that_vary_take_no_memory() -> None:
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(inplace=True))
    found = Constants(traced(network, torch.randn(32, 64))).values.values()
    varying = [value for value in found if isinstance(value, Tensor) and bool(value.isnan().all())]

    assert len(varying) >= 5
    assert {value.untyped_storage().nbytes() for value in varying} == {8}, "one NaN in float64"


class Turning(nn.Module):
    """Attention whose queries and keys are multiplied by numbers for each entry of a head, as by rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 32) for _ in range(3))
        self.o = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(len(x), -1, 4, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        turn = torch.linspace(1, 2, 8, dtype=x.dtype)
        mixed = F.scaled_dot_product_attention(q * turn, k * turn, v).transpose(1, 2).contiguous()
        found: Tensor = self.o(mixed.view(len(x), -1, 32))
        return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*stay dense")
def test_a_graph_runs_where_smaller_sizes_lie_in_memory_in_another_order() -> None:
    torch.manual_seed(0)
    model, tokens = Turning().eval(), torch.randn(2, 6, 16)
    pruning.prune(model, sparsity=0.3, unit="group", scope="layer", budget="channels", example=tokens)
    smaller: Any = pruning.shrink(model, tokens)

    assert (smaller.shrunk.form, smaller.get_parameter("q.weight").shape[0]) == ("graph", 20)
    torch.testing.assert_close(smaller(tokens), model(tokens))


class Stated(nn.Module):
    """Two layers, and a state as wide as its configuration says, which it returns and adds unless caches are off."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True, width=8)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.config.use_cache:
            y = y + torch.zeros(self.config.width, dtype=y.dtype)
        found: Tensor = self.last(y)
        return found


def test_a_class_that_fails_where_it_keeps_a_cache_becomes_a_graph() -> None:
    torch.manual_seed(0)
    model, x = Stated().double().eval(), torch.randn(2, 4).double()
    zero(model.first.weight[:3])
    zero(model.first.bias[:3])
    smaller = pruning.shrink(model, x)

    assert (smaller.shrunk.form, smaller.shrunk.removed["first.bias"]) == ("graph", ((8,), (5,)))
    assert "where the network returns a cache" in smaller.shrunk.tried[0]
    agree(smaller, model, x)


class Merged(nn.Module):
    """Attention that merges the batch with its four heads, and leaves the number of keys to `view`, as in Bloom."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(6, 3 * 20), nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        packed = self.packed(x).view(batch, length, 4, 3, 5).transpose(1, 2)
        queries, keys, values = (packed[:, :, :, n].reshape(batch * 4, length, 5) for n in range(3))
        weights = torch.bmm(queries, keys.mT).view(batch, 4, length, -1).softmax(-1)
        read = torch.bmm(weights.view(batch * 4, length, -1), values).view(batch, 4, length, 5)
        found: Tensor = self.out(read.transpose(1, 2).reshape(batch, length, 20))
        return found


def test_heads_that_are_merged_with_the_batch_go() -> None:
    torch.manual_seed(0)
    model = Merged().double().eval()
    zero(model.packed.weight[15:30], model.packed.bias[15:30], model.out.weight[:, 5:10])

    smaller = pruning.shrink(model, torch.randn(2, 7, 6).double())

    assert (shapes(smaller)["packed.weight"], shapes(smaller)["out.weight"]) == ((45, 6), (2, 15))
    agree(smaller, model, torch.randn(3, 7, 6).double())
