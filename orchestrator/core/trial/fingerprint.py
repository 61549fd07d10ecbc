"""What a number was measured with. Numbers of different fingerprints are kept apart.

The host's name is not part of it, since nodes of one kind are comparable; the attempt has the node.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Annotated

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

    @property
    def digest(self) -> str:
        return _digest(self)


@lru_cache(maxsize=64)  # asked thousands of times
def _digest(fingerprint: Fingerprint) -> str:
    # Without settings the digest is that of the numbers from before settings were recorded.
    fields = fingerprint.model_dump(exclude=set() if fingerprint.settings else {"settings"})
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
