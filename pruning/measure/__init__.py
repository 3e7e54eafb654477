"""Measures of a pruned network: sparsity, bytes, multiply-accumulates, latency, memory."""
