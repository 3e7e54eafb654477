"""The rooms and their order: the laws of the design, held on the source text."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
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
WORKER = "orchestrator.training.training_stages"
"""The module a Ray worker runs; whatever it reaches, a worker imports."""
FLOORS = (
    *(
        "core",
        "catalogue",
        "config",
        "trial",
        "store",
        "planning",
        "workloads",
        "training",
        "execution",
        "compare",
        "deploy",
        "export",
    ),
    *("views.report", "results", "views.tracking", "views.terminal", "sweep", "commands"),
)
"""The rooms of `orchestrator` from the ground up: each imports from those before it only. Doors stand above all."""
DOORS = ("orchestrator", "orchestrator.__main__", "orchestrator.gate", "orchestrator.sync", "orchestrator.views")
NOUNS = (
    *("errors", "file_names", "plain_data", "restart_kinds", "stage_kinds", "metrics"),
    *("specs", "records", "events", "redact", "work_order"),
)
"""Modules of core that need the standard library, msgspec, which checks plain data, and plain data of the engine."""


def floor(module: str) -> int | None:
    """Return the floor of a module's room, None for a door."""
    if module in DOORS or module.endswith(".__main__"):
        return None
    inside = module.removeprefix("orchestrator.")
    (room,) = (room for room in FLOORS if inside == room or inside.startswith(f"{room}."))
    return FLOORS.index(room)


def test_each_room_imports_only_from_those_below_it() -> None:
    for module in FILES:
        if not module.startswith("orchestrator") or (own := floor(module)) is None:
            continue
        for name in imports(module):
            if name in FILES and name.startswith("orchestrator."):
                other = floor(name)
                assert other is not None, f"{module} imports the door {name}"
                assert other <= own, f"{module} imports {name}, which stands above it"


def test_the_rooms_are_those_of_the_tree() -> None:
    rooms = {
        ".".join(path.parent.relative_to(ROOT / "orchestrator").parts)
        for path in FILES.values()
        if path.is_relative_to(ROOT / "orchestrator")
    }

    inside = {room for room in rooms if any(room.startswith(f"{floor}.") for floor in FLOORS)}
    assert rooms - inside - {"", "views"} == set(FLOORS)


@pytest.mark.parametrize("package", ["orchestrator", "pruning"])
def test_each_room_says_its_purpose(package: str) -> None:
    for folder in {path.parent for path in FILES.values() if path.is_relative_to(ROOT / package)}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), f"{folder} does not say its purpose"


@cache
def imports(module: str, *, top_level: bool = False) -> tuple[str, ...]:
    """Return every module that `module` imports; with `top_level`, only on being imported itself."""
    tree = ast.parse(FILES[module].read_text())
    return tuple(name for node in (_executed(tree) if top_level else ast.walk(tree)) for name in _imported(node))


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and any(guard in ast.unparse(node.test) for guard in ("TYPE_CHECKING", "__name__")):
            continue
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case) and not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef
        ):
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


@pytest.mark.parametrize(("package", "room"), [("ray", "execution.on_ray"), ("mlflow", "views.tracking")])
def test_each_heavy_service_has_one_room(package: str, room: str) -> None:
    users = {module for module in FILES for name in imports(module) if name.split(".")[0] == package}

    assert users
    assert {user.rpartition(".")[0] for user in users} == {f"orchestrator.{room}"}


ADAPTED = {
    "pruning.integrations.accelerate": {"accelerate"},
    "pruning.integrations.lightning": {"lightning", "pytorch_lightning"},
    "pruning.integrations.transformers": {"transformers"},
    "pruning.integrations.ultralytics": set(),  # a trainer of the user's YOLO is at hand
}
"""Module of the engine -> the libraries that it adapts, and that no other imports."""


def test_the_engine_stands_on_torch_and_numpy_alone() -> None:
    assert set(ADAPTED) <= set(FILES)
    for module in FILES:
        if module.startswith("pruning"):
            tops = {name.split(".")[0] for name in imports(module, top_level=True)}
            assert tops <= {"torch", "numpy", "pruning", *sys.stdlib_module_names, *ADAPTED.get(module, ())}, module
            assert "orchestrator" not in {name.split(".")[0] for name in imports(module)}, module


