"""What a rule of the audit answers, and how it lists what breaks it."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Literal

Verdict = Literal["pass", "fail", "n/a"]
Answer = tuple[Verdict, str]

_EXAMPLES = 3


def held(subjects: Sized, faults: Iterable[str], reason: str, none: str = "nothing was pruned") -> Answer:
    """Return the answer of a rule: what breaks it, else why it passes; `none` where it has no `subjects`."""
    if not subjects:
        return "n/a", none
    return ("fail", listed) if (listed := some(faults)) else ("pass", reason)


def some(texts: Iterable[str]) -> str:
    listed = list(texts)
    more = f" and {len(listed) - _EXAMPLES} more" if len(listed) > _EXAMPLES else ""
    return "; ".join(listed[:_EXAMPLES]) + more
