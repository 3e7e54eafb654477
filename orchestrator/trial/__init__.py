"""A trial between its configuration and its stages: rules, choices for the engine, form in keys, names. No torch."""
