"""How the packages of an extra are installed."""

from __future__ import annotations

from orchestrator.report.extras import how_to_install


def test_an_install_is_warned_of_before_a_sweep_uses_this_python() -> None:
    said = how_to_install("tui")
    assert said.startswith("which is not installed: pip install '.[tui]' in the cloned folder")
    assert "a new package changes the fingerprint of a program that uses this Python" in said
