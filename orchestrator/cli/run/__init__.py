"""The command `run`: its checks, its progress, its notices and its end."""
