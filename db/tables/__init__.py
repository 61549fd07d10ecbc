"""The tables of the store, by what they are about."""
