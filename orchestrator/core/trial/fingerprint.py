"""What a number was measured with. Two numbers of different fingerprints are kept apart.

The host's name is not part of it: nodes of one kind are comparable; which node it was stands in the attempt.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

WITHOUT_NUL = r"^[^\x00]*$"  # a character that PostgreSQL keeps in no text
_Text = Annotated[str, Field(max_length=200, pattern=WITHOUT_NUL)] | None


class Stack(BaseModel):
    """The software and device that a rank ran on, as the rank itself saw them."""

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
    git_sha: str | None = (
        None  # of the project that holds the workload; None outside a git checkout
    )
    # None: nothing uncommitted; `unknown`: git did not tell. Outside a checkout `files:` and the digest of a program's files, or `stat:` and that of their sizes and times.
    dirty_diff_digest: str | None = None
    stack: Stack = Stack()
    settings: tuple[
        tuple[str, str], ...
    ] = ()  # names and values of the environment, as `core.communication.counted` tells them apart

    @property
    def digest(self) -> str:
        return _digest(self)


@lru_cache(maxsize=64)  # a sweep asks for one or two of them, thousands of times
def _digest(fingerprint: Fingerprint) -> str:
    # No settings say nothing: the digests of numbers taken before settings were looked at stay what they are.
    said = fingerprint.model_dump(exclude=set() if fingerprint.settings else {"settings"})
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
