"""Windows of held-out text: the loss of each window, and the comparison of predictions with the dense network's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from orchestrator.workloads.tasks.batch import BatchError, kind
from orchestrator.workloads.tasks.totals import Totals

MOST_WINDOWS = 2000
"""Maximum number of windows that a record holds; of more, the sums of equally many neighbours are held."""
DECIMALS = 4
"""Decimals of the loss of a window, in nats."""


class WindowSums:
    """Cross-entropy and number of tokens of each window of a split, in order.

    Args:
        ignored: label of targets that do not count.
    """

    def __init__(self, ignored: int) -> None:
        self._ignored = ignored
        self._losses: list[float] = []
        self._tokens: list[int] = []

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add the windows of a batch: logits (windows * length, tokens), and labels (windows, length)."""
        each = F.cross_entropy(outputs.float(), labels.flatten(), ignore_index=self._ignored, reduction="none")
        self._losses += each.double().view(labels.shape).sum(1).tolist()
        self._tokens += (labels != self._ignored).sum(1).tolist()

    def details(self) -> dict[str, Any]:
        """Return `loss` in nats and `tokens` of each window, as plain data; None for a loss that is not finite."""
        group = max(1, -(-len(self._losses) // MOST_WINDOWS))
        losses = [sum(self._losses[start : start + group]) for start in range(0, len(self._losses), group)]
        tokens = [sum(self._tokens[start : start + group]) for start in range(0, len(self._tokens), group)]
        if not all(map(math.isfinite, losses)):
            return {}
        return {"loss": [round(loss, DECIMALS) for loss in losses], "tokens": tokens}


def strided_windows(batches: Iterable[Any], stride: int, ignored: int) -> Iterator[tuple[tuple[Tensor, Tensor], int]]:
    """Yield batches of windows (inputs, targets) that begin `stride` tokens after each other, and their sizes.

    The windows are as long as the examples and cover the text of all examples, which must follow each other. A target
    counts in the first window that has it, so each has length - stride or more tokens before it, except in the first
    window; the last window begins earlier, so that it is whole.

    Raises:
        BatchError: the batches are no pairs of consecutive blocks, or shorter than the stride
    """
    pairs = [(batch[0], batch[-1]) for batch in batches if _is_pair(batch)]
    if not pairs:
        raise BatchError(f"`task.stride` (={stride}) needs batches (inputs, targets) of text, as data=text gives them.")
    inputs, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
    length, size = inputs.shape[1], len(pairs[0][0])
    if not torch.equal(inputs[1:, 0], targets[:-1, -1]):
        raise BatchError(
            f"`task.stride` (={stride}) needs examples that follow each other in the text, as those of data=text; the "
            f"test split has others, {kind(pairs[0])}; leave `task.stride` out."
        )
    if stride > length:
        raise BatchError(
            f"`task.stride` (={stride}) must be at most {length}, the tokens of an example (`data.block`)."
        )
    inputs, targets = inputs.flatten(), targets.flatten()
    last = len(inputs) - length
    starts = [*range(0, last, stride), last]
    done = [0, *(start + length for start in starts[:-1])]
    for first in range(0, len(starts), size):
        places = torch.tensor(starts[first : first + size], device=inputs.device)[:, None]
        places = places + torch.arange(length, device=inputs.device)
        new = places >= torch.tensor(done[first : first + size], device=inputs.device)[:, None]
        yield (inputs[places], targets[places].masked_fill(~new, ignored)), len(places)


def _is_pair(batch: Any) -> bool:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        return False
    return all(isinstance(each, Tensor) and each.ndim == 2 for each in batch) and batch[0].shape == batch[1].shape


def add_comparison(totals: Totals, outputs: Tensor, dense: Tensor, known: Tensor) -> None:
    """Add the divergence of a batch, and the places with the same most probable token.

    divergence = sum over places of KL(q || p) = sum over tokens v of q_v (log q_v - log p_v)

    where p = softmax(outputs) and q = softmax(dense), in float32, window by window.

    Args:
        totals: the sums to add to, `divergence` and `agreed`.
        outputs: logits (windows, length, tokens) of the network.
        dense: those of the dense network.
        known: places (windows, length) that count.
    """
    for mine, theirs, counts in zip(outputs, dense, known, strict=True):
        p, q = (each.float().log_softmax(1) for each in (mine, theirs))
        each = (q.exp() * (q - p)).where(q > float("-inf"), 0.0).sum(1)  # a token without probability adds nothing
        totals.add("divergence", each.double().where(counts, 0.0).sum().reshape(1))
    agreed = outputs.argmax(2) == dense.argmax(2)
    totals.count("agreed", (agreed & known).sum())
