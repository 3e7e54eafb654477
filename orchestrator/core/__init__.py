"""Nouns, events, errors, canonical JSON, redaction, seeding: what every other room speaks of."""
