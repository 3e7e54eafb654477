"""An optimizer that notes each stage that begins to train: the one thing of it that a configuration can name."""

from __future__ import annotations

import os
from typing import Any

import torch


class SGD(torch.optim.SGD):
    """Appends a line to the file that NOTES names, if it does, at its second step: a preflight takes but one."""

    steps = 0

    def step(self, *arguments: Any, **options: Any) -> Any:
        self.steps += 1
        if self.steps == 2 and (path := os.environ.get("NOTES")):
            with open(path, "a") as file:
                file.write(f"{os.getpid()}\n")
        return super().step(*arguments, **options)
