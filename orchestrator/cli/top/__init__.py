"""The screen of `sweep top`: a sweep in a terminal, refreshed once a second."""
