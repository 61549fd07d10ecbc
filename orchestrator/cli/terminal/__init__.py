"""Streams, texts, logs and signals of a command: what is between it and its terminal."""
