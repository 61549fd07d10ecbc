"""Runs a command with a time limit: `python -m tests.bounded SECONDS COMMAND [ARGUMENTS]`.

Ends everything that the command started, in any session, also if its caller dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from orchestrator.node.processes import adopt_orphans, kill_subtree

# The exit code of timeout(1); otherwise the command's own.
TOO_LONG = 124
PATIENCE_SECONDS = 30.0  # for the kernel to free processes
_POLL_SECONDS = 0.05


def main() -> int:
    seconds, command, asked_by = float(sys.argv[1]), sys.argv[2:], os.getppid()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what it started
    until = time.monotonic() + seconds
    try:
        process = subprocess.Popen(command)
        while process.poll() is None:
            if time.monotonic() > until or os.getppid() != asked_by:
                return TOO_LONG
            time.sleep(_POLL_SECONDS)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode
    finally:
        kill_subtree(patience_seconds=PATIENCE_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
