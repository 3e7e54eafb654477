"""Custom model and optimizer that get secrets as arguments, and fail with the secrets in their messages."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn


def net(input_shape: list[int], classes: int, **_secrets: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], classes))


class SGD(torch.optim.SGD):
    """SGD that fails, if asked to, at its third step, which a preflight does not reach."""

    def __init__(self, parameters: Any, lr: float, api_key: str, fails: bool, **_other: Any) -> None:
        super().__init__(parameters, lr=lr)
        self.api_key, self.steps_left = api_key, 2 if fails else -1

    def step(self, *arguments: Any, **options: Any) -> Any:
        if self.steps_left == 0:
            secret = os.environ["AWS_SECRET_ACCESS_KEY"]
            raise RuntimeError(
                f"no login with {self.api_key} at mysql://me:{secret}/x@host/db, {{'password': '{secret}', "
                f'"tokens": ["{secret}"]}}, AWS_SECRET_ACCESS_KEY={secret}, Authorization: Bearer {secret}'
            )
        self.steps_left -= 1
        return super().step(*arguments, **options)
