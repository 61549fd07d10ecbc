"""Runs `sweep` on the head of a cluster. `ray submit` copies this one file there.

See docs/operations.md:
ray submit deploy/local/cluster.yaml deploy/local/sweep_on_cluster.py -- run mine.yaml
"""

import os
import sys

from layout_sweep.start import sweep

if __name__ == "__main__":
    os.environ.setdefault("RAY_ADDRESS", "auto")
    sys.exit(sweep())
