"""Benchmark block-by-block pruning of a mixture of experts against plain linear layers of equal sizes and tokens.

    python scripts/benchmarks/bench_experts.py [--repeats 3] [--experts 8] [--width 256]

"theirs" is a network whose blocks hold the same matrices as linear layers, of which each gets as many tokens as an
expert gets; "ours" is a Mixtral of transformers with its stacked experts. Both are pruned in turns, in one thread, and
the medians of processor time are compared. The bar is 1.3 times. The exit status is always 0.
"""

from __future__ import annotations

import argparse
import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import pruning
from scripts.benchmarks.ratios import Row, interleaved, shown

TOP_K, LAYERS, VOCABULARY = 2, 2, 512


class Plain(nn.Module):
    """Linear layers of the sizes of experts; each expert's layers get an equal share of the tokens."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.into = nn.ModuleDict({str(each): nn.Linear(width, 4 * width, bias=False) for each in range(experts)})
        self.out = nn.ModuleDict({str(each): nn.Linear(2 * width, width, bias=False) for each in range(experts)})

    def forward(self, hidden_states: Tensor) -> Tensor:
        tokens = hidden_states.flatten(0, 1).repeat(TOP_K, 1)
        found = torch.zeros_like(tokens)
        for index, share in enumerate(torch.arange(len(tokens)).chunk(len(self.into))):
            gate, up = self.into[str(index)](tokens[share]).chunk(2, dim=-1)
            found.index_add_(0, share, self.out[str(index)](nn.functional.silu(gate) * up))
        return found.view(TOP_K, *hidden_states.shape).sum(0)


def networks(experts: int, width: int) -> tuple[nn.Module, nn.Module]:
    """Return (a Mixtral, the same network with plain linear layers in the place of its experts)."""
    config = MixtralConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=experts,
        num_experts_per_tok=TOP_K,
        vocab_size=VOCABULARY,
    )
    torch.manual_seed(0)
    mixture = MixtralForCausalLM(config)
    plain: Any = copy.deepcopy(mixture)
    for layer in plain.model.layers:
        layer.mlp = Plain(experts, width)
    return mixture, plain


def rows(experts: int, width: int, tokens: int, repeats: int) -> Any:
    """Yield a row for each method."""
    mixture, plain = networks(experts, width)
    batches = [{"input_ids": each} for each in torch.randint(VOCABULARY, (8, tokens // 1024, 128))]
    for method in ("wanda", "sparsegpt"):
        found = interleaved(
            {
                name: partial(_case, network, method, batches)
                for name, network in (("theirs", plain), ("ours", mixture))
            },
            repeats,
        )
        what = f"{method}, {experts} experts of width {width}, {tokens} tokens"
        yield Row(what, found["theirs"], found["ours"], "s", found["ours"] / found["theirs"], 1.3)


def _case(network: nn.Module, method: str, batches: list[Any]) -> Any:
    return partial(pruning.layerwise, copy.deepcopy(network), method, batches, sparsity=0.5, blocks="model.layers")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each network")
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer")
    parser.add_argument("--width", type=int, default=256, help="hidden size")
    parser.add_argument("--tokens", type=int, default=8192, help="calibration tokens")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shown(rows(given.experts, given.width, given.tokens, given.repeats))


if __name__ == "__main__":
    main()
