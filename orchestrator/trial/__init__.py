"""A trial's configuration as stages see it: its canonical form in keys, and the starts of its trainings. No torch."""
