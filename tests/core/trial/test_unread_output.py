"""Step times that a program prints although only its metrics file is read."""

from __future__ import annotations

import re

import pytest

from orchestrator.core.sweepfile.metrics_section import MetricsSection
from orchestrator.core.trial.unread_output import why_unread


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ('{"step_seconds": 0.52, "loss": 9.1}', "0.52"),
        ('[rank0]: {"step_seconds":5.2e-05}', "5.2e-05"),
        ("step 3 step_seconds=0.07", "0.07"),
        ("{'step_seconds': 1}", "1"),
        ("step_seconds=.5", ".5"),
        ("step_seconds: 1e+02", "1e+02"),
        ("step_seconds -> 0.5.", "0.5"),
        ('{"step_seconds": 1e+02}', "1e+02"),
    ],
)
def test_the_pattern_that_is_shown_reads_the_line(line: str, number: str) -> None:
    why = why_unread(["begin", line, "end"])
    assert why is not None and why.endswith(f"; the last: {line}")
    found = re.search(r"log: '(.*)', unit: s}; the last", why)
    assert found is not None
    section = MetricsSection.model_validate({"log": found[1], "unit": "s"})
    read = re.search(section.log, line)
    assert read is not None and read[1] == number


def test_json_lines_with_a_number_may_be_steps() -> None:
    assert "which are not read: if these" in (why_unread(['{"loss": 9.1}'] * 2) or "")


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ['{"layers": 2}'],  # a configuration
        ['{"text": "a", "is_done": true}'] * 3,
        ["{not json: 1}"] * 3,
        ["KeyError: step_seconds"],
        ["loss 9.1"] * 3,
    ],
)
def test_other_output_is_none(lines: list[str]) -> None:
    assert why_unread(lines) is None
