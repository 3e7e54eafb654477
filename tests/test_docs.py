"""What the how-tos show runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def snippets(page: str) -> list[str]:
    """Return the Python that a page shows, in its order."""
    return re.findall(r"^```python[ \w]*\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow  # imports three large libraries
def test_each_way_to_keep_masks_in_a_loop_leaves_the_network_pruned(tmp_path: Path) -> None:
    pruned = "assert not network[0].weight[~masks['0.weight']].any()\nassert network[0].weight.any()\n"
    of_gpt = "name = 'transformer.h.0.mlp.c_fc.weight'\n" + (
        "assert not model.get_parameter(name)[~masks_of_gpt[name]].any()\nassert model.get_parameter(name).any()\n"
    )
    shown = snippets("own-training-loops.md")
    told = [part + (of_gpt if "GPT2Config" in part else pruned) for part in shown]
    (tmp_path / "shown.py").write_text("\n".join(told))

    done = subprocess.run(
        [sys.executable, "shown.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )

    assert len(shown) == 5
    assert done.returncode == 0, done.stderr
