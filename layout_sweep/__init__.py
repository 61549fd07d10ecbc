"""The name by which processes of this project start: see start.py."""
