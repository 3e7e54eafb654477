"""Deployment of networks: shrink them, write them in a format, check their outputs, measure them."""
