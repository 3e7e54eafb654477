"""Schemas and rules of config groups: training, rounds, pruning choices, deployment, and results."""
