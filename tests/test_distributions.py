"""The sdist and the wheel hold what they should, and the wheel sweeps outside of the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import orchestrator

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_the_configuration_alone(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("METADATA")]

    info = f"pruning_orchestrator-{orchestrator.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"pruning", "orchestrator", "hydra_plugins", info}
    files = {path.relative_to(ROOT / "conf").as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    assert {name.removeprefix("orchestrator/conf/") for name in names if name.startswith("orchestrator/conf/")} == files
    assert {"pruning/py.typed", "orchestrator/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    assert not [name for name in names if re.search(r"test_|\.md$|__pycache__|\.svg$", name)]
    assert "License-Expression: Apache-2.0" in metadata
    assert "Description-Content-Type: text/markdown" in metadata


@pytest.mark.slow
def test_the_sdist_holds_what_tests_and_pages_are_made_of(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    folders = ("pruning", "orchestrator", "hydra_plugins", "conf", "tests", "scripts", "docs")
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert len(listed) > 400 or not (ROOT / ".git").exists()
    assert set(listed) - names == set()
    assert {"README.md", "LICENSE", "constraints.txt", "mkdocs.yml", "CONTRIBUTING.md", "CITATION.cff"} <= names
    assert not [name for name in names if name.startswith((".venv", "build", "site", "store", "mlruns"))]


@pytest.mark.slow
def test_the_wheel_sweeps_in_an_empty_directory(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", site, wheel]
    subprocess.run(install, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    small = ["schedule.sparsity=0.5,0.75", "schedule.rounds=1", "seed=0", "train.epochs=1", "finetune.epochs=1"]
    run = [sys.executable, "-m", "orchestrator", "+sweep=random_amounts", *small, "cluster=inline", "tracking=none"]
    done = subprocess.run(run, cwd=empty, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True)
    where = [sys.executable, "-c", "from orchestrator.__main__ import CONF; print(CONF)"]
    conf = subprocess.run(where, cwd=empty, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "random_unstructured" in done.stdout
    assert (empty / "store" / "store.json").is_file()
    assert conf.stdout.strip() == str(site / "orchestrator" / "conf")


def test_the_version_is_the_same_everywhere() -> None:
    named = {
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
        yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"],
        orchestrator.__version__,
    }

    assert len(named) == 1
    assert f"## {named.pop()}" in (ROOT / "CHANGELOG.md").read_text()
