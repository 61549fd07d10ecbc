"""Trials that do not run: formulas of their own, and tables of what others measured."""
