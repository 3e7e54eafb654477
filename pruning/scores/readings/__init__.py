"""Quantities that scores read: the network, its data, gradients of each example, the Fisher matrix."""
