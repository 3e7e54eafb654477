"""Which segment runs next, and where: on Ray, or in this process."""
