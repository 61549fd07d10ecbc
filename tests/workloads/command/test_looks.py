"""How often a rank looks at its program."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from workloads.command.looks import code_within, seconds_between


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [([], 0.02), ([0.02], 0.01), ([9.0, 0.08], 0.02), ([0.19], 0.0475), ([0.3], 0.05)],
)
def test_short_steps_are_looked_at_more_often(steps: list[float], seconds: float) -> None:
    assert seconds_between(steps) == pytest.approx(seconds)


def test_a_program_is_waited_for_until_it_ends_or_the_time_is_over() -> None:
    waits = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(7)"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as process:
        began = time.monotonic()
        assert code_within(process, 0.05) is None
        assert time.monotonic() - began >= 0.045
        assert process.stdin is not None
        process.stdin.close()
        assert code_within(process, 60.0) == 7
        assert code_within(process, 60.0) == 7
