"""What a trial's configuration is: its schema, its rules, how it is composed, and what of it identifies a result."""
