"""Preflight: each stage runs on a few examples before any training, with errors that name the part at fault."""
