"""Comparison of a sweep with a saved baseline or with another sweep, paired by seed and point."""
