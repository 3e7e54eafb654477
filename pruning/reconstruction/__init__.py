"""Pruning layer by layer with calibration data: statistics of inputs, and methods that rebuild each layer's outputs."""
