"""Stacked experts are pruned block by block as by plain loops over the experts, with the tokens routed to each."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sampling import sampled
from torch import Tensor, nn

import pruning
from pruning.mixtures.finding import mixtures
from pruning.reconstruction.layer_problem import LayerProblem, Solution
from tests.pruning.mixtures.test_survivors import network

KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "olmoe": {"norm_topk_prob": False},
    "deepseek_v3": {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
    | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "head_dim": 4, "n_shared_experts": 1},
    "gpt_oss": {},
}
PADDED = {
    "input_ids": torch.randint(1, 16, (6, 8), generator=torch.Generator().manual_seed(0)),
    "attention_mask": torch.ones(6, 8, dtype=torch.int64).index_put_(
        (torch.tensor([0, 0, 3]), torch.arange(3)), torch.tensor(0)
    ),
}
BATCHES = [PADDED, {"input_ids": PADDED["input_ids"].flip(0)}]


def mixture(kind: str) -> Any:
    found = network(kind, **KINDS[kind]).double()
    found.set_experts_implementation("eager")
    return found


def routed_inputs(model: Any, experts: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the tokens that reach the experts of a mixture, without padding, and the experts of each."""
    calls: list[tuple[Tensor, Tensor]] = []
    with experts.register_forward_pre_hook(lambda _, args: calls.append(args[:2])):
        for batch in BATCHES:
            model(**batch)
    counts = [batch.get("attention_mask", torch.ones(6, 8)).flatten() != 0 for batch in BATCHES]
    pairs = [(x[own], chosen[own]) for (x, chosen), own in zip(calls, counts, strict=True)]
    return torch.cat([x for x, _ in pairs]), torch.cat([chosen for _, chosen in pairs])


