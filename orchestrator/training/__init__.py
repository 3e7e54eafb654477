"""One stage: build, train, prune, evaluate. What a worker runs."""
