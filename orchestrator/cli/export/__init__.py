"""The command `export`, and what it writes for training frameworks."""
