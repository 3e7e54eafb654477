"""Tell classes apart: cross-entropy, and the fraction of examples that are told as they are labelled."""

from __future__ import annotations

from orchestrator.core.metrics import Metric

ACCURACY = Metric("accuracy", "%", "higher", margin=0.01, format=".2%")
"""The fraction of examples whose highest output is that of their class."""
