"""Tests, and the programs that they start."""

import gc

# As the command does: imports make 400,000 objects with torch, and all of them stay
gc.set_threshold(50_000, 10, 10)
