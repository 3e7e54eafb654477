"""What a terminal shows of a sweep while it runs."""
