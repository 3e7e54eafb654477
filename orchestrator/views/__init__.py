"""Views of a sweep for people: the terminal, the report, MLflow."""
