"""What pruning has bought: sparsity, bytes, multiply-accumulates, latency."""
