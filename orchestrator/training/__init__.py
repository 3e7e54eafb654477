"""Training stages, which a worker runs: build a network, train it, prune it, evaluate it."""
