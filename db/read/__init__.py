"""What the store tells."""
