"""Digests of the code of each component with a version: a test fails when code changes that may change results.

A component's code is everything in our packages that its functions and classes refer to by name, directly or
indirectly.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.planning.versions import FAMILIES, version_of

WORKLOADS, TRAINING = "orchestrator.workloads", "orchestrator.training"
SHARED = {
    "training": [
        *(f"{TRAINING}.{name}" for name in ("training_stages.train_dense", "training_stages.prune_and_finetune")),
        *(f"{WORKLOADS}.{name}" for name in ("data_loading.load", "model_building.build")),
        *(f"{WORKLOADS}.splits.{name}" for name in ("TensorSplit", "LoaderSplit")),
    ],
    "own_class": ["pruning.engine.classes._build_method"],
    "deploy": [f"orchestrator.deploy.deployment_stages.{name}" for name in ("deploy", "measure")],
    "layerwise": [f"{TRAINING}.pruning_rounds.prune_layers", "pruning.reconstruction.layer_problem.wanda"],
    "lora": ["pruning.holding.low_rank.LowRankUpdates"],
    "ranks": [f"{TRAINING}.team.{name}" for name in ("together.Together", "ranks.Ranks", "together.synchronised")],
    "smaller": [f"{TRAINING}.state.from_scratch.{name}" for name in ("transformer_left", "small_transformer_of")],
    "rows": ["pruning.selection.allocation.kept_of_rows"],
    "channels": ["pruning.engine.scoring.spared_weights"],
    "groups": ["pruning.dependencies.group_finding.dependency_groups"],
    "blocks": ["pruning.selection.selection_groups._blocks", "pruning.reconstruction.solving._columns"],
    "weights": ["pruning.holding.default_weights.default_weights"],
    "round": [f"{TRAINING}.pruning_rounds.{name}" for name in ("prune_round", "details", "hold_finite")],
}
ALONE = (
    "own_class",
    "deploy",
    "layerwise",
    "lora",
    "ranks",
    "smaller",
    "rows",
    "channels",
    "groups",
    "blocks",
    "weights",
)
"""Shared code that not every training or round uses."""
HARMLESS = (
    *("orchestrator.config", "orchestrator.core", "orchestrator.store", "orchestrator.__version__"),
    *("orchestrator.catalogue", "pruning.catalogue"),
)
"""Modules that are not followed, except seeding and the fields of stages: they change no result of a stage.

The code of rows is followed row by row.
"""


@cache
def bindings(module: str) -> Mapping[str, ast.stmt | str]:
    """Return name -> definition, or dotted path of the import, for each name at a module's top level."""
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
    """Return the module and the statement that define `path`; None for modules and for code that is not followed."""
    module, _, name = path.rpartition(".")
    if path.split(".")[0] not in ("orchestrator", "pruning") or not module:
        return None
    if path.startswith(HARMLESS) and not path.startswith(("orchestrator.core.seeding", "orchestrator.core.specs")):
        return None
    try:
        bound = bindings(module).get(name)
    except (AssertionError, ModuleNotFoundError):
        return None
    if isinstance(bound, str):
        return definition(bound)
    return None if bound is None else (module, bound)


def closure(roots: Sequence[str], left_out: Mapping[str, ast.stmt] | None = None) -> dict[str, ast.stmt]:
    """Return module.name -> definition for everything that `roots` refer to, except `left_out`."""
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
    """Yield the dotted paths in a definition: names, and attributes of modules."""
    names = {**bindings(module), **dict(_bound([each for each in ast.walk(node) if isinstance(each, ast.ImportFrom)]))}
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and each.id in names:
            bound = names[each.id]
            yield bound if isinstance(bound, str) else f"{module}.{each.id}"
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            module_of = names.get(each.value.id)
            if isinstance(module_of, str):
                yield f"{module_of}.{each.attr}"


def digest(code: Mapping[str, ast.stmt]) -> str:
    """Return the digest of syntax trees, without positions, imports, docstrings, annotations and local names."""
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
    """Return a definition without the parts that `digest` ignores."""
    tree: ast.AST = _Bare().visit(ast.parse(ast.unparse(node)))
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef):
            taken = {arg.arg for arg in (*each.args.args, *each.args.kwonlyargs, *each.args.posonlyargs)}
            inner = [*ast.walk(ast.Module(each.body, []))]
            declared = {name for each in inner if isinstance(each, ast.Global | ast.Nonlocal) for name in each.names}
            stored = [each.id for each in inner if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
            local = [name for name in dict.fromkeys(stored) if name not in taken | declared]
            each.body = [_Renamed(local).visit(statement) for statement in each.body]
    return tree


def rows() -> Iterator[tuple[str, str]]:
    """Yield each row's component and the dotted path of its code."""
    for family, known in FAMILIES.items():
        for name, row in known.items():
            if row.code:
                yield f"{family}/{name}", row.code.replace(":", ".")


def closures() -> tuple[dict[str, ast.stmt], dict[str, ast.stmt]]:
    """Return the code of training and of rounds; code that both use counts as training, which all stages have.

    Code that only the sequential order, low-rank updates, several processes or smaller transformers use is in neither.
    """
    read = closure([root for root in SHARED["training"] if root.startswith(WORKLOADS)])
    left_out = [
        path
        for name in ("layerwise", "lora", "ranks", "smaller", "rows", "channels", "groups", "blocks", "weights")
        for path in SHARED[name]
    ]
    apart = dict(filter(None, map(definition_at, left_out)))
    rounds = closure(SHARED["round"], left_out=read | apart)
    return closure(SHARED["training"], left_out=rounds | apart), rounds


def definition_at(path: str) -> tuple[str, ast.stmt] | None:
    """Return the path of a definition with its statement."""
    found = definition(path)
    return None if found is None else (path, found[1])


def digests() -> dict[str, str]:
    training, rounds = closures()
    shared = rounds | training
    found = {"training": digest(training), "round": digest(rounds)}
    found |= {name: digest(closure(SHARED[name], left_out=shared)) for name in ALONE}
    return found | {component: digest(closure([root], left_out=shared)) for component, root in rows()}


def known(file: Path) -> dict[str, dict[str, Any]]:
    """Return component -> version and digest from a file."""
    found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def write(file: Path, *, renew: bool) -> None:
    """Write the digests of new components to a file, or of all with `renew`, and drop removed components."""
    before = known(file)
    now = {name: {"version": version_of(name), "code": code} for name, code in digests().items()}
    found = now if renew else {name: before.get(name, each) for name, each in now.items()}
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
