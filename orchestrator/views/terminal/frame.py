"""Texts fitted into a terminal's width and height, with wide characters counted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size

MOST_RUNNING, LEAST_RUNNING, MOST_OF_AN_AXIS = 12, 3, 4
"""Maximum and minimum number of lines for running stages; maximum number of lines for an axis with many values."""

Running = tuple[str, str, str]
"""Running stage: its name, its state, its running time."""


def frame(
    head: Sequence[str],
    axes: Mapping[str, Sequence[str]],
    running: Sequence[Running],
    width: int,
    height: int,
    more: int = 0,
) -> list[str]:
    """Return the lines of a display: at most `height` lines of at most `width` cells.

    Args:
        head: first lines; the last of them are dropped if there is no room
        axes: name of an axis -> progress of each value; one line each, several if there is room
        running: running stages, MOST_RUNNING of them if there are more; those without room are counted in a last line
        width: cells of a line
        height: number of lines
        more: number of other running stages, which are only counted
    """
    least = min(len(running), LEAST_RUNNING)
    lines = [fitted(text, width) for text in head[: max(1, height - least)]][: max(0, height)]
    shown = list(axes.items())[: max(0, height - len(lines) - least)]
    room = height - len(lines) - len(shown)
    stages = columns(running, width, min(MOST_RUNNING, room), more)
    each = 1 + (room - len(stages)) // len(shown) if shown else 1
    label = max((cell_len(name) for name, _ in shown), default=0)
    for name, texts in shown:
        lines += row(f"{name}{' ' * (label - cell_len(name))}", texts, width, min(each, MOST_OF_AN_AXIS))
    return lines + stages


def with_speeds(running: Sequence[Running], speeds: Sequence[str], width: int) -> Sequence[Running]:
    """Return running stages with their speeds in their states, if nothing is cut for that."""
    longer = [
        (name, f"{text}; {speed}" if speed else text, time)
        for (name, text, time), speed in zip(running, speeds, strict=True)
    ]
    wide = 4 + sum(max((cell_len(each[part]) for each in longer), default=0) for part in range(3))
    return longer if wide <= width else running


def fitted(text: str, width: int) -> str:
    """Fit a text into one line of at most `width` cells; `..` marks a cut."""
    text = " ".join(text.split("\n"))
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 2) + ".." if width > 2 else set_cell_size(text, max(0, width))


def abridged(text: str, width: int) -> str:
    """Fit a text into one line of at most `width` cells, cut in the middle, because names differ at the end."""
    text = " ".join(text.split("\n"))
    if cell_len(text) <= width or width < 6:
        return fitted(text, width)
    end = text[-(most := 2 * (width - 2) // 3) :]
    while cell_len(end) > most:
        end = end[1:]
    return f"{set_cell_size(text, width - 2 - cell_len(end))}..{end}"


def row(label: str, texts: Sequence[str], width: int, lines: int) -> list[str]:
    """Return texts side by side after a label, on at most `lines` lines; texts that do not fit are counted."""
    indent = cell_len(label) + 2
    left, found = list(texts), list[str]()
    while left and len(found) < lines:
        count, line = 1, fitted(left[0], width - indent)
        for taken in range(1, len(left) + 1):
            text = "  ".join(left[:taken])
            if cell_len(text) > width - indent:
                break
            rest = f"  and {len(left) - taken} more" if len(found) == lines - 1 and taken < len(left) else ""
            if cell_len(text + rest) <= width - indent:
                count, line = taken, text + rest
        left = left[count:]
        found.append(fitted(f"{' ' * indent if found else f'{label}  '}{line}", width))
    return found


def columns(running: Sequence[Running], width: int, lines: int, more: int = 0) -> list[str]:
    """Return running stages in columns, on at most `lines` lines; the state is cut first, the time never."""
    if lines < len(running) + more:
        count = len(running) + more - max(0, lines - 1)
        others = f"and {count} more run" if lines > 1 else f"{count} stages run"
        return [*columns(running[: lines - 1], width, lines), fitted(others, width)] if lines > 0 else []
    time_room = max((cell_len(time) for _, _, time in running), default=0)
    room = max(0, width - time_room - 4)
    longest, most = (max((cell_len(each[part]) for each in running), default=0) for part in (0, 1))
    name_room = min(longest, max(room - most, room // 2))
    text_room = min(most, room - name_room)
    found = []
    for name, text, time in running:
        time = " " * (time_room - cell_len(time)) + time
        line = f"{_cell(abridged(name, name_room), name_room)}  {_cell(text, text_room)}  {time}"
        found.append(fitted(line, width))
    return found


def _cell(text: str, room: int) -> str:
    return set_cell_size(fitted(text, room), room)
