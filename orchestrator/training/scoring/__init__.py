"""Scores in a round: the examples that they read, and the ranking by them."""
