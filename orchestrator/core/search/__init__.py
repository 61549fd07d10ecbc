"""How layouts are enumerated, ranked and proposed."""
