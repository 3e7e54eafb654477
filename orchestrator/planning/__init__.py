"""Plans of sweeps: a graph of stages in which equal work appears once, its preview, and its forecast."""
