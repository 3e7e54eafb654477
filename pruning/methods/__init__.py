"""What to prune: the methods, one parameter at a time or across modules, and the functions that apply them."""
