"""Pruning methods for one parameter or across modules, and the functions that apply them."""
