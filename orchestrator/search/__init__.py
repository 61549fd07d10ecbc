"""Proposes: which layout to measure next."""
