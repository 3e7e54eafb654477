"""Python access to a store: its sweeps as tables and figures, and its trials' networks."""
