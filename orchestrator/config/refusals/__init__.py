"""What is told of settings that Hydra refuses: of a command line, a choice and its file, a key."""
