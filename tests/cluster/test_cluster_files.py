"""The files in scripts/cluster, which users adapt, are valid for Ray and the shell, and their commands compose."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from composition import composed_tree
from nodes import REPOSITORY

FILES = REPOSITORY / "scripts" / "cluster"
DOCUMENT = REPOSITORY / "docs" / "how-to" / "clusters.md"


def overrides(path: Path) -> list[str]:
    """Return the overrides that a file passes to the orchestrator; of each key, the last one."""
    text = path.read_text().replace("$", "")
    found = re.findall(r"(?<![\w./-])\+?(?:sweep|cluster|store|tracking|objective)[\w.]*=[^\s`'\"),;]+", text)
    return list({each.partition("=")[0]: each for each in found}.values())


@pytest.mark.slow
def test_the_cluster_launcher_takes_the_file() -> None:
    file = FILES / "ray-cluster.yaml"
    code = (
        "import sys, yaml\n"
        "from ray.autoscaler._private import util\n"
        "util.validate_config(util.prepare_config(yaml.safe_load(open(sys.argv[1]))))"
    )
    # In a process of its own, since importing Ray fixes its authentication for all later tests.
    result = subprocess.run(
        [sys.executable, "-c", code, file], capture_output=True, text=True, timeout=120, check=False
    )
    config = yaml.safe_load(file.read_text())

    assert result.returncode == 0, result.stderr
    assert config["head_node_type"] in config["available_node_types"]


def test_the_job_of_kubernetes_is_complete() -> None:
    job = yaml.safe_load((FILES / "rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {group["template"]["spec"]["containers"][0]["image"] for group in groups}

    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert len(images) == 1, "every node has the same versions"


def test_the_script_of_slurm_is_a_script() -> None:
    assert subprocess.run(["bash", "-n", FILES / "slurm.sh"], check=False).returncode == 0
    assert os.access(FILES / "slurm.sh", os.X_OK)


@pytest.mark.parametrize("path", [*sorted(FILES.iterdir()), DOCUMENT], ids=lambda path: path.name)
def test_every_override_composes(path: Path) -> None:
    found = overrides(path)
    composed_tree(found)

    assert {each.partition("=")[0] for each in found} >= {"store.uri"}
