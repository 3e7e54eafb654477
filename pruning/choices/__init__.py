"""The seven choices that make up a pruning method, and published methods as combinations of them; no torch."""
