"""Export of networks from a store: choose the trial, write its files, describe it in a README."""
