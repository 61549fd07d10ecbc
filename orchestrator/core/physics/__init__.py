"""Predicts the memory and the time of a layout, and calibrates both."""
