"""Selection of the entries or channels to prune: channel norms, and exact kernels that set k entries of a mask to 0."""
