"""Count the lines of code in packages, without blank lines, comments and docstrings (also of attributes).

python scripts/count_code.py [PACKAGE ...]       # default: orchestrator pruning
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("orchestrator", "pruning")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Return the number of lines with code in a module."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for t in tokens if t.type not in _NO_CODE for line in range(t.start[0], t.end[0] + 1)}
    return len(lines - set(_docstring_lines(ast.parse(source))))


def _docstring_lines(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of strings that are statements: docstrings, also of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def main() -> None:
    """Print a line for each package or room, and the total."""
    total = 0
    for package in sys.argv[1:] or PACKAGES:
        root = Path(package)
        for room in [root, *sorted(path for path in root.iterdir() if path.is_dir() and path.name != "__pycache__")]:
            files = sorted(room.glob("*.py") if room == root else room.rglob("*.py"))
            count = sum(code_lines(file.read_text(encoding="utf-8")) for file in files)
            total += count
            print(f"{count:6} {room} ({len(files)} files)")
    print(f"{total:6} lines of code")


if __name__ == "__main__":
    main()
