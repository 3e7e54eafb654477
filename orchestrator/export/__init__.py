"""Networks that leave a store: which one, what is written of it, and what its README says."""