def after_gate(kind: str, experts: Any, x: Tensor, expert: int) -> Tensor:
    """Return the inputs of an expert's second matrix."""
    gate: Tensor
    up: Tensor
    if kind != "gpt_oss":
        gate, up = (x @ experts.gate_up_proj[expert].mT).chunk(2, dim=1)
        return nn.functional.silu(gate) * up
    both: Tensor = x @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
    gate, up = both[:, ::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def statistics(x: Tensor) -> Tensor:
    return 2 / len(x) * x.mT @ x if len(x) else torch.eye(x.shape[1], dtype=x.dtype)


def plain_wanda(weight: Tensor, hessian: Tensor) -> Tensor:
    """Prune half of each row, entry by entry."""
    found = weight.clone()
    for row in found:
        scores = [abs(float(w)) * float(hessian[j, j]) ** 0.5 for j, w in enumerate(row)]
        for j in sorted(range(len(scores)), key=scores.__getitem__)[: len(scores) // 2]:
            row[j] = 0
    return found


def magnitude(weight: Tensor, _hessian: Tensor) -> Tensor:
    return weight * (weight.abs() > weight.abs().flatten().sort().values[weight.numel() // 2 - 1])


def damped(hessian: Tensor) -> Tensor:
    return hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=hessian.dtype)


def plain_sparsegpt(weight: Tensor, hessian: Tensor) -> Tensor:
    """Prune half of the entries, column by column, by the inverse of what is left of the statistics."""
    found, level = weight.clone(), damped(hessian)
    inverses = [torch.linalg.inv(level[j:, j:]) for j in range(len(level))]
    scores = torch.stack([weight[:, j] ** 2 / inverses[j][0, 0] for j in range(len(level))], dim=1)
    gone = scores.flatten().argsort()[: weight.numel() // 2]
    pruned = torch.zeros(weight.numel(), dtype=torch.bool).index_fill_(0, gone, True).view_as(weight)
    for j, inverse in enumerate(inverses):
        for row in pruned[:, j].nonzero().flatten():
            found[row, j:] -= found[row, j] / inverse[0, 0] * inverse[0]
            found[row, j] = 0
    return found


def plain_alps(weight: Tensor, hessian: Tensor) -> Tensor:
    """Prune half of the entries by two copies that approach each other; then refit each row exactly."""
    level = damped(hessian)
    scale = level.diagonal().sqrt()
    normed, whole = level / scale / scale[:, None], weight * scale

    def largest(values: Tensor) -> Tensor:
        gone = values.abs().flatten().argsort()[: values.numel() // 2]
        return torch.ones(values.numel(), dtype=torch.bool).index_fill_(0, gone, False).view_as(values)

    kept = seen = largest(whole)
    dense, sparse, dual, penalty, has_grown = whole, whole * kept, torch.zeros_like(whole), 0.1, False
    for step in range(1, 301):
        inverse = torch.linalg.inv(normed + penalty * torch.eye(len(normed), dtype=normed.dtype))
        dense = (whole @ normed - dual + penalty * sparse) @ inverse
        kept = largest(dense + dual / penalty)
        sparse = (dense + dual / penalty) * kept
        dual = dual + penalty * (dense - sparse)
        if step % 3:
            continue
        changed = int((kept ^ seen).sum()) / int(seen.sum())
        growth = 1.3 if changed > 0.1 else 1.2 if changed > 0.005 else 1.1
        if changed > 0.005 or (changed and has_grown):
            penalty, has_grown = penalty * growth, True
        elif has_grown:
            break
        else:
            penalty /= 5
            if changed:
                dense, sparse, dual = whole, whole * largest(whole), torch.zeros_like(whole)
                kept = largest(whole)
        seen = kept
        if step > 30 and changed < 0.0003:
            break
    found, kept = torch.zeros_like(whole), largest(dense)
    for row, mask in enumerate(kept):
        found[row, mask] = torch.linalg.solve(normed[mask][:, mask], normed[mask] @ whole[row])
    return found / scale


SOLVERS = {"wanda": plain_wanda, "sparsegpt": plain_sparsegpt, "alps": plain_alps}


def error(weight: Tensor, dense: Tensor, hessian: Tensor) -> float:
    return float((((weight - dense) @ hessian) * (weight - dense)).sum())


@torch.no_grad()
@pytest.mark.parametrize("method", SOLVERS)
@sampled(16)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_pruned_as_by_plain_loops(kind: str, method: str) -> None:
    """Masks of Wanda are equal, errors of the others within 0.5%; each block gets the outputs of pruned ones."""
    pruned = mixture(kind)
    dense = copy.deepcopy(pruned)
    names = [name for each in mixtures(pruned) for name in each.stacks if "bias" not in name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no token is routed to")
        result = pruning.layerwise(pruned, method, BATCHES, sparsity=0.5, parameters=names, dtype=torch.float64)

    own, turned = copy.deepcopy(dense), kind == "gpt_oss"  # becomes the pruned one, block by block
    for each in mixtures(dense):
        experts: Any = dense.get_submodule(each.experts)
        x, chosen = routed_inputs(own, own.get_submodule(each.experts))
        errors = [0.0, 0.0]
        for expert in range(each.count):
            tokens = x[(chosen == expert).any(dim=1)]
            inputs = {"gate_up_proj": tokens, "down_proj": after_gate(kind, experts, tokens, expert)}
            for leaf, given in inputs.items():
                name = f"{each.experts}.{leaf}"
                assert result.layers[name].tokens[expert] == len(tokens)
                first, last = (model.get_parameter(name).detach()[expert] for model in (dense, pruned))
                first, last = (first.mT, last.mT) if turned else (first, last)
                solver = SOLVERS[method] if len(tokens) or method == "wanda" else magnitude
                expected = solver(first, statistics(given))
                if method == "wanda" or not len(tokens):
                    assert torch.equal(last != 0, expected != 0)
                errors[0] += error(last, first, statistics(given)) * len(tokens)
                errors[1] += error(expected, first, statistics(given)) * len(tokens)
        assert errors[0] == pytest.approx(errors[1], rel=0.005 if method != "wanda" else 1e-9)
        for name in each.stacks:
            own.get_parameter(name).data.copy_(pruned.get_parameter(name))


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:no token is routed to")
@sampled(2)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_one_expert_at_a_time_interrupted_or_from_files_gives_equal_bits(kind: str, tmp_path: Path) -> None:
    whole, single, streamed = network(kind), network(kind), network(kind)
    done: list[Any] = []
    asked: Any = {"sparsity": 0.5, "blocks": "model.layers"}
    pruning.layerwise(whole, "sparsegpt", BATCHES, **asked, on_block=done.append)
    assert whole.config._experts_implementation != "eager", "the network's own setting is back"

    with pytest.raises(ZeroDivisionError):
        pruning.layerwise(single, "sparsegpt", BATCHES, **asked, statistics_bytes=1, on_block=lambda _: 1 / 0)
    calls = iter(range(30))
    experts = single.get_submodule(mixtures(single)[1].experts)

    def interrupt(*_: object) -> None:
        if next(calls) == 9:  # within the statistics of the second block
            raise KeyboardInterrupt

    with experts.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        pruning.layerwise(single, "sparsegpt", BATCHES, **asked, statistics_bytes=1, done=done[0])
    assert single.config._experts_implementation == whole.config._experts_implementation
    pruning.layerwise(single, "sparsegpt", BATCHES, **asked, statistics_bytes=1, done=done[0])
    assert same(whole, single)

    (tmp_path / "dense").mkdir()
    save_file(dict(streamed.state_dict()), tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    places: Any = {"offload": tmp_path / "dense", "output": tmp_path / "pruned", "statistics_bytes": 5000}
    for module in streamed.modules():
        for leaf, own in module._parameters.items():
            module._parameters[leaf] = None if own is None else nn.Parameter(own.to("meta"))
    pruning.layerwise(streamed, "sparsegpt", BATCHES, **asked, **places)
    state: Any = {
        n: value for file in (tmp_path / "pruned").glob("*.safetensors") for n, value in load_file(file).items()
    }
    assert all(torch.equal(state[name], value) for name, value in whole.state_dict().items())


def test_all_experts_see_all_tokens_where_asked_for() -> None:
    model = network("mixtral")
    x, _ = routed_inputs(model, model.get_submodule(first := mixtures(model)[0].experts))
    seen: list[Tensor] = []

    def note(problem: LayerProblem) -> Solution:
        seen.append(problem.hessian)
        return Solution(problem.weight, problem.kept)

    result = pruning.layerwise(
        model, note, BATCHES, sparsity=0.0, parameters=[f"{first}.*"], calibrate_all_experts=True
    )
    assert all([*each.tokens] == [93] * 6 for each in result.layers.values())
    for hessian in seen[:6]:
        torch.testing.assert_close(hessian, 2 / 93 * x.mT @ x)
    with pytest.raises(ValueError, match=r"`calibrate_all_experts` \(=True\) needs stacked experts"):
        pruning.layerwise(
            nn.Sequential(nn.Linear(4, 4)), "wanda", [torch.ones(2, 4)], sparsity=0.5, calibrate_all_experts=True
        )


@pytest.mark.parametrize("limit", ["4GB", -1, True])
def test_limits_that_are_no_numbers_of_bytes_are_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"^`statistics_bytes` \(=.*\) must be a number of bytes, such as"):
        pruning.layerwise(network("mixtral"), "wanda", BATCHES, sparsity=0.5, statistics_bytes=limit)


def test_experts_without_tokens_are_told_with_the_rarest_of_the_others() -> None:
    model = network("gpt_oss")
    model.get_parameter("model.layers.0.mlp.router.bias").data[4] = -100
    name = "model.layers.0.mlp.experts.down_proj"
    dense = model.get_parameter(name).detach().clone()
    with pytest.warns(UserWarning, match=r"routed to .*down_proj\[4\].* pruned by magnitude; the rarest") as told:
        found = pruning.layerwise(model, "sparsegpt", BATCHES, sparsity=0.5, parameters=[name])
    assert len(told) == 1
    tokens = found.layers[name].tokens
    assert not tokens[4]
    assert f"has {min(each for each in tokens if each)} token" in str(told[0].message)
    assert torch.equal(model.get_parameter(name)[4], magnitude(dense[4], dense))


class Whole(nn.Module):
    """Experts that multiply all tokens by all matrices at once, as those of Llama 4; other experts' tokens are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(3, 8, 12)), nn.Parameter(torch.randn(3, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.bmm(x, self.gate_up_proj).chunk(2, -1)
        return torch.baddbmm(torch.zeros(3, 1, 8), up * torch.sigmoid(gate), self.down_proj)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Whole()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        tokens = x.flatten(0, 1)
        routed = torch.stack([tokens * (torch.arange(len(tokens)) % 3 == expert)[:, None] for expert in range(3)])
        found: Tensor = x + self.experts(routed).sum(0).view_as(x)
        return found


def test_rows_of_zeros_in_products_by_whole_stacks_are_no_tokens() -> None:
    torch.manual_seed(0)
    model, seen = Layer(), []
    x, mask = torch.randn(2, 6, 8), torch.tensor([[0, 0, 0, 0, 1, 1], [1] * 6])

    def note(problem: LayerProblem) -> Solution:
        seen.append(problem.hessian)
        return Solution(problem.weight, problem.kept)

    batch = {"x": x, "attention_mask": mask}
    found = pruning.layerwise(model, note, [batch], sparsity=0.0, blocks="experts")
    assert [[*each.tokens] for each in found.layers.values()] == [[2, 3, 3], [2, 3, 3]]
    own = x.flatten(0, 1)[6::3]
    torch.testing.assert_close(seen[0], 2 / 2 * own.mT @ own)
