"""Training state: collect it, save it in checkpoints, restore it and resume from it."""
