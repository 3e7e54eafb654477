"""The seven choices that make a pruning method, and the published methods as combinations of them; no torch."""
