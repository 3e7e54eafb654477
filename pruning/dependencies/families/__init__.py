"""Families of stock transformers: what their configurations can express, units of them, and the smaller networks."""
