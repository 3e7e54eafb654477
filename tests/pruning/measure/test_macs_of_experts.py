"""Multiply-accumulates of mixtures of experts: each token counts for the experts that it is routed to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pruning.choices.axes import Scope, Unit
from pruning.dependencies.group_finding import dependency_groups
from pruning.masks.mask_set import MaskSet
from pruning.measure.macs import macs, weight_macs
from pruning.measure.report import active_parameters, parameters, report

EXPERTS, TOP, HIDDEN, WIDTH, TOKENS = 4, 2, 8, 12, 6
STACKS = {"gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN), "down_proj": (EXPERTS, HIDDEN, WIDTH)}
PATH = "model.layers.0.{}.experts"
EXAMPLE: dict[str, Any] = {"input_ids": 1 + torch.arange(TOKENS).view(2, 3), "use_cache": False}
OF_EXPERTS = TOKENS * TOP * 3 * WIDTH * HIDDEN


def mixture(kind: str) -> Any:
    """Return a network of one layer with a mixture."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 11, "num_experts_per_tok": TOP, "num_local_experts": EXPERTS, "head_dim": 4}
    others = {"intermediate_size": WIDTH, "pad_token_id": 0, "intermediate_size_mlp": 20}
    config = transformers.AutoConfig.for_model(kind, **sizes, **others)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_all_implementations_of_experts_count_what_a_hand_count_gives(implementation: str) -> None:
    model = mixture("mixtral")
    model.config._experts_implementation = implementation

    found = macs(model, EXAMPLE)

    projections, router, head = TOKENS * 4 * HIDDEN * HIDDEN, TOKENS * EXPERTS * HIDDEN, TOKENS * 11 * HIDDEN
    attention = 2 * 2 * (2 * 3 * 3 * 4)  # two products, of two heads, for each pair of tokens of two examples
    assert found.layers[PATH.format("mlp")].total == OF_EXPERTS
    assert found.total == projections + router + head + attention + OF_EXPERTS


@pytest.mark.parametrize(("kind", "place"), [("gpt_oss", "mlp"), ("llama4_text", "feed_forward")])
def test_transposed_experts_and_those_that_see_all_tokens_count_by_the_tokens_routed_to_them(
    kind: str, place: str
) -> None:
    assert macs(mixture(kind), EXAMPLE).layers[PATH.format(place)].total == OF_EXPERTS


class SeenByAll(nn.Module):
    """Experts that each read each token, by one product with all their matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 1:
            return (self.up.view(-1, HIDDEN) @ x).view(EXPERTS, WIDTH)
        return torch.einsum("neh,edh->ned", torch.einsum("nd,ehd->neh", x, self.up), self.down)


@pytest.mark.parametrize(("shape", "products"), [((TOKENS, HIDDEN), 2 * TOKENS), ((1, HIDDEN), 2), ((HIDDEN,), 1)])
def test_tokens_that_all_experts_share_count_for_each_of_them(shape: tuple[int, ...], products: int) -> None:
    model, example = SeenByAll(), torch.randn(shape)

    assert macs(model, example).total == products * EXPERTS * WIDTH * HIDDEN
    pruned = {"up": torch.zeros(EXPERTS, WIDTH, HIDDEN, dtype=torch.bool)}
    counted = weight_macs(model, example)
    assert counted.total - counted.remaining(pruned) == max(1, products // 2) * EXPERTS * WIDTH * HIDDEN


def masks(model: Any, *, expert: int | None = None, router: bool = False, density: float = 1) -> dict[str, Tensor]:
    """Return masks that remove an expert's matrices, and its row of the router if asked, and entries of all others."""
    found = {f"{PATH.format('mlp')}.{name}": torch.rand(shape) <= density for name, shape in STACKS.items()}
    found |= {"model.layers.0.mlp.gate.weight": torch.ones(EXPERTS, HIDDEN, dtype=torch.bool)}
    for name, mask in found.items():
        if expert is not None and (router or "gate.weight" not in name):
            mask[expert] = False
    return found


@pytest.mark.parametrize(
    ("asked", "lost"),
    [
        ({"expert": 1, "router": True}, TOKENS * HIDDEN),  # its row of the router: its tokens go to the others
        ({"expert": 1}, OF_EXPERTS // EXPERTS),  # the router still sends tokens to it
        ({"density": 0.5}, None),
    ],
)
def test_removed_experts_lose_nothing_and_others_their_mean(asked: dict[str, Any], lost: int | None) -> None:
    model = mixture("mixtral")
    found = masks(model, **asked)
    with torch.no_grad():
        for name, mask in found.items():
            model.get_parameter(name).mul_(mask)
    if lost is None:
        pruned = sum(int((~mask).sum()) for name, mask in found.items() if "experts" in name)
        lost = TOKENS * TOP * pruned // EXPERTS

    counted, weights = macs(model, EXAMPLE, MaskSet(found)), weight_macs(model, EXAMPLE)

    assert counted.total - counted.remaining == pytest.approx(lost, abs=2)
    assert weights.total == counted.total
    assert weights.total - float(weights.remaining(found)) == pytest.approx(lost, abs=1)


def test_a_token_uses_as_many_experts_as_it_is_routed_to() -> None:
    model = mixture("mixtral")
    others, one = parameters(model) - EXPERTS * 3 * WIDTH * HIDDEN, 3 * WIDTH * HIDDEN

    assert active_parameters(model) == others + TOP * one
    assert active_parameters(model.model.layers[0].mlp.experts) == EXPERTS * one, "without a router: all experts"
    removed, entries = (MaskSet(masks(model, expert=1, router=router)) for router in (True, False))
    assert active_parameters(model, removed) == others - HIDDEN + TOP * one, "its tokens go to the others"
    assert active_parameters(model, entries) == others + TOP * one * (EXPERTS - 1) // EXPERTS
    said = str(report(model, EXAMPLE, removed, samples=2))
    assert f"of the {others + TOP * one} parameters that one token uses, {others + TOP * one - HIDDEN} remain" in said
    assert "one token" not in str(report(torch.nn.Linear(2, 2), torch.ones(1, 2), samples=2))


@pytest.mark.parametrize("unit", ["heads", "group"])
@pytest.mark.parametrize("budget", ["active_parameters", "macs"])
def test_budgets_count_what_a_token_uses(unit: Any, budget: Any) -> None:
    model = mixture("mixtral")
    groups = dependency_groups(model, EXAMPLE, Unit(unit), Scope(budget=budget))

    counts = {"active_parameters": active_parameters(model), "macs": macs(model, EXAMPLE).total}
    assert groups.whole(budget) == counts[budget]
    first = next(each for each in groups if unit == "heads" or "experts" in each.name)
    kept = {first.name: torch.arange(first.units) > 0}
    lost = {"heads": 4 * 4 * HIDDEN, "group": TOP * 3 * HIDDEN}[unit]  # a head, or a hidden unit of two experts
    if budget == "active_parameters":
        assert counts[budget] - groups.remaining(kept, budget) == lost
