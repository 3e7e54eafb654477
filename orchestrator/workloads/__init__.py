"""What is trained: data sets, models, and targets of the user's own."""
