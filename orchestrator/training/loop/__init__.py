"""The training loop, the loops of users, the steps of both, and evaluation."""
