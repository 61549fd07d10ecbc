"""How a database is reached: its URL, its engine, its advice."""
