"""Traced graphs of networks: constant values, and channel labels that one rule per operation passes on."""
