"""Tests, and the programs that they start."""

import gc

# As the command does: imports with torch make 400,000 permanent objects.
gc.set_threshold(50_000, 10, 10)
