"""Storage of pruned parameters under hooks with the semantics of torch, and their release."""
