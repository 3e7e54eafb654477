"""Our code that can change bits has a version in the key, and is what that version stands for.

A component's code is all that its functions and classes refer to in our packages, by name and transitively. Where one
differs from `versions.json`, see `REMEDY`; run as a program, this file writes `versions.json` anew.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from orchestrator.__main__ import CONF
from orchestrator.catalogue.formats import FORMATS
from orchestrator.config import hydra_options
from orchestrator.config.compose import plain
from orchestrator.config.groups import GROUPS
from orchestrator.core.specs import Job
from orchestrator.planning import plan, versions
from orchestrator.planning.versions import components, version_of
from pruning.catalogue.allocations import ALLOCATIONS

KNOWN = Path(__file__).with_name("versions.json")
PYTHON = (3, 11)
REMEDY = """
is not the code that its version stands for. Run `python scripts/golden_bits.py --against HEAD` (HEAD~1 once the change
is committed): it runs both trees on this machine. Where lines differ, raise the component's version, in its row or in
orchestrator/planning/versions.py: the stages that use it are then other stages. Then, either way, renew the digests by
`PYTHONPATH=. python tests/orchestrator/planning/test_versions.py` and commit versions.json.
"""

WORKLOADS, TRAINING = "orchestrator.workloads", "orchestrator.training"
SHARED = {
    "training": [
        *(f"{TRAINING}.{name}" for name in ("stages.train_dense", "stages.prune_and_finetune")),
        *(f"{WORKLOADS}.{name}" for name in ("data.load", "models.build")),
        *(f"{WORKLOADS}.splits.{name}" for name in ("TensorSplit", "LoaderSplit")),
    ],
    "deploy": [
        *(f"orchestrator.export.stages.{name}" for name in ("deploy", "measure")),
        *(row.code.replace(":", ".") for row in FORMATS.values() if row.code),
    ],
    "round": [
        *(f"{TRAINING}.rounds.{name}" for name in ("prune_round", "hold_laws", "hold_finite")),
        *(row.code.replace(":", ".") for row in ALLOCATIONS.values() if row.code),
    ],
}
HARMLESS = (
    *("orchestrator.config", "orchestrator.core", "orchestrator.store", "orchestrator.__version__"),
    *("orchestrator.catalogue", "pruning.catalogue"),
)
"""Not followed, but for seeding: they decide nothing that a stage computes. The code of rows is followed row by row."""


@cache
def bindings(module: str) -> Mapping[str, ast.stmt | str]:
    """Name at a module's top level -> its definition, or the dotted path that it is imported from."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return dict(_bound(ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body))


def _bound(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt | str]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.If):  # of TYPE_CHECKING
            yield from _bound(node.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def definition(path: str) -> tuple[str, ast.stmt] | None:
    """Return the module and the statement that define `path`, None where it is a module or not ours to follow."""
    module, _, name = path.rpartition(".")
    if path.split(".")[0] not in ("orchestrator", "pruning") or not module:
        return None
    if path.startswith(HARMLESS) and not path.startswith("orchestrator.core.seeding"):
        return None
    try:
        bound = bindings(module).get(name)
    except (AssertionError, ModuleNotFoundError):
        return None
    return definition(bound) if isinstance(bound, str) else bound and (module, bound)


def closure(roots: Sequence[str], left_out: Mapping[str, ast.stmt] | None = None) -> dict[str, ast.stmt]:
    """Return all that `roots` refer to, by module and name, less what is `left_out`."""
    found: dict[str, ast.stmt] = {}
    pending = [root for root in roots if definition(root)]
    assert len(pending) == len(roots), f"a part of {roots} has moved; say where to"
    while pending:
        path = pending.pop()
        where = definition(path)
        if where is None:
            continue
        module, node = where
        key = f"{module}.{path.rpartition('.')[2]}"
        if key in found or (key in (left_out or {}) and path not in roots):
            continue
        found[key] = node
        pending += references(module, node)
    return found


def references(module: str, node: ast.stmt) -> Iterator[str]:
    """Yield the dotted paths that a definition mentions: names, and attributes of modules."""
    names = {**bindings(module), **dict(_bound([each for each in ast.walk(node) if isinstance(each, ast.ImportFrom)]))}
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and each.id in names:
            bound = names[each.id]
            yield bound if isinstance(bound, str) else f"{module}.{each.id}"
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            bound = names.get(each.value.id)
            if isinstance(bound, str):
                yield f"{bound}.{each.attr}"


def digest(code: Mapping[str, ast.stmt]) -> str:
    """Return the digest of syntax trees less places, imports, docstrings, annotations and names of local variables."""
    return hashlib.sha256("\n".join(sorted(ast.dump(bare(node)) for node in code.values())).encode()).hexdigest()[:16]


class _Bare(ast.NodeTransformer):
    """Drops imports, docstrings and annotations."""

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return (
                ast.Expr(ast.Name(node.target.id, ast.Load())) if isinstance(node.target, ast.Name) else None
            )  # a field
        return self.generic_visit(ast.Assign([node.target], node.value))


class _Renamed(ast.NodeTransformer):
    """Numbers the local variables of a function in the order in which they appear."""

    def __init__(self, names: Sequence[str]) -> None:
        self.numbers = {name: f"local{number}" for number, name in enumerate(names)}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.numbers.get(node.id, node.id), node.ctx)


