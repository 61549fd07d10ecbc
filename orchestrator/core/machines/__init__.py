"""Judges which nodes are fit, and packs gangs onto nodes."""
