"""Explanations of settings that Hydra refuses: a command line, a choice and its file, a key."""
