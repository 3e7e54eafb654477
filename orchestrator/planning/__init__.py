"""Trial configurations to a graph of stages in which equal work appears once, and its preview."""
