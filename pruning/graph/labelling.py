"""The labels of a traced network, by the rules of all operations."""

from __future__ import annotations

from pruning.graph import mixing, moving, products
from pruning.graph.constants import Constants
from pruning.graph.flow import Flow
from pruning.graph.tracing import Traced

RULES = {**moving.RULES, **mixing.RULES, **products.RULES}
"""Name of an operation -> its rule."""


def flow_of(trace: Traced) -> Flow:
    """Return the labels of a traced network."""
    return Flow(trace, Constants(trace), RULES)
