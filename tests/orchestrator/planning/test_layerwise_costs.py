"""Memory and time of pruning layer by layer: the table of the page, sizes of blocks, and lines of the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_language_models import BLOCKS, INNER, WIDTH, write_gguf, write_text
from small_trials import composed, planned

from orchestrator.planning.expert_counts import Experts
from orchestrator.planning.layerwise_costs import BlockSizes, block_sizes, layerwise_costs, operations, peak_memory

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "layerwise.md"
NONE = Experts(1, 1)
PUBLISHED = {"1B": (16, 2048, 8192, 1.0e9), "7B": (32, 4096, 11008, 6.5e9), "70B": (80, 8192, 28672, 68e9)}
"""Name -> blocks, hidden size, widest inputs, weights in blocks of Llama networks."""


def test_the_table_of_the_page_is_the_arithmetic() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    start = next(place for place, row in enumerate(rows) if [cell.strip() for cell in row[1:]] == [*PUBLISHED])
    cells = {row[0].split(",")[0].strip(): row[1:] for row in rows[start + 3 : start + 7]}

    for column, (blocks, width, widest, weights) in enumerate(PUBLISHED.values()):
        parts = peak_memory(BlockSizes(blocks, width, widest, int(weights), 0, 0), 128 * 2048, 2)
        for name, size in parts.items():
            row = next(row for title, row in cells.items() if title.startswith(name))
            shown = row[column].strip().removesuffix(" GB")
            assert f"{size / 1e9:.{len(shown.partition('.')[2])}f}" == shown, name


def test_operations_are_those_of_passes_and_statistics() -> None:
    shapes = {"layers.0.a.weight": (3, 2), "layers.1.b.weight": (2, 5), "norm.weight": (7,), "h.weight": (9, 9)}
    sizes = block_sizes(shapes, NONE, all_tokens=False)

    assert sizes == BlockSizes(blocks=2, width=2, widest=5, weights=16, multiplied=16, squares=29)
    assert sizes is not None
    assert operations(sizes, 10) == 6 * 16 * 10 + 2 * 10 * 29
    assert block_sizes({"head.weight": (3, 2)}, NONE, all_tokens=False) is None


STACKED = {"layers.1.moe.input_linear.weight": (4, 6, 5)}
TRANSPOSED = {"layers.1.mlp.experts.gate_up_proj": (4, 5, 6), "layers.1.mlp.experts.gate_up_proj_bias": (4, 6)}
SINGLE = {f"layers.1.mlp.experts.{number}.w1.weight": (6, 5) for number in range(4)}


@pytest.mark.parametrize("experts", [STACKED, TRANSPOSED, SINGLE])
def test_experts_multiply_the_tokens_that_are_routed_to_them_or_all_in_one_of_three_passes(
    experts: dict[str, tuple[int, ...]],
) -> None:
    shapes = {"layers.1.mlp.gate.weight": (4, 5), "norm.weight": (5,)} | experts
    routed, everything = (block_sizes(shapes, Experts(4, 1), all_tokens=each) for each in (False, True))

    assert routed == BlockSizes(1, 5, 5, weights=20 + 120, multiplied=20 + 30, squares=25 + 25)
    assert everything is not None
    assert everything.multiplied == pytest.approx(20 + 30 + 40)
    assert everything.squares == 25 + 100


@pytest.mark.parametrize(("method", "lines"), [("sparsegpt", 2), ("wanda", 2), ("magnitude", 0)])
def test_a_plan_tells_the_costs_of_stages_that_prune_layer_by_layer(tmp_path: Path, method: str, lines: int) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    write_text(tmp_path / "a.txt")
    files = (f"model.weights={tmp_path / 'tiny.gguf'}", f"data.root={tmp_path / 'a.txt'}", "data.block=16")
    plan = planned(composed("+sweep=smollm2", *files, "score.examples=8", f"method={method}"))
    found = [*layerwise_costs(plan, (), rough=True)]

    assert len(found) == lines
    assert [*layerwise_costs(plan, (), rough=False)] == found[:1]
    assert not [*layerwise_costs(plan, plan.stages, rough=True)]
    if found:
        weights = BLOCKS * (4 * WIDTH**2 + 3 * WIDTH * INNER)
        network = 4 * (weights + (2 * BLOCKS + 1) * WIDTH + 100 * WIDTH)
        assert f"activations {4 * 8 * 16 * WIDTH / 1e3:.1f} kB, network {network / 1e3:.1f} kB" in found[0]
        assert f"statistics and solving {30 * INNER**2 / 1e3:.1f} kB, masks {weights / 1e3:.1f} kB" in found[0]
        assert "128 tokens on 1 core;" in found[1]
