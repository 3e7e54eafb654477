"""A stage tried on a few examples before any is trained, and what is said where it cannot run."""
