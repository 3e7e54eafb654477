"""Which entries or channels to prune: channels and their norms, and exact kernels that mark k in a mask."""
