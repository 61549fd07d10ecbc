"""The folders of a sweep on this machine: their size, another name for them, and their removal.

The end of a folder's name is the sweep's run token, which no other sweep has. A removal is noted
in a file before the store forgets the sweep, so that it is finished also if somebody kills it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Container
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from orchestrator.cli.store.home import run_root, sweep_home
from orchestrator.core.errors import UsageInvalid

NOTES = ".removals"


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """A sweep that is being removed."""

    name: str
    run_token: str
    # Its address, since several stores may share SWEEP_HOME.
    store: str


def folder_bytes(run_folder: str) -> int | None:
    """The bytes of its files on this machine; None: there is no folder."""
    root = run_root(run_folder)
    if not root.is_dir():
        return None
    total = 0
    for folder, _, names in os.walk(root.resolve()):
        for name in names:
            try:
                total += Path(folder, name).lstat().st_size
            except OSError:
                # Another process has removed it.
                continue
    return total


def link_folder(old: str, new: str) -> None:
    """Let run folders be found under another name too. Stored paths of logs stay valid."""
    was, is_now = run_root(old), run_root(new)
    if not was.is_dir() or is_now.exists():
        return
    try:
        is_now.unlink(missing_ok=True)  # of a link that leads nowhere
        is_now.symlink_to(was.resolve().name, target_is_directory=True)
    except OSError as exc:
        raise UsageInvalid(
            f"{is_now} cannot be made, so the logs would be lost: {exc.strerror}"
        ) from exc


def note_removal(removal: Removal) -> None:
    """Note that a sweep's folders are to be removed once the store has forgotten it."""
    folder = _notes()
    note = folder / removal.run_token
    text = json.dumps({"name": removal.name, "store": removal.store})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = note.with_suffix(".part")
        unfinished.write_text(text)
        unfinished.replace(note)
    except OSError as exc:
        raise UsageInvalid(
            f"{note} cannot be written: {exc.strerror}; the sweep's files could not be removed"
        ) from exc


def noted_removals(store: str) -> list[Removal]:
    """The removals of a store's sweeps that were noted and not finished."""
    found = []
    for note in sorted(_notes().glob("*")) if _notes().is_dir() else ():
        try:
            fields = json.loads(note.read_text())
            removal = Removal(name=fields["name"], run_token=note.name, store=fields["store"])
        except (OSError, ValueError, KeyError, TypeError):
            # Killed while it was written: nothing was removed yet.
            continue
        if removal.store == store:
            found.append(removal)
    return found


def finish_removal(removal: Removal, existing_tokens: Container[str]) -> bool:
    """Remove the folders, and then the note. False: the store has the sweep, so nothing is gone.

    Raises UsageInvalid for a folder that cannot be removed; the same call tries again.
    """
    is_gone = removal.run_token not in existing_tokens
    if is_gone:
        for path in run_root("").glob(f"*-{escape(removal.run_token)}"):
            try:
                path.unlink() if path.is_symlink() else shutil.rmtree(path)
            except OSError as exc:
                raise UsageInvalid(
                    f"{path} cannot be removed: {exc.strerror}; the store has forgotten the"
                    " sweep. Remove the folder by hand, or call `sweep rm` again"
                ) from exc
    (_notes() / removal.run_token).unlink(missing_ok=True)
    return is_gone


def _notes() -> Path:
    return sweep_home() / "runs" / NOTES
