"""What a network is trained for, and what it is measured by."""
