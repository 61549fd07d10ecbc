"""The code, software and device of a number. Numbers of other fingerprints are kept apart.

The host's name is not part of it, since nodes of one kind are comparable; the attempt has the node.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

WITHOUT_NUL = r"^[^\x00]*$"  # PostgreSQL stores no NUL
_Text = Annotated[str, Field(max_length=200, pattern=WITHOUT_NUL)] | None


class Stack(BaseModel):
    """The software and device of a rank, as the rank itself reports them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: _Text = None
    torch: _Text = None
    cuda: _Text = None
    nccl: _Text = None
    driver: _Text = None
    device_name: _Text = None


@dataclass(frozen=True, kw_only=True)
class Software:
    """The software and device of a user's program, as its launcher found them. Unknown is None."""

    stack: Stack = field(default_factory=Stack)
    # Names and versions of the packages of the program's Python, sorted.
    packages: tuple[tuple[str, str], ...] = ()


class Fingerprint(BaseModel):
    """A stack, and the code that ran on it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    orchestrator_version: str
    git_sha: str | None = None  # None: no git checkout
    # None: nothing uncommitted; `unknown`: git failed. Outside a checkout `files:` and the digest
    # of a program's files, or `stat:` and that of their sizes and times.
    dirty_diff_digest: str | None = None
    stack: Stack = Stack()
    # Names and values of environment variables, as `communication.counted` selects them.
    settings: tuple[tuple[str, str], ...] = ()
    # Names and versions of the packages of a user's Python, sorted; empty: not known.
    packages: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        return _digest(self)

    def has_code_of(self, other: Fingerprint) -> bool:
        """Return whether the two are of the same code of the trainer or the user's program."""
        return (self.git_sha, self.dirty_diff_digest) == (other.git_sha, other.dirty_diff_digest)


@lru_cache(maxsize=64)  # asked thousands of times
def _digest(fingerprint: Fingerprint) -> str:
    # Without settings or packages the digest is that of the numbers from before these were
    # recorded.
    absent = {name for name in ("settings", "packages") if not getattr(fingerprint, name)}
    fields = fingerprint.model_dump(exclude=absent)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


# Facts that only the Python itself knows, if the program does not report them.
_OF_PYTHON = ("python", "torch", "cuda", "nccl")


def completes(whole: Fingerprint, part: Fingerprint) -> bool:
    """Return whether `part` lacks the packages of a program, and all that it has is in `whole`.

    Then the two may be the same: the Python of a program that a shell starts is found in one
    attempt, and not in another that ended sooner.
    """
    unknown = _unknown(part, whole)
    return bool(unknown) and part.model_copy(update=unknown) == whole


def _unknown(part: Fingerprint, whole: Fingerprint) -> dict[str, Any]:
    """Return what the `whole` fingerprint has of a program's software, and the other does not."""
    if part.packages or not whole.packages:
        return {}
    told = part.stack.model_dump(exclude_none=True)
    found = {name: getattr(whole.stack, name) for name in _OF_PYTHON if name not in told}
    return {"packages": whole.packages, "stack": part.stack.model_copy(update=found)}


MAX_CHANGES = 8  # that are named


def changes(before: Fingerprint, after: Fingerprint) -> str:
    """Say what differs between two fingerprints: `torch 2.9.0 -> 2.9.1, numpy added`.

    Empty if they are the same. What one of them does not know of its software is no change.
    """
    before = before.model_copy(update=_unknown(before, after))
    after = after.model_copy(update=_unknown(after, before))
    found = _changed(
        "version of layout-sweep", before.orchestrator_version, after.orchestrator_version
    )
    if (before.git_sha, before.dirty_diff_digest) != (after.git_sha, after.dirty_diff_digest):
        found += _changed("git", (before.git_sha or "")[:12], (after.git_sha or "")[:12])
        if before.git_sha == after.git_sha:
            found.append("the program's files")
    old, new = before.stack.model_dump(), after.stack.model_dump()
    for name in old:
        found += _changed(name, old[name], new[name])
    found += _changes_of(dict(before.settings), dict(after.settings))
    told = set(found)
    found += [
        text
        for text in _changes_of(dict(before.packages), dict(after.packages))
        if text not in told
    ]
    if len(found) > MAX_CHANGES:
        found = [*found[:MAX_CHANGES], f"and {len(found) - MAX_CHANGES} more"]
    return ", ".join(found)


def _changes_of(before: dict[str, str], after: dict[str, str]) -> list[str]:
    if not before or not after:
        # One of them is from before this was recorded, or the answer was not known.
        return []
    return [
        text
        for name in sorted({*before, *after})
        for text in _changed(name, before.get(name), after.get(name))
    ]


def _changed(name: str, before: str | None, after: str | None) -> list[str]:
    if before == after:
        return []
    if not before:
        return [f"{name} {after} added"]
    return [f"{name} {before} removed"] if not after else [f"{name} {before} -> {after}"]
