"""Count the planted mistakes that the tests find: one changed operator or constant of the packages at a time.

Each mutant is planted in a copy of the last commit, and the tests of its folder run there until the first failure:

    .venv/bin/python scripts/benchmarks/plant_mutants.py --count 80 --seed 0
    .venv/bin/python scripts/benchmarks/plant_mutants.py --count 20 --within orchestrator/config orchestrator/commands
    .venv/bin/python scripts/benchmarks/plant_mutants.py --count 5 --within pruning/masks --tests tests/pruning/masks

Equal arguments plant equal mutants in equal sources. Run it before and after a change of tests: as many must die.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
}
"""Operator -> its text, and the text that replaces it."""


@dataclass(frozen=True)
class Mutant:
    """Replacement in one line of a file, by columns in UTF-8 bytes."""

    path: str
    line: int
    start: int
    end: int
    kind: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {self.new}"

    def planted(self, text: str) -> str:
        """Return the text of the file with this mutant."""
        lines = text.splitlines(keepends=True)
        line = lines[self.line - 1].encode()
        lines[self.line - 1] = (line[: self.start] + self.new.encode() + line[self.end :]).decode()
        return "".join(lines)


def mutants_of(path: str, text: str) -> Iterator[Mutant]:
    """Yield every mutant of a file whose change lies within a line."""
    lines = [line.encode() for line in text.splitlines()]
    for node in ast.walk(ast.parse(text)):
        for left, operator, right in _operations(node):
            if type(operator) not in SWAPS or left.end_lineno != right.lineno or left.end_col_offset is None:
                continue
            old, new = (part.encode() for part in SWAPS[type(operator)])
            between = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
            if between.count(old) == 1:
                start = left.end_col_offset + between.index(old)
                yield Mutant(path, right.lineno, start, start + len(old), type(operator).__name__, new.decode())
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.end_col_offset is not None:
            new_value = not node.value if isinstance(node.value, bool) else node.value + 1
            place = (node.lineno, node.col_offset, node.end_col_offset)
            yield Mutant(path, *place, type(node.value).__name__, repr(new_value))


def _operations(node: ast.AST) -> Iterator[tuple[ast.expr, ast.AST, ast.expr]]:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        yield from zip(operands, node.ops, operands[1:], strict=False)
    elif isinstance(node, ast.BoolOp):
        yield from ((left, node.op, right) for left, right in zip(node.values, node.values[1:], strict=False))
    elif isinstance(node, ast.BinOp):
        yield node.left, node.op, node.right


def drawn(count: int, seed: int, within: Sequence[str]) -> list[Mutant]:
    """Return mutants drawn by kind, then by file, then by place, so that no kind and no long file prevails."""
    by_kind: dict[str, dict[str, list[Mutant]]] = {}
    places = [ROOT / place for place in within]
    for path in sorted(file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))):
        name = str(path.relative_to(ROOT))
        for mutant in mutants_of(name, path.read_text()):
            by_kind.setdefault(mutant.kind, {}).setdefault(name, []).append(mutant)
    draw, found = random.Random(seed), dict[Mutant, None]()
    while len(found) < count:
        files = by_kind[draw.choice(sorted(by_kind))]
        found[draw.choice(files[draw.choice(sorted(files))])] = None
    return [*found]


def tests_of(path: str) -> list[str]:
    """Return the folder of tests of a file; for a file of the package itself, the files of tests of the package."""
    folder = Path("tests", path).parent
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    if len(folder.parts) > 2:
        return [str(folder)]
    return [str(each.relative_to(ROOT)) for each in sorted((ROOT / folder).glob("test_*.py"))] + ["tests/test_cli.py"]


def passes(copy: Path, tests: Sequence[str], seconds: float) -> bool:
    """Run tests in the copy; return whether all pass in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> None:
    """Plant mutants, and print for each whether the tests find it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", nargs="+", default=["pruning", "orchestrator"], metavar="PATH")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="tests in place of those of a mutant's folder")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for the tests of a mutant; longer is found")
    options = parser.parse_args()
    died, mutants = 0, drawn(options.count, options.seed, options.within)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(copy)], cwd=ROOT, check=True)
        try:
            for mutant in mutants:
                file = copy / mutant.path
                sound = file.read_text()
                file.write_text(mutant.planted(sound))
                found = not passes(copy, options.tests or tests_of(mutant.path), options.timeout)
                file.write_text(sound)
                died += found
                print("died    " if found else "survived", mutant, flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(copy)], cwd=ROOT, check=True)
    print(f"{died} of {len(mutants)} died")


if __name__ == "__main__":
    main()
