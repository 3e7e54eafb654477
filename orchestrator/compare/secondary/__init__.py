"""Figures of points besides the primary metric on test: further test sets, classes, windows of held-out text."""
