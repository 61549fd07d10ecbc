"""Copies of results in experiment trackers: what a run holds, and how MLflow and W&B take it."""
