"""Configuration of a trial: its schema, its rules, its composition, and the fingerprints of its sources."""
