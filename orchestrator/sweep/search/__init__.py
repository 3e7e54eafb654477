"""Searches: policies over a plan that decide from committed stages which networks are trained next. Pure."""
