"""Storage of pruned parameters: under hooks with torch's semantics, or under a mask keeper; and their release."""
