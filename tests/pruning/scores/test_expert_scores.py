"""Scores of whole experts, against loops over tokens and experts in float64 on small networks of transformers.

transformers computes gate weights in float32, so scores agree to 1e-6.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pruning
from pruning.catalogue.scores import SCORES
from pruning.choices.axes import Score
from pruning.choices.combining import Choices
from pruning.mixtures.finding import mixtures

pytest.importorskip("transformers")
from small_mixtures import EXPERTS, TOKENS, loss, network_of

OF_TOKENS = ("expert_frequency", "router_weight", "ean", "man", "msan", "reap")
NAMES = [name for name, row in SCORES.items() if row.of_units == ("expert",)]


def chosen_and_weights(kind: str, block: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their gate weights, from the router's weights as each paper writes it."""
    if kind == "deepseek_v3":
        gate, each = block.gate, EXPERTS // 2
        scores = torch.sigmoid(hidden @ gate.weight.T)
        biased = scores + gate.e_score_correction_bias
        best = biased.view(-1, 2, each).topk(2, dim=-1).values.sum(-1).argmax(-1)
        inside = torch.arange(EXPERTS) // each == best[:, None]
        chosen = biased.masked_fill(~inside, -torch.inf).topk(2, dim=-1).indices
        weights = scores.gather(1, chosen)
        return chosen, 2.5 * weights / (weights.sum(-1, keepdim=True) + 1e-20)
    router = block.router if kind == "gpt_oss" else block.gate
    logits = hidden @ router.weight.T + (router.bias if kind == "gpt_oss" else 0)
    if kind == "gpt_oss":
        top = logits.topk(2, dim=-1)
        return top.indices, top.values.softmax(-1)
    top = logits.softmax(-1).topk(2, dim=-1)
    return top.indices, top.values if kind == "olmoe" else top.values / top.values.sum(-1, keepdim=True)


def output(kind: str, experts: Any, number: int, token: Tensor) -> Any:
    """Return what one expert makes of one token, from its matrices."""
    if kind == "gpt_oss":
        both = token @ experts.gate_up_proj[number] + experts.gate_up_proj_bias[number]
        gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return inner @ experts.down_proj[number] + experts.down_proj_bias[number]
    gate, up = (experts.gate_up_proj[number] @ token).chunk(2)
    return experts.down_proj[number] @ (nn.functional.silu(gate) * up)


def loops(kind: str, model: Any, keep: Tensor | None = None, **given: Any) -> dict[str, dict[str, list[float]]]:
    """Return score -> module of experts -> score of each expert, token by token."""
    inputs: dict[str, Tensor] = {}
    blocks = {each.experts: model.get_submodule(each.experts.rpartition(".")[0]) for each in mixtures(model)}
    handles = [
        block.register_forward_pre_hook(lambda _, args, name=name: inputs.__setitem__(name, args[0]))
        for name, block in blocks.items()
    ]
    with torch.no_grad():
        model(TOKENS, **given)
        found: dict[str, dict[str, list[float]]] = {name: {} for name in OF_TOKENS}
        for name, block in blocks.items():
            hidden = inputs[name].reshape(-1, 12)
            chosen, weights = chosen_and_weights(kind, block, hidden)
            seen: list[list[tuple[float, float]]] = [[] for _ in range(EXPERTS)]
            for place, token in enumerate(hidden):
                for expert, weight in zip(chosen[place].tolist(), weights[place].tolist(), strict=True):
                    if keep is None or keep.flatten()[place]:
                        norm = float(output(kind, block.experts, expert, token).square().sum()) ** 0.5
                        seen[expert].append((weight, norm))
            rules: dict[str, Callable[[list[tuple[float, float]]], float]] = {
                "expert_frequency": lambda own: len(own),
                "router_weight": lambda own: sum(g for g, _ in own),
                "ean": lambda own: sum(f for _, f in own),
                "man": lambda own: sum(f for _, f in own) / max(1, len(own)),
                "msan": lambda own: sum(f * f for _, f in own) / max(1, len(own)),
                "reap": lambda own: sum(g * f for g, f in own) / max(1, len(own)),
            }
            for score, rule in rules.items():
                found[score][name] = [rule(own) for own in seen]
    for handle in handles:
        handle.remove()
    return found


def by_experts(scores: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name.rpartition(".")[0]: values.tolist() for name, values in scores.items()}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"])
def test_scores_of_experts_are_those_of_loops_over_tokens(kind: str) -> None:
    model = network_of(kind, **({"norm_topk_prob": True} if kind == "qwen3_moe" else {}))
    expected = loops(kind, model)
    for score in OF_TOKENS:
        found = by_experts(getattr(pruning.scores, score)(model, [TOKENS[:2], TOKENS[2:]]))
        assert list(found) == list(expected[score])
        for name, values in found.items():
            assert values == pytest.approx(expected[score][name], rel=1e-6)