def bare(node: ast.stmt) -> ast.AST:
    tree = _Bare().visit(ast.parse(ast.unparse(node)))
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef):
            taken = {arg.arg for arg in (*each.args.args, *each.args.kwonlyargs, *each.args.posonlyargs)}
            inner = [*ast.walk(ast.Module(each.body, []))]
            declared = {name for each in inner if isinstance(each, ast.Global | ast.Nonlocal) for name in each.names}
            stored = [each.id for each in inner if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
            local = [name for name in dict.fromkeys(stored) if name not in taken | declared]
            each.body = [_Renamed(local).visit(statement) for statement in each.body]
    return tree


def kinds() -> Iterator[tuple[str, str]]:
    """Yield each row's component and the dotted path of its code."""
    for name, group in GROUPS.items():
        for kind, row in group.rows.items():
            if row.code:
                yield f"{name}/{kind}", row.code.replace(":", ".")


def closures() -> tuple[dict[str, ast.stmt], dict[str, ast.stmt]]:
    """Return the code of training and of rounds; what both read from counts as training, which all stages have."""
    read = closure([root for root in SHARED["training"] if root.startswith(WORKLOADS)])
    rounds = closure(SHARED["round"], left_out=read)
    return closure(SHARED["training"], left_out=rounds), rounds


def digests() -> dict[str, str]:
    training, rounds = closures()
    shared = rounds | training
    found = {"training": digest(training), "round": digest(rounds)}
    found["deploy"] = digest(closure(SHARED["deploy"], left_out=shared))
    return found | {component: digest(closure([root], left_out=shared)) for component, root in kinds()}


def test_every_component_has_a_version() -> None:
    assert set(components()) == {*SHARED, *(component for component, _ in kinds())}
    assert set(json.loads(KNOWN.read_text())) == set(components())


@pytest.mark.skipif(sys.version_info[:2] != PYTHON, reason="syntax trees are those of Python 3.11")
def test_a_component_s_code_is_what_its_version_stands_for() -> None:
    known, code = json.loads(KNOWN.read_text()), digests()
    differ = [name for name in code if known.get(name) != {"version": version_of(name), "code": code[name]}]

    assert not differ, f"{', '.join(differ)} {REMEDY}"


def test_the_closure_holds_what_decides_bits() -> None:
    training, rounds = closures()
    root = dict(kinds())

    assert {f"{WORKLOADS}.data._cut", f"{WORKLOADS}.splits._Orders", f"{TRAINING}.loop._Run"} <= set(training)
    assert {"orchestrator.core.seeding.derive", f"{WORKLOADS}.weights.plain_state"} <= set(training)
    assert any(name.endswith(".BasePruningMethod") for name in rounds)
    assert any(name.endswith(".global_unstructured") for name in rounds)
    assert f"{WORKLOADS}.models._image" in closure([root["model/cnn"]])
    assert f"{WORKLOADS}.models.mlp" in closure([root["model/cnn"]]), "its classifier"
    assert f"{WORKLOADS}.images.idx_files.read" in closure([root["data/mnist"]])


@pytest.mark.parametrize(
    "same",
    [
        "\n\ndef f(x, *, k=1):\n    '''Add k.'''\n    from there import g\n    y = (x + k)\n    return [y for z in y]",
        "def f(x: int, *, k: int = 1) -> int:\n    y: int = x + k\n    return [y for z in y]",
        "def f(x, *, k=1):\n    total = x + k\n    return [total for each in total]",
    ],
)
def test_places_imports_docstrings_annotations_and_local_names_are_no_code(same: str) -> None:
    assert digest_of(same) == digest_of("def f(x, *, k=1):\n    y = x + k\n    return [y for z in y]")


@pytest.mark.parametrize(
    "other",
    [
        "def f(x, *, k=2):\n    y = x + k\n    return [y for z in y]",
        "def f(x, *, j=1):\n    y = x + j\n    return [y for z in y]",
        "def f(x, *, k=1):\n    y = x + k\n    return [z for z in y]",
        "def f(x, *, k=1):\n    y = k + x\n    return [y for z in y]",
    ],
)
def test_constants_arguments_and_what_is_computed_are_code(other: str) -> None:
    assert digest_of(other) != digest_of("def f(x, *, k=1):\n    y = x + k\n    return [y for z in y]")


def digest_of(text: str) -> str:
    return digest({"f": ast.parse(text).body[0]})


def test_a_raised_version_changes_the_stages_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hydra_options.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = plain(compose("config"))

    def keys() -> tuple[str, ...]:
        return plan.make_plan([Job((), config)]).trials[0].stages

    before = keys()
    for component, changed in (
        ("data/mnist", 0),
        ("method/l1_unstructured", 0),
        ("score/magnitude", 3),
        ("round", 3),
        ("training", 4),
    ):
        known = version_of(component)
        monkeypatch.setattr(
            versions,
            "version_of",
            lambda name, at=component, known=known: known + 1 if name == at else version_of(name),
        )
        assert sum(a != b for a, b in zip(before, keys(), strict=True)) == changed


if __name__ == "__main__":
    known = {name: {"version": version_of(name), "code": code} for name, code in digests().items()}
    KNOWN.write_text(json.dumps(known, indent=1) + "\n")
