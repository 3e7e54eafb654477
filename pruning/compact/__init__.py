"""What masks have emptied, taken out: the smaller network that computes what the masked one does."""
