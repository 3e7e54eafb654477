"""Checklist that a pruning comparison should pass, as a list of rules: a file a subject. Pure."""
