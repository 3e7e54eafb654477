"""Shrinking: a smaller network without the channels that masks emptied, with the outputs of the masked network."""
