"""Mixtures of experts: where they are in a network, what is routed to each expert, and calls without removed ones."""
