"""Deployment formats, one module each, and their table."""
