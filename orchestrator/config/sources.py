"""Fingerprints of the custom code and files behind a configuration, without importing them.

A stage's key must change when a custom model, data set or method changes, or any custom module that it imports. A dry
run must not import torch for that: dotted paths are looked up in folders, and imports are read from the syntax tree.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from orchestrator.core.plain_data import canonical_json, digest

LABELS = frozenset({"name", "depends"})
"""Keys of a node that are not arguments of its target."""
OURS = frozenset({"orchestrator", "pruning"})
"""Packages of this project: a `_target_` must not name them; their built-in components have a `kind`."""
VERSIONED = frozenset({"torch", "numpy", "builtins"})
"""Packages that every stage needs; a record's environment holds their versions."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
STANDARD = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


class SourceError(Exception):
    """Target that cannot be found; the text continues a sentence that begins with the target."""


@dataclass(frozen=True)
class _Module:
    name: str
    path: Path | None
    """File of the module; None for a built-in module, and for a folder without an `__init__.py`."""
    folders: tuple[str, ...]
    """Folders with the modules of a package; empty for a plain module."""


def locate(target: str) -> str:
    """Return the dotted path of the module that contains `target`; raise `SourceError` if it cannot be found."""
    top, *rest = target.split(".")
    if not all(part.isidentifier() for part in (top, *rest)) or not rest:
        raise SourceError("must be a dotted path; pass package.module.Name.")
    module = _find(top)
    if module is None:
        raise SourceError(
            f"is not on the Python path: there is no module {top!r}; install it, or run from its directory."
        )
    for depth, part in enumerate(rest, start=1):
        inner = _find(f"{module.name}.{part}")
        if inner is None:
            if depth == len(rest) or not module.folders:  # else the package may create the module at run time
                _require_name(module, part)
            return module.name
        if depth == len(rest) and (names := _names(module)) and part in names:
            return module.name  # a function with the name of its module
        module = inner
    raise SourceError(f"is a module; pass the name of a class or function in it, as in {target}.Name.")


def fingerprint(parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the digests of the custom code and files that the nodes `parts` depend on.

    Returns:
        `modules`: dotted path -> SHA-256 of each custom module that contains a `_target_`, or that such a module
        imports anywhere, directly or indirectly; without the standard library and installed packages.
        `packages`: distribution -> version of the installed packages that these modules import.
        `files`: path in a node's `depends` -> SHA-256 of its content.
    """
    depends = {str(path) for node in parts.values() if isinstance(node, Mapping) for path in node.get("depends") or ()}
    return _fingerprint(frozenset(targets(parts)), frozenset(depends))


def unreadable(where: str, node: Any) -> Iterator[str]:
    """Yield a sentence for each unreadable path in the `depends` of the node at `where`."""
    depends = (node.get("depends") if isinstance(node, Mapping) else None) or []
    if not isinstance(depends, list) or not all(isinstance(path, str) and path for path in depends):
        yield f"`{where}.depends` (={depends!r}) must be a list of files and directories, as in [weights/base.pt]."
        return
    for path in depends:
        try:
            content_digest(path)
        except OSError as error:
            yield (
                f"`{where}.depends` (={path}) cannot be read: {error.strerror} ({error.filename}); pass a file or "
                "a directory, relative to the working directory of the command."
            )


def module_file(name: str) -> Path | None:
    """Return the file of the module `name`; None if there is no file."""
    module = _find(name)
    return None if module is None else module.path


def module_digest(name: str) -> str:
    """Return the SHA-256 of the file of the module `name`; empty if there is no file."""
    path = module_file(name)
    return "" if path is None else digest(_source(path))


@cache
def content_digest(path: str) -> str:
    """Return the SHA-256 of a file, or of all names and contents in a directory except Python's caches."""
    if not os.path.isdir(path):
        return file_digest(path)
    found = sorted((os.path.relpath(file, path), file_digest(file)) for file in _files(path, set()))
    return digest(canonical_json(found))


def look_again() -> None:
    """Clear the caches: modules and files may have changed, for example between two sweeps of one process."""
    importlib.invalidate_caches()
    cached: tuple[Any, ...] = (_find, _source, _fingerprint, content_digest)
    for function in cached:
        function.cache_clear()


@cache
def _fingerprint(named: frozenset[str], depends: frozenset[str]) -> Mapping[str, Any]:
    modules: dict[str, str] = {}
    installed: set[str] = set()
    pending, seen = list(named), set[str]()
    while pending:
        parts = pending.pop().split(".")
        if parts[0] in OURS or parts[0] in VERSIONED:
            continue
        for name in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
            if name in seen:
                continue
            seen.add(name)
            if (module := _find(name)) is None:
                break
            if module.path is not None and _is_own(module):
                modules[name] = digest(_source(module.path))
                pending.extend(_imports(module))
            elif module.path is not None:
                installed.add(parts[0])
    names = {dist for top in installed - sys.stdlib_module_names for dist in _distributions().get(top, ())}
    return {
        "modules": modules,
        "packages": {name: importlib.metadata.version(name) for name in names},
        "files": {path: content_digest(path) for path in depends},
    }


def _is_own(module: _Module) -> bool:
    assert module.path is not None
    path = module.path.resolve()
    if INSTALLED & set(module.path.parts) or INSTALLED & set(path.parts):
        return module.name.partition(".")[0] not in _distributions()
    return not any(path.is_relative_to(folder) for folder in STANDARD)


@cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


@cache
def _find(name: str) -> _Module | None:
    """Find a module in Python's way, but without importing its parent packages."""
    parent, _, last = name.rpartition(".")
    package = _find(parent) if parent else None
    try:
        if package is not None:
            spec = PathFinder.find_spec(last, package.folders) if package.folders else None
        else:
            spec = None if parent else importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    path = Path(spec.origin) if spec.has_location and spec.origin else None
    return _Module(name, path, tuple(spec.submodule_search_locations or ()))


@cache
def _source(path: Path) -> bytes:
    return path.read_bytes()


def _imports(module: _Module) -> Iterator[str]:
    """Yield the dotted paths that a module's source may import, also inside functions and conditions."""
    package = module.name if module.folders else module.name.rpartition(".")[0]
    try:
        tree = ast.parse(_python(module), str(module.path))
    except (SyntaxError, ValueError):
        return  # the import will report it
    importers = {"import_module", "__import__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "importlib":
            importers.update(alias.asname for alias in node.names if alias.name == "import_module" and alias.asname)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), package)
            for alias in node.names:
                yield from _all_of(base) if alias.name == "*" else (f"{base}.{alias.name}",)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in importers:
            given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "name")]
            yield from (_absolute(str(each.value), package) for each in given if isinstance(each, ast.Constant))


