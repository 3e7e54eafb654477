"""MLflow view of a sweep, and the process that writes it."""
