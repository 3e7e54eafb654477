"""Workloads: data sets, models, tasks, and targets of the user's own."""
