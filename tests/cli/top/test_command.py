"""`sweep top` where it cannot be shown: without textual, or without a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from orchestrator.cli.top import command

Sweep = Callable[..., tuple[str, str]]


def test_without_textual_the_cure_is_said(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    _, err = sweep("top", code=2)
    assert "pip install '.[tui]' in the cloned folder" in err and "sweep status --watch" in err


def test_without_a_terminal_the_other_command_is_named(sweep: Sweep) -> None:
    assert not sys.stdin.isatty()
    _, err = sweep("top", code=2)
    assert "needs a terminal" in err and "sweep status --json" in err
