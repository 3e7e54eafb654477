"""Matrices that are stacked in parameters, as of experts, and multiplied at once: hidden units go from all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sampling import sampled
from torch import Tensor, nn

import pruning
from pruning.graph.tracing import outputs_of, traced

EXPERTS, WIDTH, HIDDEN = 4, 16, 24


class Experts(nn.Module):
    """Layers around experts of which each token sees all; `outputs_first` stores them as linear layers do."""

    def __init__(self, run: Callable[[Experts, Tensor, Tensor], Tensor], *, outputs_first: bool, halves: bool) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 5)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN * (1 + halves)) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.2)
        if outputs_first:
            self.up, self.down = nn.Parameter(self.up.detach().mT.clone()), nn.Parameter(self.down.detach().mT.clone())
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        found: Tensor = self.last(x + self.run(self, x, self.router(x).softmax(-1)))
        return found


def _of_einsums(own: Experts, x: Tensor, shares: Tensor) -> Tensor:
    hidden = F.gelu(torch.einsum("td,edh->teh", x, own.up) + own.bias)
    return torch.einsum("te, ted -> td", shares, torch.einsum("teh,ehd->ted", hidden, own.down))


def _of_linear_weights(own: Experts, x: Tensor, shares: Tensor) -> Tensor:
    hidden = F.relu(torch.einsum("td,ehd->teh", x, own.up) + own.bias)
    return (shares.unsqueeze(2) * torch.einsum("teh,edh->ted", hidden, own.down)).sum(1)


def _in_one_sum(own: Experts, x: Tensor, shares: Tensor) -> Tensor:
    hidden = F.relu(torch.einsum("td,edh->teh", x, own.up))
    return torch.einsum("teh,ehd,te->td", hidden, own.down, shares)


def _of_slots(own: Experts, x: Tensor, shares: Tensor) -> Tensor:
    """Let each expert read mixtures of the tokens, as Soft MoE does."""
    slots = torch.einsum("te,td->etd", shares, x)
    hidden = F.gelu(torch.einsum("etd,edh->eth", slots, own.up) + own.bias[:, None])
    return torch.einsum("te,etd->td", shares, torch.einsum("eth,ehd->etd", hidden, own.down))


def _of_products(own: Experts, x: Tensor, shares: Tensor) -> Tensor:
    hidden = F.gelu(torch.bmm(x.expand(EXPERTS, *x.shape), own.up) + own.bias[:, None])
    return (shares.T.unsqueeze(2) * torch.bmm(hidden, own.down)).sum(0)


def _with_bias(own: Experts, x: Tensor, shares: Tensor) -> Tensor:
    hidden = F.relu(torch.baddbmm(own.bias[:, None], x.repeat(EXPERTS, 1, 1), own.up))
    return (shares.T.unsqueeze(2) * (hidden @ own.down)).sum(0)


def _weights_first(own: Experts, x: Tensor, shares: Tensor) -> Tensor:
    hidden = F.relu(own.up @ x.T + own.bias.unsqueeze(2))
    return (shares.T.unsqueeze(2) * (own.down @ hidden).mT).sum(0)


def _gated(own: Experts, x: Tensor, shares: Tensor) -> Tensor:
    gates, values = torch.matmul(x, own.up).chunk(2, -1)
    return (shares.T.unsqueeze(2) * torch.matmul(F.silu(gates) * values, own.down)).sum(0)


def _of_best(own: Experts, x: Tensor, shares: Tensor) -> Tensor:
    """Each token takes the matrices of its two best experts."""
    shares, best = shares.topk(2)
    hidden = F.relu(torch.einsum("tehd,td->teh", own.up[best], x) + own.bias[best])
    return torch.einsum("ted,te->td", torch.einsum("tedh,teh->ted", own.down[best], hidden), shares)


def _of_one(own: Experts, x: Tensor, shares: Tensor) -> Tensor:
    """Each token takes the matrices of its best expert, as the second factor."""
    best = shares.argmax(1)
    hidden = F.relu(torch.bmm(x.unsqueeze(1), own.up[best]) + own.bias[best].unsqueeze(1))
    return torch.bmm(hidden, own.down[best]).squeeze(1)


FORMS = [
    (_of_einsums, ""),
    (_of_linear_weights, "outputs first"),
    (_in_one_sum, ""),
    (_of_slots, ""),
    (_of_products, ""),
    (_with_bias, ""),
    (_weights_first, "outputs first"),
    (_gated, "halves"),
    (_of_best, "outputs first"),
    (_of_one, ""),
]


@pytest.mark.filterwarnings("ignore:.* stay dense")
@sampled(4)
@pytest.mark.parametrize(("run", "layout"), FORMS)
def test_hidden_units_go_from_all_experts(run: Callable[..., Tensor], layout: str) -> None:
    torch.manual_seed(0)
    model = Experts(run, outputs_first=layout == "outputs first", halves=layout == "halves").eval()
    x = torch.randn(6, 8)

    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", scope="layer", budget="channels", example=x)
    smaller = pruning.shrink(model, x)

    assert smaller.down.shape in {(EXPERTS, HIDDEN // 2, WIDTH // 2), (EXPERTS, WIDTH // 2, HIDDEN // 2)}
    assert smaller.up.numel() * 4 == model.up.numel()
    assert smaller.shrunk.form == "module"
    others = torch.randn(9, 8)
    torch.testing.assert_close(smaller(others), model(others), rtol=1e-4, atol=1e-5)


@sampled(4)
@pytest.mark.parametrize(("run", "layout"), FORMS[:-2])
def test_groups_count_the_products_of_stacks(run: Callable[..., Tensor], layout: str) -> None:
    model = Experts(run, outputs_first=layout == "outputs first", halves=layout == "halves").eval()

    groups = pruning.dependency_groups(model, torch.randn(6, 8))

    kept = {each.name: torch.arange(each.units) % (1 + (each.units == HIDDEN)) == 0 for each in groups}
    lost = groups.whole("macs") - groups.remaining(kept, "macs")
    assert lost == 6 * (model.up.numel() + model.down.numel()) // 2


class Separate(nn.Module):
    """Experts in modules of their own, whose weights the forward stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(EXPERTS))
        self.downs = nn.ModuleList(nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        up, down = (torch.stack([each.weight for each in layers]).mT for layers in (self.ups, self.downs))
        bias = torch.stack([each.bias for each in self.ups])
        hidden = F.relu(torch.baddbmm(bias[:, None], self.first(x).expand(EXPERTS, -1, -1), up))
        found: Tensor = self.last((hidden @ down).sum(0))
        return found


def test_layers_that_a_forward_stacks_lose_the_same_units() -> None:
    torch.manual_seed(0)
    model, x = Separate().eval(), torch.randn(6, 8)

    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", scope="layer", budget="channels", example=x)
    smaller = pruning.shrink(model, x)

    assert {tuple(each.weight.shape) for each in smaller.ups} == {(HIDDEN // 2, WIDTH // 2)}
    torch.testing.assert_close(smaller(x), model(x), rtol=1e-4, atol=1e-5)


class Selected(nn.Module):
    """Adds the rows of a stack that a mask of two dimensions selects."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 10), nn.Linear(10, 4)
        self.rows = nn.Parameter(torch.randn(3, 4, 10))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.last((self.first(x) + self.rows[mask].sum(0)).relu())
        return found


def test_a_mask_of_two_dimensions_leaves_the_others() -> None:
    model, given = Selected().eval(), (torch.randn(5, 8), torch.eye(3, 4) > 0)

    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", scope="layer", budget="channels", example=given)
    smaller = pruning.shrink(model, given)

    assert smaller.rows.shape == (3, 4, 5)
    torch.testing.assert_close(smaller(*given), model(*given))


EQUATIONS = [
    "td,edh,te->th",
    "td, dh -> th",
    "tt,th->th",
    "td,edh",
    "...d,dh->...h",
    "btnh,bsnh->bnts",
    "btnh,nhd->btd",
    "td,edh->teh",
    "btd,ehd->bteh",
    "gtd,gedh->gteh",
    "d,edh->eh",
    "td,abdh->tbah",
    "te,td->etd",
    "te,td->tde",
]


@sampled(4)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_trace_computes_what_einsum_does(equation: str) -> None:
    sizes = dict(zip("abdeghnst", (2, 3, 4, 2, 3, 5, 2, 6, 7), strict=True))
    terms = equation.replace(" ", "").replace("...", "bt").partition("->")[0].split(",")
    given = [torch.randn([sizes[each] for each in term]).double() for term in terms]
    agree_in_a_trace(equation, given)


def test_a_trace_repeats_what_einsum_repeats() -> None:
    agree_in_a_trace("td,edh->teh", [torch.randn(6, 1), torch.randn(2, 4, 5)])


def agree_in_a_trace(equation: str, given: list[Tensor]) -> None:
    class Sum(nn.Module):
        def forward(self, *operands: Tensor) -> Tensor:
            found: Tensor = torch.einsum(equation, *operands)
            return found

    graph = traced(Sum(), tuple(given)).graph
    torch.testing.assert_close(outputs_of(graph, (tuple(given), {})), [Sum()(*given)])
