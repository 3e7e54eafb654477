"""Moving averages of the weights of a network, which generalise better than the weights of any one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Averages:
    """Exponential moving averages of parameters: average <- decay average + (1 - decay) parameter.

    They begin with the parameters after the first step, so that the initialisation has no part in them, and what is 0
    after every step is 0 in them.

    Args:
        parameters: what is trained.
        decay: in (0, 1).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._parameters, self._decay = parameters, decay
        self.values: list[Tensor] = []
        """In the order of the parameters; none before the first step."""

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as an optimizer has left them."""
        if self.values:
            torch._foreach_lerp_(self.values, list(self._parameters), 1 - self._decay)
        else:
            self.values = [parameter.detach().clone() for parameter in self._parameters]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the network have the averages for a while."""
        held = [parameter.detach().clone() for parameter in self._parameters]
        self.apply()
        try:
            yield
        finally:
            self._assign(held)

    def apply(self) -> None:
        """Let the network have the averages from now on."""
        self._assign(self.values)

    @torch.no_grad()
    def _assign(self, values: Sequence[Tensor]) -> None:
        if values:
            torch._foreach_copy_(list(self._parameters), list(values))
