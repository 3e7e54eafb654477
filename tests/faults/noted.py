"""Optimizer that notes each stage that begins to train; a configuration can name an optimizer of the user's own."""

from __future__ import annotations

import os
from typing import Any

import torch


class SGD(torch.optim.SGD):
    """SGD that appends a line to the file in NOTES, if set, at its second step, as a preflight takes only one step."""

    steps = 0

    def step(self, *arguments: Any, **options: Any) -> Any:
        self.steps += 1
        if self.steps == 2 and (path := os.environ.get("NOTES")):
            with open(path, "a") as file:
                file.write(f"{os.getpid()}\n")
        return super().step(*arguments, **options)
