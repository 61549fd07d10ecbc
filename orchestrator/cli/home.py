"""Where a sweep's files lie: run folders of the trials, the default database, saved tracebacks."""

from __future__ import annotations

import os
from pathlib import Path

HOME_VARIABLE = "SWEEP_HOME"


def sweep_home() -> Path:
    """SWEEP_HOME, or `.sweep` under the current folder; absolute, and not made here."""
    return Path(os.environ.get(HOME_VARIABLE) or ".sweep").expanduser().absolute()
