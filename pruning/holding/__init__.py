"""How a pruned parameter is held: by hooks with the semantics of torch, or by a keeper; and how it is let go."""
