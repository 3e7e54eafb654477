"""Inputs of scores: a copy of the network, scoring data, per-example gradients, the Fisher matrix."""
