"""What people look at: the terminal, the report, MLflow."""
