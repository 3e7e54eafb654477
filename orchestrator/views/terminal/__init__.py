"""Terminal display of a running sweep."""
