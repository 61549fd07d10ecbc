"""How often a rank reads what its program has written."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from workloads.command.polling import exit_code_within, poll_seconds


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [([], 0.02), ([0.02], 0.01), ([9.0, 0.08], 0.02), ([0.19], 0.0475), ([0.3], 0.05)],
)
def test_lines_of_short_steps_are_read_more_often(steps: list[float], seconds: float) -> None:
    assert poll_seconds(steps) == pytest.approx(seconds)


@pytest.mark.parametrize("has_handles", [True, False])
def test_a_program_is_waited_for_until_it_ends_or_the_time_is_over(
    has_handles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_handles:
        # As in a Python that was built for older kernels.
        monkeypatch.delattr(os, "pidfd_open")
    waits = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(7)"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as process:
        began = time.monotonic()
        assert exit_code_within(process, 0.05) is None
        assert time.monotonic() - began >= 0.045
        assert process.stdin is not None
        process.stdin.close()
        assert exit_code_within(process, 60.0) == 7
        assert exit_code_within(process, 60.0) == 7
