"""Shared data types, events, errors, canonical JSON, redaction and seeding, used by every other room."""
