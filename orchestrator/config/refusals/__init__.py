"""Explanations of settings that Hydra refuses: command lines, choices and their files, and keys."""
