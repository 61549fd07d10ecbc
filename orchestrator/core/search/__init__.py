"""Enumerates, ranks and proposes layouts."""
