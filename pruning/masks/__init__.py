"""Masks of a model as one value: collect, compare, pack, save, load and apply them."""
