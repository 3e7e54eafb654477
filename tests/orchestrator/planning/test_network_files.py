"""Shapes of weights from the headers of weight files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from small_language_models import BLOCKS, INNER, WIDTH, write_gguf

from orchestrator.planning.network_files import weight_shapes


def test_shapes_come_from_the_headers_of_weight_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    from_gguf = weight_shapes({"weights": str(tmp_path / "tiny.gguf")})
    save_file({"a.weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")

    assert len(from_gguf) == 2 + 9 * BLOCKS
    assert from_gguf["blk.0.ffn_down.weight"] == (WIDTH, INNER)
    assert weight_shapes({"weights": str(tmp_path / "model.safetensors")}) == {"a.weight": (3, 2)}
    (tmp_path / "b.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:500])
    (tmp_path / "b.safetensors").write_bytes(b"short")
    assert [weight_shapes({"weights": str(tmp_path / name)}) for name in ("b.gguf", "b.safetensors")] == [{}, {}]
    assert weight_shapes({"weights": None}) == weight_shapes({"weights": "memory://a.gguf"}) == {}
