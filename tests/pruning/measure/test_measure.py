"""Measures of pruned models against values by hand and torch's own counter of floating-point operations."""

import warnings
from types import MappingProxyType

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from scipy.sparse import csr_matrix
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

import pruning
from pruning import MaskSet, custom_from_mask, l1_unstructured
from pruning.measure import report as measure
from pruning.measure.macs import weight_macs
from pruning.measure.report import CAVEAT, LayerMacs, Macs, TensorSize


class Conv1D(nn.Module):
    """A copy of transformers' layer with this name: y = x W + b with W of shape (in, out)."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x):
        return x @ self.weight


def lenet():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.Linear(100, 10))


def counted(model, *inputs):
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (lenet(), (torch.randn(3, 1, 28, 28),)),
        (nn.Linear(5, 7), (torch.randn(5),)),
        (nn.Linear(5, 7), (torch.randn(2, 3, 5),)),
        (Conv1D(7, 5), (torch.randn(2, 3, 5),)),
        (nn.Conv1d(4, 6, 3, stride=2, groups=2), (torch.randn(2, 4, 11),)),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)),
            (torch.randn(2, 3, 9, 7),),
        ),
        (nn.Conv2d(8, 8, 3, groups=8, dilation=2), (torch.randn(1, 8, 9, 9),)),
        (nn.Conv3d(2, 3, (1, 2, 3)), (torch.randn(1, 2, 4, 5, 6),)),
        (nn.ConvTranspose2d(3, 4, 3, stride=2), (torch.randn(2, 3, 5, 5),)),
        (nn.GRU(8, 16, num_layers=2, bidirectional=True), (torch.randn(5, 2, 8),)),
        (nn.LSTMCell(8, 16), (torch.randn(2, 8),)),
        (nn.MultiheadAttention(16, 4), (torch.randn(5, 2, 16),) * 3),
        (nn.MultiheadAttention(16, 4, kdim=6, vdim=7), (torch.randn(5, 16), torch.randn(9, 6), torch.randn(9, 7))),
        (nn.MultiheadAttention(16, 2, batch_first=True), (torch.randn(2, 5, 16), *[torch.randn(2, 3, 16)] * 2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_macs_are_half_of_torch_s_flops(model, inputs):
    found = measure.macs(model, inputs)
    assert found.total == found.remaining == counted(model.eval(), *inputs)


def test_macs_of_lenet_by_hand():
    model = lenet()
    example = torch.zeros(1, 1, 28, 28)
    assert measure.macs(model, example).layers == {
        "1": LayerMacs(235_200, 235_200),
        "3": LayerMacs(30_000, 30_000),
        "4": LayerMacs(1_000, 1_000),
    }
    l1_unstructured(model[1], "weight", 0.9)
    torch_prune.random_unstructured(model[4], "weight", 300)
    assert measure.macs(model, example).layers["1"] == LayerMacs(235_200, 23_520)
    assert measure.macs(model, example).remaining == 23_520 + 30_000 + 700
    assert measure.macs(model, example, MaskSet({})).remaining == 266_200


def test_a_convolution_s_weight_counts_once_a_position():
    model = nn.Conv2d(1, 2, 3)
    mask = torch.ones(2, 1, 3, 3)
    mask[0, 0, 0] = 0
    custom_from_mask(model, "weight", mask)
    assert measure.macs(model, torch.zeros(1, 1, 7, 6)).layers[""] == LayerMacs(20 * 18, 20 * 15)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_a_convolution_by_an_unmasked_kernel_counts_whole_whatever_the_sizes_are(batch, channels):
    class Blurred(nn.Module):
        def __init__(self):
            super().__init__()
            self.into = nn.Linear(6, 6)
            self.register_buffer("kernel", torch.ones(channels, 1, 3))

        def forward(self, x):
            return F.conv1d(self.into(x), self.kernel, groups=channels)

    masks, example = MaskSet({"into.weight": torch.eye(6)}), torch.ones(batch, channels, 6)
    assert measure.macs(Blurred(), example, masks).layers[""] == LayerMacs(*[batch * channels * 4 * 3] * 2)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("packed", [False, True])
def test_lstm_by_hand(packed):
    model = nn.LSTM(8, 16, num_layers=2, proj_size=4, batch_first=True)
    custom_from_mask(model, "weight_hr_l1", torch.zeros(4, 16))
    sequence = torch.randn(3, 5, 8)
    steps = 15
    if packed:
        sequence, steps = pack_padded_sequence(sequence, torch.tensor([5, 2, 1]), batch_first=True), 8
    first, second = 64 * 8 + 64 * 4 + 4 * 16, 64 * 4 + 64 * 4 + 4 * 16
    assert measure.macs(model, sequence).layers[""] == LayerMacs(
        steps * (first + second), steps * (first + second - 4 * 16)
    )


def test_attention_counts_queries_keys_and_values_apart():
    model = nn.MultiheadAttention(16, 4)
    mask = torch.ones(48, 16)
    mask[:16] = 0
    masks = MaskSet({"in_proj_weight": mask, "out_proj.weight": torch.zeros(16, 16)})
    found = measure.macs(model, (torch.randn(5, 2, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)), masks)
    products = 2 * 2 * 5 * 7 * 16
    assert found.total == 10 * 256 + 2 * 14 * 256 + 10 * 256 + products
    assert found.remaining == 2 * 14 * 256 + products


def test_a_transformer_layer_is_counted_in_full():
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    assert measure.macs(model, torch.randn(2, 5, 16)).total == 10 * 4 * 256 + 2 * 2 * 25 * 16 + 10 * 2 * 16 * 32
    assert torch.backends.mha.get_fastpath_enabled()


def test_latency_is_that_of_the_fast_path(monkeypatch):
    taken = []
    fused = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: [taken.append(1), fused(*a)][1])
    measure.latency(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8), samples=2, warmup=1)
    assert len(taken) == 3
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_layer_called_twice_counts_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(input=self.layer(x))

    assert measure.macs(Twice(), torch.zeros(1, 4)).layers == {"layer": LayerMacs(32, 32)}


def test_counting_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout())
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measure.macs(model, torch.randn(2, 1, 5, 5))
    measure.latency(model, torch.randn(2, 1, 5, 5), samples=2)
    assert [m.training for m in model.modules()] == [True, True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(
        ValueError, match="must be an input of Sequential, which failed with RuntimeError: Given groups=1"
    ):
        measure.macs(model, torch.randn(2, 3, 5, 5))
    assert not any(m._forward_hooks for m in model.modules())


def test_parameters_and_bytes_by_hand():
    model = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 3, bias=False, dtype=torch.bfloat16))
    l1_unstructured(model[0], "weight", 30)
    l1_unstructured(model[1], "weight", 5)
    assert measure.parameters(model) == 40 + 4 + 12
    assert measure.remaining_parameters(model) == 10 + 4 + 7
    assert measure.sizes(model) == {
        "0.weight": TensorSize(40, 10, dense=160, packed=10 * 4 + 5, csr=10 * 8 + 4 * 5),
        "1.weight": TensorSize(12, 7, dense=24, packed=7 * 2 + 2, csr=7 * 6 + 4 * 4),
    }
    plain = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 3, bias=False, dtype=torch.bfloat16))
    assert measure.sizes(plain) == {}
    assert measure.sizes(plain, MaskSet.collect(model)) == measure.sizes(model)
    assert measure.remaining_parameters(plain, MaskSet.collect(model)) == 21


def test_a_tied_parameter_counts_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    MaskSet({"0.weight": torch.eye(4)}).apply(model)
    assert measure.parameters(model) == 16 + 8
    assert measure.remaining_parameters(model) == 4 + 8


def test_csr_bytes_are_those_of_scipy():
    mask = torch.rand(30, 20, generator=torch.Generator().manual_seed(0)) < 0.1
    model = nn.Linear(20, 30)
    matrix = csr_matrix((model.weight.detach() * mask).numpy())
    held = matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes
    assert measure.sizes(model, MaskSet({"weight": mask}))["weight"].csr == held


def test_dead_tensors_and_units():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(3, 2))
    mask = torch.ones(4, 1, 3, 3)
    mask[1:3] = 0
    custom_from_mask(model[0], "weight", mask)
    custom_from_mask(model[1], "weight", torch.zeros(2, 3))
    custom_from_mask(model[1], "bias", torch.tensor([0.0, 1.0]))
    assert measure.dead(model) == ("1.weight",)
    assert measure.dead(MaskSet({"none": torch.ones(0, 3)})) == ()


def test_latency_has_its_spread(monkeypatch):
    ticks = iter([0, 100, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))
    found = measure.latency(nn.Identity(), torch.zeros(1), samples=5, warmup=1)
    assert (found.lower, found.median, found.upper, found.samples) == (2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"`samples` \(=1\) must be at least 2"):
        measure.latency(nn.Identity(), torch.zeros(1), samples=1)


def test_a_mapping_is_an_example_by_keyword():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, *, x):
            return self.inner(x)

    example = MappingProxyType({"x": torch.zeros(4, 3)})
    found = measure.report(Named(), example, samples=2)
    assert found.macs.total == 4 * 3 * 2
    assert found.latency.samples == 2


def test_the_report_says_it_all_and_honestly():
    model = lenet()
    custom_from_mask(model[4], "weight", torch.zeros(10, 100))
    l1_unstructured(model[1], "weight", 0.5)
    text = str(measure.report(model, torch.zeros(1, 1, 28, 28), samples=2))
    assert "entirely masked: 4.weight" in text
    assert "MACs 266200, of unmasked weights 147600 (1/1.8 of dense)" in text
    assert "sparsity 0.5021; 148010 of 266610 parameters remain" in text
    assert "1.weight" in text
    assert text.endswith(CAVEAT)
    assert "no time" in CAVEAT


def test_no_layers_no_macs():
    assert measure.macs(nn.ReLU(), torch.zeros(3)) == Macs({})


def test_a_pruned_weight_keeps_its_history():
    model = lenet()
    l1_unstructured(model[1], "weight", 0.5)
    measure.macs(model, torch.zeros(1, 1, 28, 28))
    model[1].weight.sum().backward()
    assert torch.equal(model[1].weight_orig.grad, model[1].weight_mask)


class Centred(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight - self.weight.mean(), self.bias)


class Adapted(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight + torch.ones(8, 1) @ torch.ones(1, 8), self.bias)


class Rounded(nn.Linear):
    def forward(self, x):
        return F.linear(x, torch.round(4 * self.weight) / 4, self.bias)


class Doubled(nn.Linear):
    def forward(self, x):
        return F.linear(2 * x, self.weight, self.bias)


class Several(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden), hidden


def test_a_layer_that_returns_several_tensors_is_counted_by_what_it_reads():
    model = nn.Sequential(Several(8, 4))

    assert measure.macs(model, torch.randn(3, 5, 8)).layers == {"0": LayerMacs(15 * 32, 15 * 32)}


@pytest.mark.parametrize(("kind", "remaining"), [(Centred, 192), (Adapted, 192), (Rounded, 48), (Doubled, 48)])
def test_zeros_that_do_not_reach_the_product_are_said_and_counted(kind, remaining):
    torch.manual_seed(0)
    model, example = nn.Sequential(kind(8, 8)), torch.randn(3, 8)
    computed = () if remaining == 48 else ("0",)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pruning.prune(model, "magnitude", sparsity=0.75, example=example)
        found = pruning.report(model, example, samples=2)

    assert found.macs.layers["0"] == LayerMacs(192, remaining)
    assert found.macs.computed == computed
    assert [str(each.message).startswith("zeros of 0 do not reach the product") for each in told] == [True, True][
        : 2 * len(computed)
    ]
    assert ("zeros of 0 do not reach" in str(found)) == bool(computed)


class Borrowed(nn.Module):
    """Network that multiplies by what it makes of a layer's weight, without a call of the layer."""

    def __init__(self, made):
        super().__init__()
        self.a, self.b, self._made = nn.Linear(8, 8), nn.Linear(8, 2), made

    def forward(self, x):
        return self.b(F.linear(x, self._made(self.a.weight)))


