"""Comparison of a network's predictions with the dense network's: divergence and agreement."""

from __future__ import annotations

from torch import Tensor

from orchestrator.workloads.tasks.totals import Totals


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
