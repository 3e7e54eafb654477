"""What is built in, one row each: scores, method classes, repairs, allocations and units as plain data; no torch."""
