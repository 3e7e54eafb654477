"""Pruning engine: score, allocate, select and repair; plan a pruning, and commit the plan to a network."""