def _absolute(name: str, package: str) -> str:
    try:
        return importlib.util.resolve_name(name, package)
    except (ImportError, ValueError):
        return ""


def _all_of(package: str) -> Iterator[str]:
    """Yield a package and its modules: its `__all__` may name any of them."""
    yield package
    found = _find(package)
    if found is not None and (found.path is None or _is_own(found)):
        yield from (f"{package}.{path.stem}" for folder in found.folders for path in Path(folder).glob("*.py"))


def _python(module: _Module) -> bytes:
    """Return the Python source of a module; empty if it is compiled or built in."""
    return _source(module.path) if module.path is not None and module.path.suffix == ".py" else b""


@lru_cache(maxsize=65536)
def _digest_of(path: str, _version: tuple[int, ...]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digest(path: str) -> str:
    """Return the SHA-256 of a file. Unchanged files are not read again: they may be large, and a search plans often."""
    stat = os.stat(path)
    return _digest_of(path, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))


def _files(folder: str, seen: set[str]) -> Iterator[str]:
    seen.add(os.path.realpath(folder))
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__" and os.path.realpath(entry) not in seen:
                    yield from _files(entry.path, seen)
            elif entry.is_file() or entry.is_symlink():
                yield entry.path


def targets(node: Any) -> Iterator[str]:
    """Yield every dotted path in a plain node: each `_target_`, and the `path` of `hydra.utils.get_class`."""
    pending = [node]
    while pending:
        node = pending.pop()
        values = node
        if type(node) is dict:
            values = node.values()
            target = node.get("_target_")
            if isinstance(target, str):
                yield target
                if target.startswith("hydra.utils.") and isinstance(node.get("path"), str):
                    yield node["path"]
        pending += [value for value in values if type(value) in (dict, list)]


def _names(module: _Module) -> frozenset[str] | None:
    """Return the names that a module binds; None if it may bind others (a star import, `__getattr__`)."""
    try:
        return _names_in(_python(module), str(module.path))
    except (SyntaxError, ValueError) as error:
        raise SourceError(f"cannot be read: {module.path} has a syntax error ({error}).") from error


@lru_cache(maxsize=256)
def _names_in(source: bytes, filename: str) -> frozenset[str] | None:
    """Return the names of a module's source. The same text is parsed once: each plan reads sources again."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source, filename)):
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


def _require_name(module: _Module, name: str) -> None:
    if module.path.suffix != ".py" if module.path else not module.folders:
        return  # compiled or built-in: no source to read
    names = _names(module)
    if names is not None and name not in names:
        raise SourceError(f"is not defined: {module.path or module.folders[0]} has no {name!r}; check the spelling.")
