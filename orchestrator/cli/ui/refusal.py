"""A request that the pages refuse: a status, and a sentence as plain text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(eq=False)
class Refusal(Exception):
    """The request was refused."""

    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)
