"""Dependency groups: channels, units and heads that can only be removed together, their scores and budgets."""
