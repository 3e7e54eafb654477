"""Environment of a sweep: versions from package metadata, without imports, and the git commit."""

from __future__ import annotations

import platform
import subprocess

import orchestrator
from orchestrator.planning.pinned_content import release_of

PACKAGES = ("torch", "numpy", "ray", "hydra-core", "omegaconf", "mlflow")


def environment() -> dict[str, str]:
    """Return package -> version for results and their view, the platform, and `git_commit` if there is one."""
    found = {"orchestrator": orchestrator.__version__, "python": platform.python_version()}
    found |= {package: release for package in PACKAGES if (release := release_of(package))}
    found["platform"] = platform.platform()
    return found | _commit()


def _commit() -> dict[str, str]:
    """Return the commit of the working directory, and whether tracked files differ from it."""
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        return {"git_commit": _git("rev-parse", "HEAD")} | ({"git_changed": "yes"} if changed else {})
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
    return result.stdout.strip()
