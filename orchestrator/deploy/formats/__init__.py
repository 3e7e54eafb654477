"""The formats that a network is written in, a module each, and their table."""
