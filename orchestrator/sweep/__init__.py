"""Conductor of sweeps: plan, run the missing stages, show progress, compare, report."""
