"""Programs of the tests, run as processes of their own: a process joins one Ray cluster at a time, and can be killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def told(module: str, *arguments: str, seconds: float) -> dict[str, Any]:
    """What `python -m module` says in its line `OUT {...}`, within so many seconds."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert "OUT " in done.stdout, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.split("OUT ", 1)[1])
    return found
