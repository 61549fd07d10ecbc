"""Runs programs of the tests as processes, since a process joins one Ray cluster at a time.

Nothing of them is left, however they end, unless tests/bounded.py itself is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.bounded import PATIENCE_SECONDS, TOO_LONG


def finished(command: Sequence[str], *, seconds: float) -> subprocess.CompletedProcess[str]:
    """A command, after it and all that it started have ended. Raises TimeoutExpired."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bounded", str(seconds), *command],
        capture_output=True,
        text=True,
        timeout=seconds + 2 * PATIENCE_SECONDS,  # so even its end hangs
        check=False,
    )
    if done.returncode == TOO_LONG:
        raise subprocess.TimeoutExpired(
            list(command), seconds, output=done.stdout, stderr=done.stderr
        )
    return done


def told(module: str, *arguments: str, seconds: float) -> dict[str, Any]:
    """What `python -m module` says in its line `OUT {...}`, within so many seconds."""
    done = finished([sys.executable, "-m", module, *arguments], seconds=seconds)
    assert "OUT " in done.stdout, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.split("OUT ", 1)[1])
    return found
