"""The statements that read."""
