"""Masks that change within a training, in any loop: `pruning.dynamics.rigl(every=100).attach(...)`.

    masks = pruning.dynamics.random_masks(model, 0.9, generator=generator)
    dynamics = pruning.dynamics.rigl(every=100, until=0.75)
    dynamics.attach(model, masks, optimizer, length=2000, generator=generator)

`DYNAMICS` lists the methods with their options. Each is called with options and returns a `Dynamics`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pruning.catalogue.dynamics import DYNAMICS as _ROWS
from pruning.dynamics.changing_masks import Dynamics
from pruning.dynamics.gradual_pruning import random_masks
from pruning.dynamics.mask_history import MaskUpdate

DYNAMICS = {name: row for name, row in _ROWS.items() if row.in_training}
"""Name -> method."""

__all__ = ["DYNAMICS", "Dynamics", "MaskUpdate", "random_masks"]
__all__ += list(DYNAMICS)


def __getattr__(name: str) -> Callable[..., Dynamics]:
    if name not in DYNAMICS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    row = DYNAMICS[name]
    make = row.load()

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Dynamics:
        names = [option.name for option in row.options]
        given = dict(zip(names, args, strict=False)) | options
        if row.unlisted:  # further options belong to the pruning method
            row.refuse_broken(given)
        else:
            row.refuse(given)
        found: Dynamics = make(*args, **options)
        return found

    globals()[name] = made
    return made


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
