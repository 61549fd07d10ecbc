"""Test files are ordered so that cores are busy, and files with the same imports stay together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.file_scheduling import GANGS, FileScheduling, places_of_files

FILES = (
    "tests/core/problem/test_layout.py",
    "tests/faults/test_outage.py",
    "tests/multi_host/test_slurm.py",
    "tests/sweep/test_loop.py",
    "tests/sweep/test_verdict.py",
    *GANGS,
)


def items(files: tuple[str, ...]) -> list[pytest.Item]:
    found = [SimpleNamespace(path=Path("/clone", file), iter_markers=list) for file in files]
    return cast("list[pytest.Item]", found)


def test_gangs_begin_between_waiting_files_and_short_files_end() -> None:
    places = places_of_files(items(FILES))
    assert len(set(places.values())) == len(FILES)
    assert sorted(places, key=places.__getitem__) == [
        Path("/clone", file)
        for file in (
            "tests/multi_host/test_slurm.py",
            "tests/sweep/test_loop.py",
            "tests/sweep/test_verdict.py",
            "tests/faults/test_outage.py",
            *GANGS,
            "tests/core/problem/test_layout.py",
        )
    ]


def test_one_worker_runs_all_gangs_and_any_other_file_alone() -> None:
    scheduling = FileScheduling.__new__(FileScheduling)
    scopes = {file: scheduling._split_scope(f"{file}::test_some[a::b]") for file in FILES}
    assert {scopes[file] for file in GANGS} == {GANGS[0]}
    assert all(scopes[file] == file for file in FILES if file not in GANGS)
    assert all((Path(__file__).parents[1] / file).is_file() for file in FILES)
