"""A network as a traced graph: constants, and labels that pass from operation to operation through rules."""
