"""Imports run one way: the laws of the design, held on the source text."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("pruning", "orchestrator", "hydra_plugins")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in OURS
    for path in sorted((ROOT / package).rglob("*.py"))
}
NOUNS = tuple(
    f"orchestrator.core.{name}"
    for name in ("errors", "canonical", "file_names", "specs", "records", "events", "work_order")
)
WORKER = "orchestrator.training.segment"
"""The module a Ray worker runs; whatever it reaches, a worker imports."""


def imports(module: str, *, top_level: bool = False) -> Iterator[str]:
    """Yield every module that `module` imports; with `top_level`, only on being imported itself."""
    tree = ast.parse(FILES[module].read_text())
    for node in _executed(tree) if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and any(guard in ast.unparse(node.test) for guard in ("TYPE_CHECKING", "__name__")):
            continue
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _executed(node)


def reached(module: str) -> set[str]:
    """Return our modules that importing `module` imports, itself among them."""
    found, pending = set(), [module]
    while pending:
        name = pending.pop()
        if name in FILES and name not in found:
            found.add(name)
            pending.extend(imports(name, top_level=True))
    return found


DOORS = {"ray": "orchestrator.execution.ray_executor", "mlflow": "orchestrator.views.tracking.client"}


@pytest.mark.parametrize(("package", "only"), DOORS.items())
def test_each_heavy_service_has_one_door(package: str, only: str) -> None:
    users = {module for module in FILES for name in imports(module) if name.split(".")[0] == package}

    assert users == {only}


def test_the_engine_stands_on_torch_and_numpy_alone() -> None:
    for module in FILES:
        if module.startswith("pruning"):
            tops = {name.split(".")[0] for name in imports(module, top_level=True)}
            assert tops <= {"torch", "numpy", "pruning", *sys.stdlib_module_names}, module
            assert "orchestrator" not in {name.split(".")[0] for name in imports(module)}, module


def test_the_nouns_are_standard_library_only() -> None:
    for module in NOUNS:
        others = {name for name in imports(module) if name.split(".")[0] not in sys.stdlib_module_names}
        assert {name for name in others if name in FILES} <= set(NOUNS), module
        assert {name.split(".")[0] for name in others} <= {"orchestrator"}, module


def test_a_worker_reaches_neither_the_driver_nor_its_views() -> None:
    drivers = (
        *("tracking", "compare", "plots", "report", "progress", "plan", "sweep", "execute"),
        *("config.schema", "config.compose"),
    )

    assert not {f"orchestrator.{name}" for name in drivers} & reached(WORKER)


FIRST_STEP = """
import gc, sys
import orchestrator.training.preload
assert gc.isenabled()
before = set(sys.modules)
import torch
from orchestrator.training import loop
from orchestrator.workloads import data
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
config = {"steps": 1, "epochs": None, "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}}
digits = data.load({"_target_": "orchestrator.workloads.data.digits"})
loop.fit(model, digits, config, seed=0, device=torch.device("cpu"))
print(len([name for name in set(sys.modules) - before if not name.startswith("omegaconf")]))
"""


def test_a_worker_has_imported_what_its_first_step_needs() -> None:
    said = subprocess.run([sys.executable, "-c", FIRST_STEP], capture_output=True, text=True, check=True).stdout

    assert int(said) < 5, "importing torch._dynamo would be hundreds"


def test_imports_have_no_cycle() -> None:
    graph = {module: {name for name in imports(module, top_level=True) if name in FILES} - {module} for module in FILES}

    assert list(TopologicalSorter(graph).static_order())
