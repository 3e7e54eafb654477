"""Trials of several processes: the ranks of a trial, one model on all of them, and the ranks that follow the first."""
