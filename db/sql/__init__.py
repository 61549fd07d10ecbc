"""A person's SQL: checked, and run where it cannot change anything."""
