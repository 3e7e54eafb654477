"""Measure how much faster SmolLM2 computes a prompt, and generates a token, with fewer layers and narrower MLPs.

    python scripts/benchmarks/bench_smaller_tokens.py [--blocks 8] [--seconds 20]

The sizes are those to which `shortgpt`, `minitron_mlp` and `minitron` bring SmolLM2-135M at 75% and 50% of its
parameters; weights are random, because times do not depend on them. Each network is timed in turns with the dense one,
in one thread, at batch 1: a prompt of 512 tokens, and one more token from cached keys and values.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

from orchestrator.compare.statistics import ratio
from orchestrator.deploy.formats import huggingface_format
from pruning.graph.tracing import Example
from pruning.measure.latency import Call, Make, compare_latency

TOKENS, VOCABULARY = 512, 49152
DENSE = (30, 1536)
"""Number of layers, and of hidden units of each MLP."""
SIZES = {
    "75% shortgpt": (20, 1536),
    "75% minitron_mlp": (30, 887),
    "75% minitron": (25, 1167),
    "50% shortgpt": (11, 1536),
    "50% minitron_mlp": (30, 238),
    "50% minitron": (20, 614),
}


def written(layers: int, hidden: int, place: Path) -> Path:
    """Write a network of SmolLM2's class with these sizes; return its folder."""
    folder = place / f"{layers}_{hidden}"
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def prompt(folder: Path, example: Example) -> Call:
    """Return a call that computes the logits of a prompt."""
    return partial(huggingface_format.load(folder, 1), example)


def token(folder: Path, example: Example) -> Call:
    """Return a call that computes one more token."""
    found = huggingface_format.next_token(folder, 1, example)
    assert found is not None
    return found


def main() -> None:
    """Print a line for each network and what it computes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8, help="parts of a measurement")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of a measurement")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    example = {"input_ids": torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))}
    settings: dict[str, Any] = {"blocks": args.blocks, "seconds": args.seconds, "warmup": 1, "threads": 1}
    with TemporaryDirectory() as place:
        dense = written(*DENSE, Path(place))
        for name, sizes in SIZES.items():
            smaller = written(*sizes, Path(place))
            for what, of in (("prompt", prompt), ("token", token)):
                makes: list[Make] = [partial(of, folder, example) for folder in (dense, smaller)]
                found = compare_latency(*makes, **settings)
                interval = ratio(found.log_ratios)
                assert interval is not None
                times = f"{1000 * found.a:7.1f} ms -> {1000 * found.b:7.1f} ms"
                print(
                    f"{name:<17}{what:<7}{times}  {found.ratio:.2f} [{interval.low:.2f}, {interval.high:.2f}]",
                    flush=True,
                )
    print(f"load average {os.getloadavg()[0]:.1f}, torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
