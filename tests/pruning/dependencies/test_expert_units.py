"""Whole experts: counts by hand, masked networks that compute what networks without the experts do, and refusals."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled
from torch import Tensor, nn

import pruning
from pruning import Choices
from pruning.choices.axes import Schedule, Scope, Score, Unit
from pruning.dependencies.families.family_groups import family_groups
from pruning.measure.macs import macs
from pruning.mixtures.finding import expert_dim, mixtures
from pruning.mixtures.survivors import stop_routing_among_survivors

pytest.importorskip("transformers")
from small_mixtures import EXPERTS, KINDS, TOKENS, loss, network_of

pytestmark = pytest.mark.filterwarnings("ignore:no token is routed to")


def without(model: Any, removed: dict[str, list[int]]) -> Any:
    """Return a copy of a network that has lost experts, cut by hand: experts of a layer -> their numbers."""
    smaller = copy.deepcopy(model)
    stop_routing_among_survivors(smaller)
    pruning.remove_all(smaller)
    for mixture in mixtures(smaller):
        kept = torch.tensor([each for each in range(EXPERTS) if each not in removed[mixture.experts]])
        for name, tensor in {**mixture.stacks, **mixture.router}.items():
            path, _, leaf = name.rpartition(".")
            owner = smaller.get_submodule(path)
            held: Any = owner._buffers if leaf in owner._buffers else owner._parameters
            cut = tensor.detach().index_select(expert_dim(tensor, EXPERTS) or 0, kept)
            held[leaf] = cut if leaf in owner._buffers else nn.Parameter(cut)
        for module in mixture.routing.values():
            for key in [key for key, value in vars(module).items() if "expert" in key and value == EXPERTS]:
                setattr(module, key, len(kept))
        smaller.get_submodule(mixture.experts).num_experts = len(kept)
    return smaller


def removed_of(plan: pruning.PruningPlan) -> dict[str, list[int]]:
    """Return experts of a layer -> numbers of those whose masks are all 0."""
    stacks = {n: m for n, m in plan.masks.items() if n.endswith("experts.gate_up_proj")}
    return {n.rpartition(".")[0]: [*map(int, (~m.flatten(1).any(1)).nonzero())] for n, m in stacks.items()}


def scored(values: list[float]) -> Callable[..., dict[str, Tensor]]:
    """Return a score that gives the experts of every layer these values."""
    return lambda model, *_, **__: {
        next(n for n in each.stacks if n.endswith("gate_up_proj")): torch.tensor(values, dtype=torch.float64)
        for each in mixtures(model)
    }


@pytest.mark.parametrize(
    ("kind", "sparsity", "removed"),
    [
        ("mixtral", 0.25, [1, 7]),  # of equal scores, the lower index is kept
        ("mixtral", 0.3, [1, 7]),  # round(2.4)
        ("mixtral", 0.35, [1, 5, 7]),  # round(2.8)
        ("mixtral", 0.75, [0, 1, 4, 5, 6, 7]),
        ("deepseek_v3", 0.25, [1, 7]),  # one of 0 to 3 and one of 4 to 7
        ("deepseek_v3", 0.5, [0, 1, 5, 7]),
        ("gpt_oss", 0.05, []),
    ],
)
def test_the_lowest_scores_of_each_layer_or_group_go(kind: str, sparsity: float, removed: list[int]) -> None:
    plan = pruning.plan(network_of(kind), scored([3, 1, 9, 9, 4, 2, 3, 2]), unit="expert", sparsity=sparsity)
    if kind == "deepseek_v3" and sparsity == 0.25:
        assert set(map(tuple, removed_of(plan).values())) == {(1, 7)}
    assert all(sorted(each) == removed for each in removed_of(plan).values())
    assert plan.details["removed"] == len(removed) / EXPERTS


def hold_law(model: Any, plan: pruning.PruningPlan, **given: Any) -> None:
    smaller = without(model, removed_of(plan))
    with torch.no_grad():
        expected, found = smaller(TOKENS, **given).logits, model(TOKENS, **given).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def prune(model: Any, sparsity: float = 0.5) -> pruning.PruningPlan:
    return pruning.prune(model, "reap", sparsity=sparsity, batches=[TOKENS])


@sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_masked_equals_smaller_by_hand(kind: str) -> None:
    model = network_of(kind).float()
    dense = model(TOKENS).logits
    plan = prune(model)
    assert not torch.allclose(model(TOKENS).logits, dense)
    hold_law(model, plan)
    mask = torch.ones_like(TOKENS)
    mask[1, :3] = 0
    hold_law(model, plan, attention_mask=mask)
    hold_law(copy.deepcopy(model), plan)
    hold_law(copy.deepcopy(model).bfloat16(), plan)
    pruning.remove_all(model)
    hold_law(model, plan)


def test_masks_stay_in_force_in_files_copies_and_keepers() -> None:
    model = network_of("mixtral").float()
    plan = prune(model)
    expected = model(TOKENS).logits
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(TOKENS).logits, expected)
    pruning.remove_all(model)
    loaded = network_of("mixtral").float()
    loaded.load_state_dict(model.state_dict())
    assert not torch.allclose(loaded(TOKENS).logits, expected), "zeros alone do not tell routers"
    pruning.route_among_survivors(loaded)
    torch.testing.assert_close(loaded(TOKENS).logits, expected)
    kept = network_of("mixtral").float()
    pruning.MaskKeeper(kept, plan.masks)
    torch.testing.assert_close(kept(TOKENS).logits, expected)


def test_more_masks_and_dense_masks_change_the_routes() -> None:
    model = network_of("mixtral").float()
    dense = model(TOKENS).logits
    first, second = prune(model, 0.25), prune(model, 0.5)
    assert all({*removed_of(first)[n]} < {*own} for n, own in removed_of(second).items())
    assert [len(each) for each in removed_of(second).values()] == [4, 4]
    hold_law(model, second)
    ones = {name: torch.ones_like(mask) for name, mask in second.masks.items()}
    pruning.MaskSet(ones).apply(model, replace=True)
    torch.testing.assert_close(model(TOKENS).logits, dense)


@pytest.mark.parametrize("holder", ["hooks", "keeper"])
def test_after_five_steps_with_momentum_masked_still_equals_smaller(holder: str) -> None:
    model = network_of("deepseek_v3").float().train()
    plan = prune(model)
    smaller = without(model, removed_of(plan))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, smaller)]
    if holder == "keeper":
        pruning.remove_all(model)
        optimizers[0] = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        pruning.MaskKeeper(model, plan.masks).attach(optimizers[0])
    for _ in range(5):
        for network, optimizer in zip((model, smaller), optimizers, strict=True):
            optimizer.zero_grad()
            loss(network, TOKENS).backward()
            optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, smaller(TOKENS).logits, rtol=1e-4, atol=1e-4)
    hold_law(model, plan)


def test_products_that_remain_are_those_of_the_smaller_network() -> None:
    model = network_of("mixtral").float()
    dense = macs(model, TOKENS)
    smaller = macs(without(model, removed_of(prune(model))), TOKENS)
    masked = macs(model, TOKENS)
    assert sum(each.total for each in masked.layers.values()) == sum(each.total for each in dense.layers.values())
    assert sum(each.remaining for each in masked.layers.values()) == sum(each.total for each in smaller.layers.values())


def test_tokens_are_generated_as_by_the_smaller_network() -> None:
    model = network_of("qwen3_moe").float()
    smaller = without(model, removed_of(prune(model)))
    texts = [each.generate(TOKENS[:1], max_new_tokens=6, do_sample=False) for each in (model, smaller)]
    assert torch.equal(*texts)


@pytest.mark.parametrize(("kind", "key"), [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts")])
def test_stock_classes_load_the_smaller_network(kind: str, key: str, tmp_path: Path) -> None:
    model = network_of(kind).float()
    plan = prune(model)
    smaller: Any = pruning.smaller_transformer(model, {"input_ids": TOKENS})
    assert smaller.resized.config == {key: (8, 4)}
    assert smaller.resized.difference < 1e-5
    smaller.save_pretrained(tmp_path)
    loaded, said = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said.values())
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    model.model.layers[0].mlp.experts.gate_up_proj_orig.data[removed_of(plan)["model.layers.0.mlp.experts"][0]] = 1
    pruning.remove_all(model)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[removed_of(plan)["model.layers.0.mlp.experts"][0]] = 1
    with pytest.raises(ValueError, match=r"^`model` must have equally many experts that are not 0 in each layer"):
        pruning.smaller_transformer(model)


@pytest.mark.parametrize(("kind", "sparsity", "possible"), [("mixtral", 0.05, 0.125), ("deepseek_v3", 0.125, 0.25)])
def test_a_pruning_that_removes_no_expert_says_so(kind: str, sparsity: float, possible: float) -> None:
    said = rf"no expert is removed, because a sparsity of {sparsity} takes half .* type {possible}$"
    with pytest.warns(UserWarning, match=said):
        pruning.prune(network_of(kind), "expert_magnitude", sparsity=sparsity)
    assert "limits" not in pruning.plan(network_of(kind), "expert_magnitude", sparsity=possible).details


def test_refusals_come_before_anything_is_computed() -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a score was computed")

    def refused(said: str, model: nn.Module, **given: Any) -> None:
        with pytest.raises(ValueError, match=said):
            pruning.plan(model, never, **{"unit": "expert", "sparsity": 0.5, **given})

    refused(r"leaves 1 of the 8 experts of .* at least 2 .* at most 0.75", network_of("mixtral"), sparsity=0.9)
    refused(r"leaves 1 of the 4 experts of .* at least 2 .* at most 0.5", network_of("deepseek_v3"), sparsity=0.75)
    refused(r"is for mixtures whose experts are stacked in parameters", nn.Linear(2, 2))
    refused(r"`scope.kind` .='global'. cannot be combined .*'layer'", network_of("mixtral"), scope="global")
    for budget in ("macs", "active_parameters"):
        refused(
            rf"`scope.budget` .='{budget}'. does not shrink with whole experts", network_of("mixtral"), budget=budget
        )
    few = network_of("deepseek_v3", n_group=4, topk_group=2)
    refused(r"leaves 1 of the 2 experts of each of the 4 groups .* at least 2 .* type unit='mlp', as none can go", few)
    names = [name for name, each in network_of("mixtral").named_parameters() if "layers.0" in name and each.ndim > 1]
    refused(r"must name the experts of all layers", network_of("mixtral"), parameters=names)
    refused(r"whose router has another form: it must", network_of("llama4_text", intermediate_size_mlp=8))
    alone = network_of("deepseek_v3", n_group=1, topk_group=1, num_experts_per_tok=1)
    refused(
        r"leaves 1 of the 8 experts of .* at least 2 ", alone, sparsity=0.9
    )  # it ranks its one group by two experts
    hashed = network_of("mixtral")
    hashed.model.layers[0].mlp.gate.register_buffer("experts_of_token", torch.zeros(16, 2, dtype=torch.long))
    refused(r"'model.layers.0.mlp', whose router has another form: .* by no table", hashed)
    uneven = network_of("mixtral")
    other = network_of("mixtral", experts=6)
    uneven.model.layers[1].mlp = other.model.layers[1].mlp
    refused(r"removes equally many experts in each layer, and 'model.layers.1.mlp' has 6 experts", uneven)


@pytest.mark.parametrize("score", [Score("fpgm"), Score("taylor", {"form": "filter"})])
def test_scores_of_outputs_refuse_hidden_units_of_experts_before_a_pass(score: Score) -> None:
    def never(*_: object) -> Tensor:
        raise AssertionError

    choices = Choices(score, Unit("mlp"), schedule=Schedule(sparsity=0.5))
    with pytest.raises(ValueError, match=r"`score.kind` .* ranks outputs of layers, but 'model.layers.0.*down_proj'"):
        pruning.prune(network_of("mixtral"), choices, batches=[TOKENS], loss=never)


def test_a_budget_of_multiplications_counts_the_rows_of_the_router_that_are_left() -> None:
    model = network_of("mixtral")
    pruning.prune(model, "expert_magnitude", sparsity=0.5)
    masks, scope = pruning.MaskSet.collect(model), Scope(budget="macs", kind="layer")
    held = family_groups(model, Unit("mlp"), scope, TOKENS).beside(masks)
    measured = macs(model, TOKENS).remaining
    pruning.remove_all(model)
    plain = family_groups(model, Unit("mlp"), scope, TOKENS).beside(masks)

    assert held.remaining({}, "macs") == plain.remaining({}, "macs") == measured


def test_a_score_in_place_of_a_method_or_of_choices_is_told_how_to_be_typed() -> None:
    with pytest.raises(ValueError, match=r"is a score and no method; type score='msan', unit='expert'"):
        pruning.prune(nn.Linear(2, 2), "msan", sparsity=0.5)
    with pytest.raises(ValueError, match=r"`method` .='left_out_expert'.* type score='left_out', unit='expert'"):
        pruning.prune(nn.Linear(2, 2), "left_out_expert", sparsity=0.5)
    with pytest.raises(ValueError, match=r"type score='block_influence', unit='layer'"):
        pruning.prune(nn.Linear(2, 2), "block_influence", sparsity=0.5)
    with pytest.raises(TypeError, match=r"`score` .='msan'. must be a Score of pruning.choices.axes; in a call"):
        pruning.Choices(score="msan")  # type: ignore[arg-type]