PLAIN = {
    *("pruning.choices", "pruning.choices.axes", "pruning.choices.combining", "pruning.choices.combining.Choices"),
    *("pruning.catalogue", "pruning.catalogue.methods", "pruning.catalogue.methods.METHODS"),
    *("pruning.catalogue.rows", "pruning.catalogue.rows.Row", "pruning.catalogue.rows.named"),
}
"""Modules of the engine without torch, and names in them."""


def test_the_nouns_need_nothing_heavy() -> None:
    nouns = {f"orchestrator.core.{name}" for name in NOUNS}
    for module in nouns:
        others = {name for name in imports(module) if name.split(".")[0] not in sys.stdlib_module_names}
        assert {name for name in others if name in FILES} <= nouns | PLAIN, module
        assert {name.split(".")[0] for name in others} <= {"orchestrator", "msgspec", "pruning"}, module
        assert {name for name in others if name.startswith("pruning.")} <= PLAIN, module


def test_a_worker_reaches_neither_the_driver_nor_its_views() -> None:
    above = {module for module in FILES if module.startswith("orchestrator.") and _is_above(module)}
    drivers = {"orchestrator.config.schema", "orchestrator.config.compose", "orchestrator.planning.plan"}

    assert drivers <= set(FILES)
    assert not (above | drivers) & reached(WORKER)


def _is_above(module: str) -> bool:
    own = floor(module)
    return module not in ("orchestrator", "orchestrator.views") and (own is None or own > FLOORS.index("training"))


def test_imports_have_no_cycle() -> None:
    graph = {module: {name for name in imports(module, top_level=True) if name in FILES} - {module} for module in FILES}

    assert list(TopologicalSorter(graph).static_order())


PRUNING_FLOORS = (
    *(
        "refused",
        "schedule",
        "catalogue",
        "choices",
        "layouts",
        "selection",
        "holding",
        "mixtures",
        "methods",
        "masks",
        "measure",
        "kernels",
        "graph",
        "compact",
    ),
    *("dependencies", "scores", "repair", "reconstruction", "engine", "dynamics", "integrations"),
)
"""The files and rooms of `pruning` from the ground up: each imports from itself and those before it only."""


def pruning_floor(module: str) -> int:
    return PRUNING_FLOORS.index(module.split(".")[1])


def test_the_rooms_of_the_engine_are_those_of_the_tree() -> None:
    assert {module.split(".")[1] for module in FILES if module.startswith("pruning.")} == set(PRUNING_FLOORS)


def test_the_rooms_of_the_engine_import_downwards() -> None:
    for module in FILES:
        if module.startswith("pruning."):
            ours = {name for name in imports(module) if name in FILES}
            assert "pruning" not in ours, f"{module} imports the package's door"
            for name in ours:
                assert pruning_floor(name) <= pruning_floor(module), f"{module} imports {name}, which stands above it"


DRIVER = ("sweep.conductor", "results.sweep_results", "commands.compare_command", "views.report.page")
"""Modules that plan, show and read a sweep: they start in a moment, and work on machines without torch."""


@pytest.mark.parametrize("module", DRIVER)
def test_the_driver_reaches_no_torch(module: str) -> None:
    below = reached(f"orchestrator.{module}")
    heavy = {ours: imports(ours, top_level=True) for ours in below}

    assert f"orchestrator.{module}" in below, "the module has another name"
    assert not [ours for ours, names in heavy.items() if "torch" in {name.split(".")[0] for name in names}]


def test_the_process_that_writes_to_mlflow_begins_without_configurations_and_tables() -> None:
    reaches = reached("orchestrator.views.tracking.view_writer")

    assert not [
        ours for ours in reaches if "omegaconf" in {name.split(".")[0] for name in imports(ours, top_level=True)}
    ]
    assert "orchestrator.views.report.tables" not in reaches
