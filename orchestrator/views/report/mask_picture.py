"""SVG overview of a trial's masks: the sparsity of each tensor after each round. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.records import StageRecord
from orchestrator.core.redact import html
from orchestrator.core.stage_kinds import KINDS
from orchestrator.planning.number_formats import in_points, whole_number

ROW, CELL, LETTER = 22, 74, 6.6
"""Pixels: height of a row, width of a cell, width of a letter."""


def mask_picture(chain: Sequence[StageRecord]) -> bytes:
    """Return an SVG grid with a row for each tensor and a column for each round; sparser cells are darker."""
    rounds = [record for record in chain if KINDS[record.kind].prunes]
    names = list(dict.fromkeys(name for record in rounds for name in record.tensor_sparsity))
    sizes = {name: size for record in rounds for name, size in record.tensor_sizes.items()}
    labels = {name: f"{name} ({whole_number(sizes.get(name, 0))})" for name in names}
    left = round(LETTER * max(map(len, (*labels.values(), "overall")))) + 16
    width, height = left + CELL * len(rounds) + 8, ROW * (len(names) + 2) + 8
    parts = [_text(left - 8, 1, "sparsity in %", "end")]
    parts += [_text(left + CELL * (i + 0.5), 1, f"round {record.round}") for i, record in enumerate(rounds)]
    for line, name in enumerate((*names, None)):
        parts.append(_text(left - 8, line + 2, "overall" if name is None else labels[name], "end"))
        for column, record in enumerate(rounds):
            value = record.sparsity if name is None else record.tensor_sparsity.get(name)
            if value is not None:
                parts.append(_cell(left + CELL * column, line + 1, value))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    ).encode()


def _cell(x: float, line: int, sparsity: float) -> str:
    shade = round(255 - 205 * sparsity)
    ink = "white" if shade < 140 else "black"
    grey = f"rgb({shade},{shade},{shade})"
    box = f'<rect x="{x}" y="{ROW * line + 5}" width="{CELL - 2}" height="{ROW - 2}" fill="{grey}"/>'
    return box + _text(x + CELL / 2, line + 1, in_points(sparsity), ink=ink)


def _text(x: float, line: int, text: str, anchor: str = "middle", ink: str = "black") -> str:
    return f'<text x="{x:g}" y="{ROW * line - 2}" text-anchor="{anchor}" fill="{ink}">{html(text)}</text>'
