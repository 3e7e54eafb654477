"""An optimizer that notes each stage that begins to train: the one thing of it that a configuration can name."""

from __future__ import annotations

import os
from typing import Any

import torch


class SGD(torch.optim.SGD):
    """Appends a line to the file that NOTES names, if it does."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if path := os.environ.get("NOTES"):
            with open(path, "a") as file:
                file.write(f"{os.getpid()}\n")