@pytest.mark.parametrize("left", [True, False])
def test_padding_does_not_count(left: bool) -> None:
    model = network_of("mixtral")
    mask = torch.ones_like(TOKENS)
    mask[1, slice(0, 4) if left else slice(3, 7)] = 0
    expected = loops("mixtral", model, mask, attention_mask=mask)
    for score in OF_TOKENS:
        batch = {"input_ids": TOKENS, "attention_mask": mask}
        found = by_experts(getattr(pruning.scores, score)(model, [batch]))
        for name, values in found.items():
            assert values == pytest.approx(expected[score][name], rel=1e-6)


def test_left_out_refuses_groups_of_experts() -> None:
    with pytest.raises(ValueError, match=r"^`left_out` cannot score the experts of .* groups of equally many"):
        pruning.plan(
            network_of("deepseek_v3"), score="left_out", unit="expert", sparsity=0.25, batches=[TOKENS], loss=loss
        )


def test_experts_without_tokens_score_0_and_removed_ones_get_no_tokens() -> None:
    model = network_of("mixtral")
    with torch.no_grad():
        for mixture in mixtures(model):
            for tensor in (*mixture.router.values(), *mixture.stacks.values()):
                tensor[3] = 0
    frequency = by_experts(pruning.scores.expert_frequency(model, [TOKENS]))
    assert all(values[3] == 0 and sum(values) == 2 * TOKENS.numel() for values in frequency.values())
    for score in OF_TOKENS:
        assert all(each[3] == 0 for each in by_experts(getattr(pruning.scores, score)(model, [TOKENS])).values())


def test_a_plan_counts_tokens_and_names_experts_without_any_that_are_still_there() -> None:
    model = network_of("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.router.bias.data[4] = -100
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.warns(
        UserWarning, match=r"^no token is routed to model.layers.0.mlp.experts.gate_up_proj\[4\], "
    ) as told:
        plan = pruning.prune(model, "reap", sparsity=1 / EXPERTS, batches=[TOKENS])
    tokens = plan.details["tokens"][name]
    assert len(told) == 1
    assert not tokens[4]
    assert sum(tokens) == 2 * TOKENS.numel()
    rarest = min(each for own in plan.details["tokens"].values() for each in own if each)
    assert f"scored 0, to go first; the rarest of the other experts has {rarest} token" in str(told[0].message)
    assert "limits" not in pruning.plan(model, "reap", sparsity=0.25, batches=[TOKENS]).details


def test_expert_magnitude_is_the_norm_of_an_expert_s_weights() -> None:
    model = network_of("mixtral")
    for name, values in by_experts(pruning.scores.expert_magnitude(model)).items():
        stacks = dict(model.get_submodule(name).named_parameters())
        squares = [each.detach().square().sum((1, 2)) for each in stacks.values()]
        expected = [(float(squares[0][e]) + float(squares[1][e])) ** 0.5 for e in range(EXPERTS)]
        assert values == pytest.approx(expected, rel=1e-12)


def test_left_out_is_the_loss_of_the_network_without_an_expert_in_one_layer() -> None:
    model = network_of("mixtral", experts=4)
    whole = float(loss(model, TOKENS).detach())
    found = by_experts(pruning.scores.left_out_expert(model, [TOKENS], loss))
    for mixture in mixtures(model):
        for expert in range(4):
            smaller = copy.deepcopy(model)
            kept = [each for each in range(4) if each != expert]
            block = smaller.get_submodule(mixture.path)
            block.gate.weight = nn.Parameter(block.gate.weight[kept])
            for name in ("gate_up_proj", "down_proj"):
                setattr(block.experts, name, nn.Parameter(getattr(block.experts, name)[kept]))
            block.experts.num_experts = block.gate.num_experts = 3
            expected = float(loss(smaller, TOKENS).detach()) - whole
            assert found[mixture.experts][expert] == pytest.approx(expected, abs=1e-9)


def state(model: nn.Module) -> Iterator[Any]:
    yield from (each.detach().clone() for each in (*model.parameters(), *model.buffers()))
    yield torch.tensor([len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()])
    yield torch.get_rng_state()


@pytest.mark.parametrize("name", NAMES)
def test_a_score_of_experts_changes_nothing(name: str) -> None:
    model = network_of("mixtral").train()
    before = [*state(model)]
    scores = getattr(pruning.scores, name)(model, [TOKENS], loss)
    assert all(torch.equal(*pair) for pair in zip(before, state(model), strict=True))
    assert [*scores] == [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)]
    assert all(values.shape == (EXPERTS,) and values.dtype == torch.float64 for values in scores.values())


@pytest.mark.parametrize("name", NAMES)
def test_networks_without_mixtures_and_other_units_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"must have a mixture whose experts are stacked in parameters"):
        getattr(pruning.scores, name)(nn.Sequential(nn.Linear(3, 2)), [torch.ones(2, 3)], lambda *_: torch.ones(()))
    with pytest.raises(ValueError, match=r"scores only whole units of kind 'expert', not of kind 'entry'"):
        Choices(Score(name))
