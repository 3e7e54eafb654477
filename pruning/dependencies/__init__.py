"""Channels, units and heads of all tensors that can only go together: their scores, and budgets for them."""
