"""Fields of lines: the last value counts, of memory the highest, and a document has precedence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.trial.protocol import RankResult
from workloads.command.resident import peak_resident_bytes
from workloads.command.told_fields import ToldFields


def told(*lines: dict[str, Any]) -> ToldFields:
    fields = ToldFields()
    for line in lines:
        fields.take(line)
    return fields


def test_the_last_value_counts_and_of_memory_the_highest() -> None:
    fields = told(
        {"step_seconds": 0.5, "loss": 9.0, "peak_memory_allocated_bytes": 7e9, "tflops": 1},
        {
            "step_seconds": 0.5,
            "loss": 8.0,
            "peak_memory_allocated_bytes": 9,
            "tflops": 2,
            "step": 2,
        },
        {"grad_norm": 1.5, "extra": {"kernel": "flash"}},
    )
    assert fields.values() == {
        "loss_first": 9.0,
        "loss_last": 8.0,
        "gradient_norm": 1.5,
        "peak_memory_allocated_bytes": 7_000_000_000,
        "extra": {"tflops": 2, "kernel": "flash"},
    }


@pytest.mark.parametrize(
    "line",
    [
        {"peak_memory_allocated_bytes": "much"},
        {"peak_memory_allocated_bytes": True},
        {"peak_memory_reserved_bytes": float("nan")},
        {"device_memory_bytes": -1},
        {"loss": float("nan")},
        {"loss": "9.5"},
        {"stack": {"pythn": "3"}},
        {"tokens_per_step": "many"},
    ],
)
def test_a_value_that_its_field_cannot_have_is_left_out_and_costs_no_measurement(
    line: dict[str, Any],
) -> None:
    assert told(line).values() == {}


def test_a_document_has_precedence_and_lines_add_what_it_lacks() -> None:
    fields = told({"loss": 9.0, "peak_memory_allocated_bytes": 7, "a": 1, "b": 1})
    result = RankResult(step_seconds=[0.5], loss_last=2.5, extra={"b": 2})
    found = fields.completed(result)
    assert (found.step_seconds, found.loss_first, found.loss_last) == ([0.5], 9.0, 2.5)
    assert found.peak_memory_allocated_bytes == 7
    assert found.extra == {"a": 1, "b": 2}
    assert told().completed(result) is result


def test_a_program_that_invents_names_without_end_is_bounded() -> None:
    fields = told(*({f"f{number}": number} for number in range(10_000)))
    extra = fields.values()["extra"]
    assert len(extra) == 65 and extra["dropped_fields"] > 0


def test_the_fields_of_a_file_are_read_line_by_line_and_rubbish_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n[1]\n\xff\xfe\n{"a": 2, "b": [1]}\n{"a":')
    assert ToldFields.of_file(path).values() == {"extra": {"a": 2, "b": [1]}}
    assert ToldFields.of_file(tmp_path / "none").values() == {}


def test_the_resident_memory_is_that_of_the_largest_process_running_or_ended() -> None:
    source = "import sys; held = bytearray(300 << 20); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        running = peak_resident_bytes(os.getpid())
        process.communicate()
    ended = peak_resident_bytes(process.pid)
    assert running is not None and ended is not None
    assert running >= 300 << 20
    assert ended >= 300 << 20
