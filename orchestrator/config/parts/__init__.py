"""What the groups of a configuration hold: networks and data sets, and the choices that a pruning method is."""
