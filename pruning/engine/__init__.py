"""The steps of a pruning put together: score, allocate, select, repair; a plan, and its commitment to a network."""
