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
from orchestrator.config import schema
from orchestrator.config.compose import plain
from orchestrator.core.specs import Job
from orchestrator.planning import plan, versions
from orchestrator.planning.versions import VERSIONS

KNOWN = Path(__file__).with_name("versions.json")
PYTHON = (3, 11)
REMEDY = """
is not the code that its version stood for. Where results may differ, raise its number in VERSIONS
(orchestrator/planning/versions.py): the stages that use it are then other stages. They do not differ where
`python scripts/golden_bits.py` prints the same lines as before, with equal torch on an equal processor (for what the
main job does not use: where a sweep of it does). Then, either way, renew the digests by
`PYTHONPATH=. python tests/orchestrator/planning/test_versions.py` and commit versions.json.
"""

WORKLOADS, TRAINING = "orchestrator.workloads", "orchestrator.training"
SHARED = {
    "training": [
        *(f"{TRAINING}.{name}" for name in ("stages.train_dense", "stages.prune_and_finetune")),
        *(f"{WORKLOADS}.{name}" for name in ("data.load", "models.build")),
        *(f"{WORKLOADS}.splits.{name}" for name in ("TensorSplit", "LoaderSplit")),
    ],
    "deploy": [f"orchestrator.export.stages.{name}" for name in ("deploy", "measure")],
    "round": [f"{TRAINING}.rounds.{name}" for name in ("prune_round", "hold_laws", "hold_finite")],
}
REGISTRIES = {
    "model": f"{WORKLOADS}.models.MODELS",
    "data": f"{WORKLOADS}.data.DATA",
    "task": f"{WORKLOADS}.tasks.table.TASKS",
    "method": "pruning.METHODS",
    "score": "pruning.scores.table.SCORES",
}
HARMLESS = ("orchestrator.config", "orchestrator.core", "orchestrator.store", "orchestrator.__version__")
"""Not followed, but for seeding: they decide nothing that a stage computes."""


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
    """Return all that `roots` refer to, by module and name, less what is `left_out`; registries are not followed."""
    found: dict[str, ast.stmt] = {}
    pending = [root for root in roots if definition(root)]
    assert len(pending) == len(roots), f"a part of {roots} has moved; say where to"
    registries = {where for path in REGISTRIES.values() if (where := definition(path))}
    while pending:
        path = pending.pop()
        where = definition(path)
        if where is None or where in registries:
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
    """Return the digest of syntax trees, wherever they stand: without places, imports and docstrings."""
    return hashlib.sha256("\n".join(sorted(ast.dump(bare(node)) for node in code.values())).encode()).hexdigest()[:16]


def bare(node: ast.stmt) -> ast.AST:
    class Strip(ast.NodeTransformer):
        def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

        def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
            return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    return Strip().visit(ast.parse(ast.unparse(node)))


def kinds() -> Iterator[tuple[str, str]]:
    """Yield each kind's component and what its registry says it is."""
    for group, path in REGISTRIES.items():
        where = definition(path)
        assert where is not None
        module, node = where
        table = next(each for each in ast.walk(node) if isinstance(each, ast.Dict))
        for key, value in zip(table.keys, table.values, strict=True):
            assert isinstance(key, ast.Constant)
            value = value.args[0] if isinstance(value, ast.Call) else value
            assert isinstance(value, ast.Name)
            bound = bindings(module)[value.id]
            if key.value != "custom_from_mask":
                yield f"{group}/{key.value}", bound if isinstance(bound, str) else f"{module}.{value.id}"


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
    assert set(VERSIONS) == {*SHARED, *(component for component, _ in kinds())}


@pytest.mark.skipif(sys.version_info[:2] != PYTHON, reason="syntax trees are those of Python 3.11")
def test_a_component_s_code_is_what_its_version_stands_for() -> None:
    known, code = json.loads(KNOWN.read_text()), digests()
    differ = [name for name in code if known.get(name) != {"version": VERSIONS[name], "code": code[name]}]

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


def test_places_imports_and_docstrings_are_no_code_but_constants_are() -> None:
    def of(text: str) -> str:
        return digest({"f": ast.parse(text).body[0]})

    code = of("def f(x):\n    return x + 1")
    assert of("\n\ndef f(x):\n    '''Add one.'''\n    from there import g\n    return (x + 1)") == code
    assert of("def f(x):\n    return x + 2") != code


def test_a_raised_version_changes_the_stages_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    schema.register()
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
        monkeypatch.setattr(versions, "VERSIONS", {**VERSIONS, component: VERSIONS[component] + 1})
        assert sum(a != b for a, b in zip(before, keys(), strict=True)) == changed


if __name__ == "__main__":
    known = {name: {"version": VERSIONS[name], "code": code} for name, code in digests().items()}
    KNOWN.write_text(json.dumps(known, indent=1) + "\n")
