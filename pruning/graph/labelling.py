"""Labelling of a traced network with the rules of all operations."""

from __future__ import annotations

from pruning.graph import mixing_rules, moving_rules, product_rules
from pruning.graph.constant_tensors import Constants
from pruning.graph.label_flow import Flow
from pruning.graph.tracing import Traced

RULES = {**moving_rules.RULES, **mixing_rules.RULES, **product_rules.RULES}
"""Name of an operation -> its rule."""


def flow_of(trace: Traced) -> Flow:
    """Label every tensor of a traced network."""
    return Flow(trace, Constants(trace), RULES)
