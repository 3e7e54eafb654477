"""Unfinished stages in a store: their checkpoints and failures, which are never part of a result."""
