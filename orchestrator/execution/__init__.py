"""Execution of a plan: which segment runs next, and where (on Ray, or in this process)."""
