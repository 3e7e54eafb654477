"""Figures of a comparison: their plain data, and how they are drawn."""
