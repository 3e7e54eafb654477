"""Finished stages in a store: their commits and the contents of their files."""