@pytest.mark.parametrize(
    ("made", "remaining"),
    [
        (lambda weight: weight - weight.mean(), 192),
        (lambda weight: F.layer_norm(weight, (8,)), 192),
        (lambda weight: 2 * weight, 48),
        (lambda weight: weight.half().float(), 48),
        (lambda weight: weight.T.clone().T, 48),
    ],
)
def test_zeros_of_a_weight_that_another_module_multiplies_by_are_followed(made, remaining):
    torch.manual_seed(0)
    model, example = Borrowed(made), torch.randn(3, 8)
    computed = () if remaining == 48 else ("a.weight",)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pruning.prune(model, "magnitude", sparsity=0.75, example=example)
        found = measure.macs(model, example)

    assert found.layers[""] == LayerMacs(192, remaining)
    assert found.computed == computed
    assert [str(each.message) for each in told] == [
        "zeros of a.weight do not reach the product: the forward computes another tensor from the masked weight; leave "
        "it out of `parameters`."
    ][: len(computed)]


class Stacked(nn.Module):
    """Product of one input by each matrix of a stack, which einsum copies."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x):
        return torch.einsum("bi,hio->bho", x, self.w)


def test_a_copy_of_a_stacked_weight_counts_by_its_mask():
    model, example = Stacked(), torch.randn(3, 8)
    mask = torch.zeros(4, 8, 6)
    mask[0, :3] = 1
    custom_from_mask(model, "w", mask)

    assert measure.macs(model, example).layers == {"": LayerMacs(3 * 192, 3 * 18)}
    assert weight_macs(Stacked(), example).remaining({"w": mask.bool()}) == 3 * 18


def test_an_example_that_the_network_does_not_take_leaves_it_pruned_and_is_said():
    model = nn.Sequential(Doubled(8, 8))
    with pytest.warns(UserWarning, match=r"unknown: `example` \(\(3, 5\) torch.float32\) must be an input"):
        pruning.prune(model, "magnitude", sparsity=0.75, example=torch.randn(3, 5))
    assert pruning.sparsity(model) == 0.75
