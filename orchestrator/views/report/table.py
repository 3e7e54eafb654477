"""A table as text for a terminal, as HTML and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.core.redact import html, markdown
from orchestrator.planning.number_formats import whole_number

ROWS = 1000
"""Maximum number of rows on the page; the files next to the page have all."""


@dataclass(frozen=True)
class Row:
    """Cells of a row, and the label of the rows that it belongs to, for example a method."""

    label: str
    cells: Sequence[str]
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Rows below headings; a label that rows in succession share is written once."""

    headings: Sequence[str]
    rows: Sequence[Row]
    widths: Sequence[int] = ()
    """Minimum widths of the columns in text, in characters."""
    label: str = "method"
    """Heading of the labels, which stand in the first column on a page."""
    hints: Sequence[str] = ()
    prose: bool = False
    """Whether the last column holds running text."""

    def text(self, before: str = "") -> Iterator[str]:
        """Yield lines: headings, and each label above its rows; `before` is a label that needs no line."""
        columns = zip(self.headings, *(row.cells for row in self.rows), strict=True)
        longest = [max(map(len, column)) for column in columns]
        widths = [*map(max, longest, self.widths)] if self.widths else longest
        yield _aligned(self.headings, widths)
        for row in self.rows:
            if row.label != before:
                yield row.label
            before = row.label
            yield _aligned(row.cells, widths)

    def html(self, most: int | None = None, rest: str = "") -> Iterator[str]:
        """Yield HTML parts.

        Args:
            most: maximum number of rows; None: ROWS
            rest: where the other rows are
        """
        most = ROWS if most is None else most
        hints = self.hints or [""] * len(self.headings)
        heads = "".join(
            f'<th title="{html(hint)}">{html(name)}</th>' if hint else f"<th>{html(name)}</th>"
            for name, hint in zip((self.label, *self.headings), ("", *hints), strict=True)
        )
        yield f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>'
        before = None
        for row in self.rows[:most]:
            classes = [name for name, true in (("line", row.label != before), ("best", row.strong)) if true]
            cells = ["" if row.label == before else row.label, *row.cells]
            last = len(cells) - 1 if self.prose else None
            marked = (
                f'<td class="written">{html(cell)}</td>' if index == last else f"<td>{html(typeset(cell))}</td>"
                for index, cell in enumerate(cells)
            )
            yield f'<tr class="{" ".join(classes)}">{"".join(marked)}</tr>'
            before = row.label
        yield "</tbody></table></div>"
        if len(self.rows) > most:
            yield f'<p class="quiet">{whole_number(len(self.rows) - most)} more rows {rest or "are left out"}.</p>'

    def markdown(self, most: int) -> Iterator[str]:
        """Yield lines of Markdown, with at most `most` rows."""
        yield f"| {self.label} | " + " | ".join(map(markdown, self.headings)) + " |"
        yield "|---" * (1 + len(self.headings)) + "|"
        for row in self.rows[:most]:
            yield f"| {markdown(row.label)} | " + " | ".join(row.cells) + " |"
        yield ""
        if len(self.rows) > most:
            yield f"and {len(self.rows) - most} more points"


def typeset(cell: str) -> str:
    """Use typographic signs and no-break spaces in a figure; a trailing space keeps cells aligned with starred ones."""
    figure = cell[:1] in "+-" or not any(letter.isalpha() for letter in cell)
    return (cell.replace("-", "\u2212") if figure else cell).replace(" ", "\u00a0")


def _aligned(row: Iterable[str], widths: Iterable[int]) -> str:
    """Return a line of a table, cells aligned to the right."""
    return " ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
