"""What a store holds, in Python: its sweeps as tables and figures, and the networks of its trials."""
