"""The file of a SQLite store: is it still the opened one, and how to read it without write access.

The file may belong to another user, or lie in a read-only folder. In WAL mode it needs a file of
shared memory next to it. If that cannot be made, the way to open it depends on what lies there.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from math import inf
from pathlib import Path
from urllib.parse import quote

from orchestrator.core.errors import StoreUnavailable, UsageInvalid

_TIMEOUT_SECONDS = 30.0
# The least size of the shared memory of the WAL mode (https://www.sqlite.org/walformat.html).
SHARED_BYTES = 32 * 1024
# The first bytes of every SQLite file (https://www.sqlite.org/fileformat.html).
_FIRST_BYTES = b"SQLite format 3\0"


def can_be_written(file: Path) -> bool:
    """True if this user may write the file, and make the files that SQLite needs next to it.

    A disk without space for these files counts as one that cannot be written.
    """
    return (
        os.access(file, os.W_OK) and os.access(file.parent, os.W_OK) and _free(file) >= SHARED_BYTES
    )


def _size(file: Path) -> int:
    """The bytes of a file; 0 if there is none."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _free(file: Path) -> float:
    try:
        found = os.statvfs(file.parent)
    except OSError:
        return inf
    return found.f_bavail * found.f_frsize


def is_on_read_only(file: Path) -> bool:
    """True if the file's folder is on a file system that nobody may write."""
    try:
        return bool(os.statvfs(file.parent).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def refuse_other_format(file: Path) -> None:
    """Raise UsageInvalid if a file that SQLite refuses has another format.

    A file that begins as SQLite's files do has the right format and is damaged.
    """
    try:
        with file.open("rb") as content:
            first = content.read(len(_FIRST_BYTES))
    except OSError:
        return
    if first != _FIRST_BYTES:
        raise UsageInvalid(
            f"store {file} is not a SQLite database: name another file with SWEEP_DB or --db."
            " If your store was here, put a copy back"
        )


class OpenedFile:
    """The file that was opened. If another file replaces it at its path, what we write is lost."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None

    def forget(self) -> None:
        """Accept any file when the store is opened again."""
        self._identity = None

    def refuse_another(self) -> None:
        """Raise StoreUnavailable if the path names no file, or another one. Costs one stat(2)."""
        try:
            # This runs after each write, and takes a tenth of the time of Path.stat.
            found = os.stat(self.path)  # noqa: PTH116
        except FileNotFoundError:
            raise StoreUnavailable(
                f"store {self.path} was deleted while it was in use. {_PUT_BACK}"
            ) from None
        except OSError as exc:
            raise StoreUnavailable(
                f"store {self.path} cannot be looked at any more: {exc.strerror}. {_PUT_BACK}"
            ) from None
        identity = (found.st_dev, found.st_ino)
        if self._identity is None:
            self._identity = identity
        elif identity != self._identity:
            raise StoreUnavailable(
                f"store {self.path} was replaced by another file while it was in use. {_PUT_BACK}"
            )


_PUT_BACK = (
    "Nothing more is launched, and what has ended since waits in the spool of its run folder: "
    "put a copy back, then run the same command. Without a copy the same command begins a new "
    "store, and measures all of it again"
)


class ReadableFile:
    """Opens connections that cannot write, a new one each time, so that it sees new writers."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._log, self._shared = (Path(f"{file}{end}") for end in ("-wal", "-shm"))
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._copied_state: object = None

    def connect(self) -> sqlite3.Connection:
        """Raises StoreUnavailable, and UsageInvalid for a file that is no database."""
        try:
            file, query = self._how_to_open()
            address = f"file:{quote(os.fsencode(file))}?{query}"
            connection = sqlite3.connect(
                address,
                uri=True,
                timeout=_TIMEOUT_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        except (sqlite3.Error, OSError) as exc:
            if "not a database" in str(exc):
                refuse_other_format(self._file)
            raise StoreUnavailable(
                f"store {self._file} cannot be read: {self._reason(exc)}"
            ) from None
        return connection

    def close(self) -> None:
        if self._copy is not None:
            self._copy.cleanup()
            self._copy = None

    def _how_to_open(self) -> tuple[Path, str]:
        is_shared = self._log.exists() and _size(self._shared) >= SHARED_BYTES
        if is_shared or can_be_written(self._file):
            return self._file, "mode=ro"
        if not _size(self._log):
            # Without a log there is no writer. A full disk leaves empty files.
            return self._file, "mode=ro&immutable=1"
        # A dead process left the log. It can be merged with the file only in a copy.
        return self._merged_copy(), "mode=rw"

    def _merged_copy(self) -> Path:
        state = [
            (found.st_ino, found.st_size, found.st_mtime_ns)
            for found in (self._file.stat(), self._log.stat())
        ]
        if self._copy is None or state != self._copied_state:
            self.close()
            self._copy, self._copied_state = (
                tempfile.TemporaryDirectory(prefix="sweep-copy-"),
                state,
            )
            for source in (self._file, self._log):
                shutil.copyfile(source, Path(self._copy.name) / source.name)
        return Path(self._copy.name) / self._file.name

    def _reason(self, exc: Exception) -> str:
        if isinstance(exc, OSError):
            return f"{exc.strerror}: {exc.filename}"
        unreadable = [
            path.name
            for path in (self._file, self._log, self._shared)
            if path.exists() and not os.access(path, os.R_OK)
        ]
        if unreadable:
            return (
                f"{unreadable[0]} is not yours to read. Ask its owner for: chmod a+r {self._file}*"
            )
        return str(exc)
