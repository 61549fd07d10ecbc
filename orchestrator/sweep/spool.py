"""Keeps ended attempts that the database does not have: one file each, flushed to disk at once.

It does not know the store: loop.py writes and removes the files, recovery.py stores those that an
earlier orchestrator left.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from orchestrator.cluster.contract import Finished
from orchestrator.core.errors import UsageInvalid
from orchestrator.sweep.measured_code import AttemptCode

logger = logging.getLogger(__name__)

# The spool's folder, next to the run folders of its sweep.
FOLDER = "spool"


@dataclass(frozen=True, kw_only=True)
class Spooled:
    """The end of an attempt, as the scheduler reported it."""

    attempt: int
    end: Finished
    at: dt.datetime | None = None  # by the sweep's clock
    # Without a code at its start: that of the next call.
    code: AttemptCode = field(default_factory=AttemptCode)

    @property
    def name(self) -> str:
        """The same attempt has the same file."""
        return f"trial-{self.end.trial_id}-attempt-{self.attempt}.json"


_SPOOLED = TypeAdapter(Spooled)


class Spool:
    """Keeps the files of one sweep on one machine. The folder is made with the first file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: set[str] = set()

    def keep(self, spooled: Spooled) -> None:
        """Write the end to disk once; it then survives a kill and a power cut. Raises OSError."""
        if spooled.name in self._kept:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f"{spooled.name}.{os.getpid()}.tmp"
        with unfinished.open("wb") as file:
            file.write(_SPOOLED.dump_json(spooled))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(self._folder / spooled.name)
        self._flush_folder()
        self._kept.add(spooled.name)

    def drop(self, spooled: Spooled) -> None:
        """Remove the file, if there is one: the database has the end."""
        if spooled.name in self._kept:
            (self._folder / spooled.name).unlink(missing_ok=True)
            self._kept.discard(spooled.name)

    def set_aside(self, spooled: Spooled) -> Path:
        """Rename a file that the database refuses, for a person to see. Return the new name."""
        kept = self._folder / spooled.name
        self._kept.discard(spooled.name)
        return kept.rename(kept.with_suffix(".refused"))

    def left(self) -> Iterator[Spooled]:
        """Yield what is in the folder, oldest first.

        A file that cannot be read is set aside with a warning. Raises UsageInvalid if the folder
        cannot be read.
        """
        try:
            kept = [file for file in self._folder.iterdir() if file.suffix == ".json"]
            files = sorted(kept, key=lambda file: (file.stat().st_mtime_ns, file.name))
        except FileNotFoundError:
            # The folder is made with the first file, so no end was ever kept.
            return
        except OSError as exc:
            raise UsageInvalid(
                f"the spool cannot be read: {exc.strerror}: {self._folder}. It may hold results"
                " that the database does not have, and these would be measured again: make it"
                " readable, or move it away if they do not matter"
            ) from exc
        for file in files:
            try:
                spooled = _SPOOLED.validate_json(file.read_bytes())
            except (OSError, ValidationError) as exc:
                aside = file.with_suffix(".unreadable")
                file.rename(aside)
                logger.warning(
                    "A spooled result cannot be read and is set aside as %s: %s",
                    aside,
                    str(exc).splitlines()[0],
                )
                continue
            self._kept.add(file.name)
            yield spooled

    def _flush_folder(self) -> None:
        """Flush the folder: a name is on disk once its folder is."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
