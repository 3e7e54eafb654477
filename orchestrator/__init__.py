"""Distributed pruning sweeps: plan, run, store and compare the trials that a Hydra config defines."""

__version__ = "0.1.0"
