"""Find the source file behind a `_target_` without importing it, and fingerprint it.

A stage's key must change when the user's own model, data or method does, and the dry run must not import torch to find
that out; so a dotted path is resolved along package directories only.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestrator.core.canonical import digest

OURS = frozenset({"orchestrator", "pruning"})
"""Packages whose changes `SPEC_VERSION` stands for."""
VERSIONED = frozenset({"torch", "numpy", "builtins"})
"""Packages that no user edits; a record's environment names their versions."""


class SourceError(Exception):
    """A target that leads nowhere; the text continues a sentence that begins with the target."""


@lru_cache(maxsize=1024)
def locate(target: str) -> Path | None:
    """Return the file that holds `target`, None for one that is built in; raise `SourceError` where there is none."""
    top, *rest = target.split(".")
    if not all(part.isidentifier() for part in (top, *rest)) or not rest:
        raise SourceError("is not a dotted path; pass package.module.Name.")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise SourceError(
            f"is not on the Python path: there is no module {top!r}; install it or run from its directory."
        )
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin)
    for depth, part in enumerate(rest):
        if path.name != "__init__.py":
            _require_name(path, part)
            return path
        folder = path.parent
        if (folder / part / "__init__.py").is_file():
            path = folder / part / "__init__.py"
        elif (folder / f"{part}.py").is_file():
            path = folder / f"{part}.py"
        else:
            if depth < len(rest) - 1:
                return path  # an attribute of an attribute, or a module that the package makes at run time
            return _reexport(path, part)
    raise SourceError(f"is a module; pass the name of a class or function in it, as in {target}.Name.")


def fingerprints(*nodes: Any) -> dict[str, str]:
    """Return {target: SHA-256 of its source file} for every `_target_` in `nodes` that is the user's own."""
    return {target: _file_digest(path) for target in sorted(set(_targets(nodes))) if (path := _users(target))}


def _users(target: str) -> Path | None:
    top = target.split(".")[0]
    if top in OURS or top in VERSIONED:
        return None
    try:
        return locate(target)
    except SourceError:
        return None


@lru_cache(maxsize=1024)
def _file_digest(path: Path) -> str:
    return digest(path.read_bytes())


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        for value in node.values():
            yield from _targets(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _targets(value)


@lru_cache(maxsize=256)
def _names(path: Path) -> frozenset[str] | None:
    """Names that a module binds at its top level; None when it may bind others (a star import, `__getattr__`)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == "__getattr__":
                return None
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if any(alias.name == "*" for alias in node.names):
                return None
            found.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def _require_name(path: Path, name: str) -> None:
    try:
        names = _names(path)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise SourceError(f"cannot be read: {path} has a syntax error ({error}).") from error
    if names is not None and name not in names:
        raise SourceError(f"is not defined: {path} has no {name!r}; check the spelling.")


def _reexport(path: Path, name: str) -> Path:
    """The file that a package's `__init__` takes `name` from, where a relative import says so; else the `__init__`."""
    _require_name(path, name)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    source = path.parent.joinpath(*node.module.split("."))
                    for candidate in (source.with_suffix(".py"), source / "__init__.py"):
                        if candidate.is_file():
                            return candidate
    return path
