"""Hidden units of experts: each expert keeps its own best, and networks cut by hand compute what the masked ones do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pruning
from orchestrator.training.state.from_scratch import transformer_left
from pruning.measure.macs import macs
from pruning.mixtures.finding import mixtures
from pruning.mixtures.survivors import stop_routing_among_survivors

pytest.importorskip("transformers")
from small_mixtures import TOKENS, loss, network_of

WIDTH = 8
SQUARES: dict[str, Any] = {"unit": "mlp", "scope": "layer", "sparsity": 0.25, "reduce": "l2"}


def logits(model: nn.Module, **given: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=TOKENS, **given).logits
    return found


def width_of(model: nn.Module) -> int:
    smaller: Any = pruning.smaller_transformer(model)
    return int(smaller.config.intermediate_size)


def best(stacks: list[Tensor], count: int) -> Tensor:
    """Return the hidden units with the largest sums of squares over gate, value and output, (experts, count)."""
    total = torch.stack([each.double().square().sum(-1) for each in stacks]).sum(0)
    return total.topk(count).indices.sort().values


def by_hand(model: Any) -> Any:
    """Return a copy in which each expert has its 6 best of 8 hidden units, cut by plain loops."""
    smaller = copy.deepcopy(model)
    for layer in smaller.model.layers:
        own = layer.mlp.experts
        gpt_oss = "Oss" in type(own).__name__
        gate_up = own.gate_up_proj.detach().mT if gpt_oss else own.gate_up_proj.detach()
        down = own.down_proj.detach() if gpt_oss else own.down_proj.detach().mT
        halves = [gate_up[:, ::2], gate_up[:, 1::2]] if gpt_oss else [gate_up[:, :WIDTH], gate_up[:, WIDTH:]]
        squares = [*halves, down]
        if gpt_oss:
            bias = own.gate_up_proj_bias.detach()
        kept = best(squares, 6)
        gates, downs, biases = [], [], []
        for expert, units in enumerate(kept):
            rows = [2 * u + k for u in units for k in (0, 1)] if gpt_oss else [*units, *(u + WIDTH for u in units)]
            gates.append(gate_up[expert, torch.stack([torch.as_tensor(each) for each in rows])])
            downs.append(down[expert, units])
            if gpt_oss:
                biases.append(bias[expert, torch.stack([torch.as_tensor(each) for each in rows])])
        rows_left, columns_left = torch.stack(gates), torch.stack(downs)
        own.gate_up_proj = nn.Parameter(rows_left.mT.contiguous() if gpt_oss else rows_left)
        own.down_proj = nn.Parameter(columns_left if gpt_oss else columns_left.mT.contiguous())
        if gpt_oss:
            own.gate_up_proj_bias = nn.Parameter(torch.stack(biases))
        for key in ("intermediate_dim", "intermediate_size", "expert_dim"):
            if hasattr(own, key):
                setattr(own, key, 6)
    return smaller


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_each_expert_keeps_its_own_best_units_as_by_hand(kind: str) -> None:
    model = network_of(kind)
    expected = by_hand(model)
    weights = [n for n, p in model.named_parameters() if "experts" in n and not n.endswith("bias")]
    pruning.prune(model, lambda m, *_, **__: {n: m.get_parameter(n).detach() for n in weights}, **SQUARES)
    smaller: Any = pruning.smaller_transformer(model, {"input_ids": TOKENS})
    for one, other in zip(smaller.model.layers, expected.model.layers, strict=True):
        for name, parameter in one.mlp.experts.named_parameters():
            torch.testing.assert_close(parameter, other.mlp.experts.get_parameter(name), rtol=0, atol=0)
    assert smaller.resized.config == {"intermediate_size": (8, 6)}
    positions = next(each.positions for n, each in smaller.resized.left.items() if n.endswith("experts.down_proj"))
    (own,) = positions.values()
    assert own.shape == (8, 6)
    assert len({tuple(row.tolist()) for row in own}) > 1
    mask = torch.ones_like(TOKENS)
    mask[1, :3] = 0
    for given in ({}, {"attention_mask": mask}):
        torch.testing.assert_close(logits(expected, **given), logits(model, **given), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits(smaller, **given), logits(model, **given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("units", [("expert", "mlp"), ("mlp", "expert"), ("expert", "mlp", "mlp")])
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_hidden_units_and_experts_go_in_any_order(kind: str, units: tuple[str, ...]) -> None:
    shared = {"n_shared_experts": 2} if kind == "deepseek_v3" else {}
    model = network_of(kind, **shared)
    for number, unit in enumerate(units):  # hidden units of removed experts count as removed
        sparsity = 0.25 if number == 0 or unit == "expert" else (0.4, 0.5)[number - 1]
        pruning.prune(model, "magnitude", unit=unit, scope="layer", sparsity=sparsity)
    smaller: Any = pruning.smaller_transformer(model, {"input_ids": TOKENS})
    assert smaller.resized.difference < 1e-10
    assert not smaller.resized.padding
    assert {each.count for each in mixtures(smaller)} == {6}
    width = 4 if len(units) == 3 else 6
    assert {new for key, (_, new) in smaller.resized.config.items() if "intermediate" in key} == {width}
    if kind == "deepseek_v3":
        assert smaller.model.layers[1].mlp.shared_experts.gate_proj.out_features == 2 * width
        assert smaller.model.layers[0].mlp.gate_proj.out_features == WIDTH, "a dense layer has a key of its own"


@pytest.mark.parametrize("budget", ["parameters", "active_parameters", "bytes", "macs"])
def test_budgets_count_what_the_smaller_network_has(budget: Any) -> None:
    model = network_of("mixtral")
    if budget != "macs":  # which count all rows of a router
        pruning.prune(model, "magnitude", unit="expert", scope="layer", sparsity=0.25)
    example = {"input_ids": TOKENS}
    plan = pruning.prune(model, "magnitude", unit="mlp", scope="layer", sparsity=0.2, budget=budget, example=example)
    stop_routing_among_survivors(model)
    smaller = pruning.smaller_transformer(model)
    left, whole = (cost(each, budget) for each in (smaller, network_of("mixtral")))
    assert plan.details["removed"] == pytest.approx(1 - left / whole, abs=1e-9)
    assert plan.details["removed"] >= 0.2 > plan.details["removed"] - plan.details["step"]


def cost(model: Any, budget: Any) -> int:
    """Return the cost of a mixture of which 2 experts act for each token."""
    if budget == "macs":
        return macs(model, {"input_ids": TOKENS}).total
    total = 0
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        trained, stacked = isinstance(each, nn.Parameter), "mlp.experts." in name
        if budget == "bytes":
            total += each.numel() * each.itemsize
        elif trained:
            total += each[:2].numel() if stacked and budget == "active_parameters" else each.numel()
    return total


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float64, 6), (torch.float32, 4), (torch.bfloat16, 8)])
def test_widths_are_multiples_of_16_bytes(dtype: torch.dtype, kept: int) -> None:
    model = network_of("mixtral").to(dtype)
    if kept == 8:  # 8 entries of 2 bytes are one step, so nothing can go
        with pytest.raises(ValueError, match=r"`sparsity` .=0.1. cannot be reached"):
            pruning.prune(model, "magnitude", unit="mlp", scope="layer", sparsity=0.1)
        return
    pruning.prune(model, "magnitude", unit="mlp", scope="layer", sparsity=0.1)
    assert width_of(model) == kept


def test_a_smaller_mixture_goes_back_into_the_whole_one() -> None:
    model = network_of("qwen3_moe")
    plan = pruning.prune(model, "magnitude", unit="mlp", scope="layer", sparsity=0.25)
    masks = pruning.MaskSet(plan.masks)
    pruning.remove_all(model)
    small = transformer_left(model, masks, {"input_ids": TOKENS})
    assert small is not None
    whole = network_of("qwen3_moe")
    small.put_into(whole)
    torch.testing.assert_close(logits(whole), logits(model), rtol=0, atol=1e-12)


def test_scores_that_see_tokens_rank_hidden_units_and_others_are_refused_before_a_pass() -> None:
    model = network_of("olmoe")
    pruning.prune(model, "taylor", unit="mlp", scope="layer", sparsity=0.25, batches=[TOKENS], loss=loss)
    assert width_of(model) == 6

    def never(*_: Any) -> Tensor:
        raise AssertionError("the network was called")

    with pytest.raises(ValueError, match=r"`parameters` .*experts.* such as taylor, which reads experts, too"):
        pruning.prune(network_of("olmoe"), "minitron_mlp", sparsity=0.25, batches=[TOKENS], loss=never)
    with pytest.raises(ValueError, match=r"^`scope.kind` .='global'. cannot be combined .*scope.kind='layer'"):
        pruning.prune(network_of("olmoe"), "magnitude", unit="mlp", scope="global", sparsity=0.25)


@pytest.mark.filterwarnings("ignore:.*stay dense")
def test_traced_groups_keep_widths_that_grouped_products_take_so_that_the_class_stays() -> None:
    drawn = network_of("qwen3_moe", moe_intermediate_size=12, intermediate_size=12)
    model: Any = type(drawn)._from_config(drawn.config, experts_implementation="grouped_mm").eval()
    groups = pruning.dependency_groups(model, {"input_ids": TOKENS})
    (of_experts, *_) = [each for each in groups if each.name.endswith("experts.gate_up_proj")]
    assert of_experts.counts == (4, 8, 12)  # of 4 bytes each, in steps of 16

    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", example={"input_ids": TOKENS})
    smaller: Any = pruning.shrink(model, {"input_ids": TOKENS})

    assert smaller.shrunk.form == "module"
    assert {each.mlp.experts.down_proj.shape[-1] for each in smaller.model.layers} <= {4, 8}
    torch.testing.assert_close(logits(smaller), logits(model), rtol=1e-5, atol=1e-6)
