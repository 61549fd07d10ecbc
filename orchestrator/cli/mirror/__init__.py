"""The command `mirror`, and the process that mirrors a sweep while it runs."""
