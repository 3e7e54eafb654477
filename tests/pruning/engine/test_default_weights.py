"""Weights that are pruned where none is named: every weight with a layout, but for heads, routers and the outputs."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pruning
from pruning.choices.axes import Unit
from pruning.holding.default_weights import default_weights
from pruning.measure.macs import macs


class Mixture(nn.Module):
    """A router that lies deeper than the experts beside it, and a layer with as many outputs elsewhere."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router = nn.ModuleDict({"layer": nn.Linear(6, 4)})
        self.experts, self.shared = experts, nn.Linear(6, 6)


class Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 10, 6)), nn.Parameter(torch.randn(4, 6, 5))


def test_embeddings_tied_heads_routers_norms_and_biases_stay() -> None:
    model = nn.ModuleDict(
        {
            "tokens": nn.Embedding(9, 6),
            "attention": nn.MultiheadAttention(6, 2),
            "rnn": nn.GRU(6, 6),
            "both": nn.Bilinear(6, 6, 4),
            "stacked": Mixture(Stacks()),
            "listed": Mixture(nn.ModuleList(nn.Linear(6, 6) for _ in range(4))),
            "norm": nn.LayerNorm(6),
            "head": nn.Linear(6, 9),
        }
    )
    names = default_weights(model)

    assert names == [
        *("attention.in_proj_weight", "attention.out_proj.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0"),
        *("both.weight", "stacked.experts.up", "stacked.experts.down", "stacked.shared.weight"),
        *(f"listed.experts.{index}.weight" for index in range(4)),
        *("listed.shared.weight", "head.weight"),
    ]
    assert default_weights(model, with_head=False) == names[:-1]
    model["head"].weight = model["tokens"].weight
    assert default_weights(model) == names[:-1]
    pruning.prune(model, "magnitude", sparsity=0.5)
    assert default_weights(model) == names[:-1], "of a pruned network, too"


class TwoHeads(nn.Module):
    """Two outputs, of which neither layer is defined last."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.body = nn.Linear(8, 3), nn.Linear(8, 2), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.relu(self.body(x))
        return {"one": self.one(x).softmax(-1), "other": self.other(x)}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.branch = nn.Linear(4, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        out: Tensor = x + self.branch(x)
        return out


STRUCTURED: tuple[dict[str, Any], ...] = (
    {"method": "ln_structured", "n": 2, "dim": 0},
    {"method": "random_structured", "dim": 0},
    {"method": "magnitude", "unit": "channel"},
)


@pytest.mark.parametrize("options", STRUCTURED, ids=lambda each: each["method"])
def test_channels_are_never_outputs_of_the_network_by_default(options: dict[str, Any]) -> None:
    example, deep = torch.randn(2, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))

    assert [*pruning.plan(deep, sparsity=0.5, **options).masks] == ["0.weight"], "without an example, the last"
    with pytest.warns(UserWarning, match=r"without `example`, only body.weight is taken for outputs"):
        pruning.plan(TwoHeads(), sparsity=0.5, **options)
    assert [*pruning.plan(TwoHeads(), sparsity=0.5, example=example, **options).masks] == ["body.weight"]
    pruning.prune(model := TwoHeads(), sparsity=0.3, example=example, **options)
    assert [*pruning.plan(model, sparsity=0.5, example=example, **options).masks] == ["body.weight"]
    with pytest.raises(
        ValueError, match=r"outputs of into.weight, branch.weight are taken for those of the network; name"
    ):
        pruning.plan(Residual(), sparsity=0.5, example=example, **options)


Head = Callable[[Any, Tensor], Any]


class Language(nn.Module):
    """A residual stream between an embedding and a head, which is registered first and may be of any kind."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.tokens, self.raw = nn.Embedding(9, 6), nn.Parameter(torch.randn(9, 6))
        self.tied, self.plain = nn.Linear(6, 9, bias=False), nn.Linear(6, 9)
        self.tied.weight = self.tokens.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 9))
        self.up, self.down, self.norm, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6), head

    def forward(self, tokens: Tensor) -> Any:
        x = self.tokens(tokens)
        return self.head(self, self.norm(x + self.down(torch.relu(self.up(x)))))


