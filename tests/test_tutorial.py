"""The tutorial own-project.md: its files and commands work, unchanged, in an empty directory."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```$", (ROOT / "docs/tutorials/own-project.md").read_text(), re.DOTALL | re.MULTILINE
)


@pytest.mark.timeout(900)
@pytest.mark.slow  # a sweep of 21 stages, and an export
def test_an_own_project_is_pruned_compared_exported_and_loaded_elsewhere(tmp_path: Path) -> None:
    said = []
    for language, block in BLOCKS:
        if language == "bash":
            command = [sys.executable if word == "python" else word for word in shlex.split(block)]
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "110"},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            said.append(done.stdout)
        else:
            path = tmp_path / re.findall(r"^# (\S+\.(?:py|yaml))$", block, re.MULTILINE)[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)

    plan, sweep, compared, _, loaded, in_8_bits = said
    assert "21 unique of 36" in plan
    for line in ("random", "magnitude", "relative"):
        assert f"\n{line}\n" in sweep
        assert f"\n{line}\n" in compared
    page = (tmp_path / "network" / "README.md").read_text()
    ((left, accuracy),) = re.findall(r"(\d+) parameters, test accuracy (.*%)", loaded)
    assert f"| accuracy on test | {accuracy} |" in page
    assert int(left) < 3252 / 2
    assert "deployed as sparse_int8, speed-up over dense" in in_8_bits
