"""CONTRIBUTING.md: its example prunes by the laws of a method; hooks and workflow run what CI runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

import pruning

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_a_pruning_method_in_fifteen_lines() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {"__name__": "mine"}
    exec(code, names)
    method = names["CloseToTheMean"]
    module = nn.Linear(4, 1, bias=False)
    module.weight.data = torch.tensor([[0.0, 3.0, 4.0, 9.0]])  # of mean 4

    method.apply(module, "weight", amount=0.5)
    assert module.weight_mask.tolist() == [[1.0, 0.0, 0.0, 1.0]]
    method.apply(module, "weight", amount=1)  # of 0 and 9, whose mean is 4.5: the first of equals
    assert module.weight_mask.tolist() == [[0.0, 0.0, 0.0, 1.0]]

    pruning.remove(module, "weight")
    assert module.weight.tolist() == [[0.0, 0.0, 0.0, 9.0]]


def test_the_hooks_and_the_workflow_run_what_ci_runs() -> None:
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = {hook["entry"].split()[0] for hook in hooks["hooks"]}
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()

    assert tools == set(re.findall(r"^\.venv/bin/\w+", (ROOT / "scripts" / "check").read_text(), re.MULTILINE))
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
