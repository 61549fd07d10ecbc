"""The command `best`, and the tables that it prints."""
