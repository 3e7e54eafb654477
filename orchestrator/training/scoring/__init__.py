"""Scoring in a round: draw the examples that scores read, and rank the weights by score."""
