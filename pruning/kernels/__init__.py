"""C kernels that compute a layer from its nonzero weights: compiled at first use, chosen by measurement."""
