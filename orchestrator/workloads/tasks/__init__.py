"""Tasks: the loss that a network is trained with, and the metrics that measure it."""
