"""The sweep file: its sections, their checks and the reader of its text."""
