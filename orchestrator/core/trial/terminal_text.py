"""Text of programs without the codes that they write for a terminal."""

from __future__ import annotations

import re

_TERMINAL_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain_text(raw: bytes) -> str:
    """Decode what a program printed, without terminal codes; a carriage return starts a line."""
    text = raw.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL_CHARACTERS.sub("", _TERMINAL_CODES.sub("", text))
