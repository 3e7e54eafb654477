"""The masks of a model as one value: collect, compare, pack, store, and apply again."""
