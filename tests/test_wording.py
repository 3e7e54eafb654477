"""Docstrings begin with a noun or a verb: the first rule of plain English, checked on the source text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("pruning", "orchestrator", "hydra_plugins", "scripts", "tests")
RIDDLES = ("Of", "That", "As", "Such", "What")
"""First words after which a sentence hides its subject."""
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring: of modules, classes and functions, and below assignments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def riddles(source: str) -> list[str]:
    """Return line and first line of each docstring that begins with one of RIDDLES."""
    word = rf"({'|'.join(RIDDLES)})\b"
    if not re.search(rf"[\"'][\s\\]*{word}", source):  # parsing takes fifty times as long
        return []
    return [f"{line}: {text.splitlines()[0]}" for line, text in docstrings(source) if re.match(word, text)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_begins_with_a_riddle(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in FILES
        if path.is_relative_to(ROOT / folder) and (lines := riddles(path.read_text(encoding="utf-8")))
    }

    assert not found, "begin these docstrings with a noun or a verb"


def test_riddles_are_found() -> None:
    source = '"""What is shared."""\nLIMIT = 3\n"""Of all."""\ndef f():\n    """Assign."""\n    x = "That is text."\n'

    assert riddles(source) == ["1: What is shared.", "3: Of all."]
