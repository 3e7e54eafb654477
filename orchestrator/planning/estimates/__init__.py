"""Estimates of the time, bytes and memory of the stages of a plan. Pure."""
