"""The newest committed results of benchmarks, as rows of tables.

A benchmark without a committed result is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

Row = tuple[str, str, str]
Format = Callable[[Any], str]  # a result as a short text


def newest(benchmark: str) -> tuple[str, Any] | None:
    """The newest committed result of a benchmark, with its file's name."""
    files = sorted(RESULTS.glob(f"{benchmark}_*.json"), key=lambda file: file.stem[-10:])
    return (files[-1].name, json.loads(files[-1].read_text())) if files else None


def rows_of(table: Sequence[tuple[str, str, Format]]) -> list[tuple[str, str, str, str]]:
    """Each row's description, text, benchmark and file."""
    return [
        (what, text(found[1]), name, found[0])
        for name, what, text in table
        if (found := newest(name)) is not None
    ]


def committed(benchmark: str) -> Any:
    """The newest committed result of a benchmark that has one."""
    found = newest(benchmark)
    assert found is not None, f"no committed result of {benchmark}"
    return found[1]


def digits(number: float) -> str:
    """Two significant digits, which is the precision of these machines."""
    return f"{float(f'{number:.2g}'):g}"
