"""Connects to a database: its URL, its engine, advice on its errors."""