def without_gradients(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.plain(x)  # type: ignore[no-any-return]


HEADS: Mapping[str, Head] = {
    "tied": lambda model, x: model.tied(x),
    "tied product": lambda model, x: x @ model.tokens.weight.T,
    "raw": lambda model, x: torch.nn.functional.linear(x, model.raw).softmax(-1),
    "computed": lambda model, x: model.normed(x),
    "scaled": lambda model, x: x @ (model.plain.weight.T * 0.5),
    "no gradients": without_gradients,
    "detached": lambda model, x: {"logits": model.plain(x).detach()},
    "chosen": lambda model, x: model.plain(x).argmax(-1),
}


@pytest.mark.filterwarnings("ignore:the call with `example` does not run")
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_the_head_s_product_ends_the_way_from_the_outputs_whatever_its_weight_is(head: Head) -> None:
    model, example = Language(head), torch.arange(8).view(2, 4)

    masks = pruning.plan(model, "ln_structured", sparsity=0.5, example=example).masks
    assert [*masks][-2:] == ["up.weight", "down.weight"]
    assert "plain.weight" not in masks or head in [*HEADS.values()][:4], "only where it gives no output"


def test_who_returns_no_tensors_is_told_which_weight_is_taken_for_outputs() -> None:
    model = Language(lambda model, x: model.plain(x).detach().numpy())

    with pytest.warns(UserWarning, match=r"returns no tensor that torch computes .*, so only down.weight is taken"):
        masks = pruning.plan(model, "ln_structured", sparsity=0.5, example=torch.arange(8).view(2, 4)).masks
    assert [*masks] == ["plain.weight", "up.weight"]


def test_layers_that_the_call_with_the_example_does_not_run_are_named() -> None:
    model = Language(lambda model, x: model.tied(x))

    with pytest.warns(UserWarning, match=r"with `example` does not run plain.weight: outputs are pruned there"):
        pruning.plan(model, "ln_structured", sparsity=0.5, example=torch.arange(8).view(2, 4))
    named: Any = {"parameters": ["up.weight", "plain.weight"], "example": torch.arange(8).view(2, 4)}
    assert [*pruning.plan(model, "ln_structured", sparsity=0.5, **named).masks] == ["up.weight", "plain.weight"]


def test_an_example_that_the_network_does_not_take_is_refused_by_a_sentence() -> None:
    said = r"`example` \(\(2, 4\) torch.float64\) must be an input of TwoHeads, which failed with RuntimeError: "

    with pytest.raises(ValueError, match=said):
        pruning.report(TwoHeads(), torch.randn(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=said):
        pruning.prune(TwoHeads(), "ln_structured", sparsity=0.5, example=torch.randn(2, 4, dtype=torch.float64))


def test_outputs_of_a_depthwise_convolution_at_the_end_are_those_of_the_layer_before() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, groups=6))

    assert [*pruning.plan(model, "ln_structured", sparsity=0.5, example=torch.randn(2, 3, 9, 9)).masks] == ["0.weight"]


def test_who_names_an_output_gets_it_with_a_warning() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    with pytest.warns(UserWarning, match=r"channels of 2.weight are outputs of the network"):
        masks = pruning.plan(model, "ln_structured", n=2, dim=0, sparsity=0.5, parameters=["2.weight"]).masks

    assert masks["2.weight"].any(1).sum() == 2


def test_channels_of_inputs_are_those_of_all_layers_and_spare_last_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4))

    inputs = pruning.plan(model, "ln_structured", n=2, dim=1, sparsity=0.5).masks
    assert [*inputs] == ["0.weight", "1.weight", "2.weight"]
    spared = pruning.plan(model, "magnitude", unit=Unit("channel", spare_last=True), sparsity=0.5).masks
    assert [*spared] == ["0.weight", "1.weight"]


def test_wanda_leaves_the_head_of_a_language_model_dense() -> None:
    model, batches = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9)), [torch.arange(8).view(2, 4)]

    assert [*pruning.plan(model, "wanda", order="at_once", batches=batches, sparsity=0.5).masks] == ["1.weight"]
    assert [*pruning.plan(model, "magnitude", sparsity=0.5).masks] == ["1.weight", "2.weight"]
    given: Any = {"order": "at_once", "batches": batches, "parameters": ["2.weight"]}
    named = pruning.plan(model, "wanda", sparsity=0.5, **given).masks
    assert named["2.weight"].sum() == 27
    with pytest.warns(UserWarning, match=r"stay dense: 2.weight .54 entries.; to prune them, name"):
        assert [*pruning.layerwise(copy.deepcopy(model), "wanda", batches, sparsity=0.5).masks] == ["1.weight"]
    assert [*pruning.layerwise(model, "magnitude", batches, sparsity=0.5).masks] == ["1.weight", "2.weight"]


class Routed(nn.Module):
    """One block, whose experts are stacks that the block itself multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.experts = nn.Linear(6, 6), Stacks()

    def forward(self, x: Tensor) -> Tensor:
        up, gate = torch.einsum("bi,eoi->beo", self.into(x), self.experts.up).chunk(2, -1)
        return torch.einsum("beo,eio->bi", up * gate, self.experts.down)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "alps"])
def test_experts_of_a_block_are_pruned_by_magnitude_with_a_sentence(method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleList([Routed(), Routed()]))
    model.forward = lambda x: model[0][1](model[0][0](x))  # type: ignore[index, method-assign]
    dense = copy.deepcopy(model)

    with pytest.warns(
        UserWarning, match=r"reaches 0.0.experts.up, 0.1.experts.up, or their weights .* pruned by magnitude"
    ):
        masks = pruning.layerwise(model, method, [torch.randn(9, 6)], n=3, m=6, parameters=["*.up", "*into*"]).masks

    assert [*masks] == [f"0.{block}.{name}" for block in (0, 1) for name in ("into.weight", "experts.up")]
    weight = dense.get_parameter("0.0.experts.up").detach().abs()
    expected = weight >= weight.topk(3, -1).values[..., -1:]
    assert torch.equal(masks["0.0.experts.up"], expected)


def test_an_example_costs_no_call_of_a_network_of_torchs_own_modules() -> None:
    calls: list[object] = []
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
    model.register_forward_hook(lambda *_: calls.append(0))
    pruning.prune(model, "magnitude", sparsity=0.5, example=torch.randn(2, 4))

    assert not calls


def test_an_example_is_taken_to_the_device_of_the_network() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))

    assert macs(model.to("meta"), torch.randn(2, 4)).total == 2 * (4 * 8 + 8 * 5)
