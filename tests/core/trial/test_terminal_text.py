"""Printed text without terminal codes."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.terminal_text import plain_text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\x1b[31mstep\x1b[0m 5", "step 5"),
        (b"\x1b]0;title\x07step", "step"),
        (b"10%\r20%\r\n", "10%\n20%\n"),
        (b"a\x00b\tc", "ab\tc"),
        (b"\xff", "\ufffd"),
    ],
)
def test_codes_and_control_characters_are_left_out(raw: bytes, text: str) -> None:
    assert plain_text(raw) == text
