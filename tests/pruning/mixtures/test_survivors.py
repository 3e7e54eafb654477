"""Routers that choose among surviving experts compute what the network without the removed experts computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import pruning
from pruning.choices.axes import FamilyUnit
from pruning.mixtures.finding import expert_dim, mixtures
from pruning.mixtures.routing import Routed, eager_experts, expert_outputs, routed
from pruning.mixtures.survivors import route_among, route_among_survivors, stop_routing_among_survivors, survivors

pytest.importorskip("transformers")
import small_mixtures
import transformers

EXPERTS, REMOVED, KEPT = 6, [1, 4], [0, 2, 3, 5]
TOKENS = torch.tensor([[3, 7, 1, 9, 4], [2, 2, 8, 5, 6]])


def network(kind: str, experts: int = EXPERTS, **given: Any) -> Any:
    """Return a small random mixture in evaluation mode."""
    sizes = {"hidden_size": 12, "intermediate_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 4, "vocab_size": 16}
    sizes |= {"num_local_experts": experts, "num_experts": experts, "n_routed_experts": experts, **given}
    config = transformers.AutoConfig.for_model(kind, num_experts_per_tok=2, pad_token_id=0, **sizes)
    found = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in [*found.parameters(), *(b for n, b in found.named_buffers() if n.endswith("correction_bias"))]:
            each.copy_(0.4 * torch.randn(each.shape, generator=generator))
    return found


def without_experts(model: Any) -> Any:
    """Zero the removed experts and their rows of the router."""
    for mixture in mixtures(model):
        for tensor in (*mixture.router.values(), *mixture.stacks.values()):
            tensor.data[REMOVED] = 0
    return model


KINDS = ("mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "minimax_m2")


@pytest.mark.parametrize("kind", KINDS)
def test_the_masked_network_computes_what_the_smaller_one_computes(kind: str) -> None:
    masked, smaller = without_experts(network(kind)), network(kind, len(KEPT))
    names = {name for each in mixtures(masked) for name in (*each.router, *each.stacks)}
    state = {name: value[KEPT] if name in names else value for name, value in masked.state_dict().items()}
    smaller.load_state_dict(state)
    route_among_survivors(masked)
    torch.testing.assert_close(masked(TOKENS).logits, smaller(TOKENS).logits)
    stop_routing_among_survivors(masked)
    differs = not torch.allclose(masked(TOKENS).logits, smaller(TOKENS).logits)
    assert differs or kind == "glm4_moe"  # its correction of scores chooses none of the removed experts here


def test_the_loss_that_balances_experts_is_that_of_survivors() -> None:
    masked, smaller = without_experts(network("mixtral")), network("mixtral", len(KEPT))
    names = {name for each in mixtures(masked) for name in (*each.router, *each.stacks)}
    smaller.load_state_dict({n: v[KEPT] if n in names else v for n, v in masked.state_dict().items()})
    route_among_survivors(masked)
    losses = [each(TOKENS, labels=TOKENS, output_router_logits=True).loss for each in (masked, smaller)]
    torch.testing.assert_close(losses[0], losses[1])
    losses[0].backward()
    for mixture in mixtures(masked):
        for name in mixture.router:
            gradient = masked.get_parameter(name).grad
            assert gradient[KEPT].any(dim=1).all()
            assert not gradient[REMOVED].any()


@pytest.mark.parametrize("units", [("layer",), ("layer", "expert")])
def test_routers_of_removed_layers_count_in_no_loss(units: tuple[FamilyUnit, ...]) -> None:
    masked = network("mixtral", num_hidden_layers=4)
    for unit in units:
        pruning.prune(masked, "magnitude", unit=unit, sparsity=0.5, scope="layer")
    smaller: Any = pruning.smaller_transformer(masked)
    losses = [each(TOKENS, labels=TOKENS, output_router_logits=True).loss for each in (masked, smaller)]
    torch.testing.assert_close(losses[0], losses[1])


def test_the_loss_reads_unequal_routers_up_to_the_widest() -> None:
    model = network("mixtral")
    first, second = (mixture.experts for mixture in mixtures(model))
    alive = {first: torch.arange(EXPERTS) < 5, second: torch.arange(EXPERTS) < 3}
    route_among(model, alive)
    found = model(TOKENS, labels=TOKENS, output_router_logits=True)
    assert [each.shape[1] for each in found.router_logits] == [5, 5]
    shares, counts = torch.zeros(5), torch.zeros(5)
    for scores in found.router_logits:
        own = scores[:, scores[0].isfinite()].softmax(1)
        shares[: own.shape[1]] += own.sum(0)
        counts += torch.bincount(own.topk(2).indices.flatten(), minlength=5)
    torch.testing.assert_close(found.aux_loss, 5 * (counts / 20 * shares / 20).sum())
    stop_routing_among_survivors(model)
    found = model(TOKENS, output_router_logits=True)
    assert [each.shape[1] for each in found.router_logits] == [EXPERTS, EXPERTS]


@pytest.mark.parametrize(
    ("kind", "left", "said"), [("mixtral", [0], "leave 1 of"), ("deepseek_v3", [0, 1, 2, 4, 5], "leave 3, 2 of")]
)
def test_masks_that_leave_no_choice_are_refused(kind: str, left: list[int], said: str) -> None:
    model = small_mixtures.network_of(kind)
    alive = {each.experts: torch.zeros(each.count, dtype=torch.bool) for each in mixtures(model)}
    for each in alive.values():
        each[left] = True
    with pytest.raises(ValueError, match=f"^the masks {said} the experts .* needs 2 or more"):
        route_among(model, alive)


def test_a_call_that_fails_leaves_all_experts_in_place() -> None:
    model = without_experts(network("mixtral"))
    route_among_survivors(model)
    before = {name: value.shape for name, value in model.state_dict().items()}
    (first, _) = mixtures(model)
    hook = model.get_submodule(first.experts).register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(TOKENS)
    hook.remove()
    assert {name: value.shape for name, value in model.state_dict().items()} == before
    assert model.num_experts == EXPERTS
    torch.testing.assert_close(copy.deepcopy(model)(TOKENS).logits, model(TOKENS).logits)


def test_networks_whose_experts_all_survive_have_no_hooks() -> None:
    model = network("mixtral")
    for mixture in mixtures(model):
        for tensor in mixture.router.values():
            tensor.data[0] = 0  # a row of zeros alone removes nothing
        assert survivors(mixture).all()
    route_among_survivors(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_experts_times_their_weights_are_the_outputs_of_the_mixture(kind: str) -> None:
    model = network(kind)
    calls: list[Routed] = []
    outputs: list[torch.Tensor] = []
    mixture = mixtures(model)[-1]
    experts = model.get_submodule(mixture.experts)
    with experts.register_forward_hook(lambda _, __, found: outputs.append(found)), eager_experts(model):
        with routed(model, mixture, calls.append):
            model(TOKENS)
        (call,), (whole,) = calls, outputs
        assert call.experts.shape == (10, 2)
        parts = [expert_outputs(experts, call, slot) * call.weights[:, slot : slot + 1] for slot in range(2)]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize(
    "kind", [each if each == "mixtral" else pytest.param(each, marks=pytest.mark.slow) for each in small_mixtures.KINDS]
)
def test_a_shrunk_network_has_no_row_of_a_removed_expert(kind: str) -> None:
    masked = small_mixtures.network_of(kind)
    dense = masked(TOKENS).logits
    pruning.prune(masked, "magnitude", unit="expert", sparsity=0.5)
    smaller: Any = pruning.shrink(masked, {"input_ids": TOKENS})
    torch.testing.assert_close(smaller(TOKENS).logits, masked(TOKENS).logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(masked(TOKENS).logits, dense)
    assert smaller.shrunk.form == "module"
    assert not smaller.shrunk.kept
    plain = copy.deepcopy(masked)
    pruning.remove_all(plain)
    whole, left = plain.state_dict(), smaller.state_dict()
    for mixture in mixtures(plain):
        for name, tensor in {**mixture.router, **mixture.stacks}.items():
            dim = expert_dim(tensor, mixture.count)
            assert left[name].shape[dim] == mixture.count // 2
            kept = smaller.shrunk.left[name].expand(tensor.shape)
            torch.testing.assert_close(whole[name][kept], left[name].flatten())
    assert [each.count for each in mixtures(smaller)] == [each.count // 2 for each in mixtures(plain)]
