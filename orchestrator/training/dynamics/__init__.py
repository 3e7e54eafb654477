"""Trainings in which masks change, and the multiply-accumulates that every training takes."""
