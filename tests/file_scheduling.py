"""Decides in which order xdist's workers take the test files, and which files one worker takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

# Files whose tests mostly wait, in this order. After each of them come two of the other files,
# which keep the cores busy meanwhile.
LONGEST_FIRST = ("multi_host", "faults", "command", "doctor", "acceptance", "ray")
OTHERS_PER_WAITING_FILE = 2
# One worker runs them all: it imports torch for their ranks once. That keeps the cores busy for
# minutes, so they begin when half of the waiting files have begun.
GANGS = tuple(
    f"tests/workloads/llama/{file}"
    for file in ("equivalence/test_equivalence.py", "test_layouts.py", "test_predicted_memory.py")
)
# Short files, which start nothing: they fill the end.
SHORT = "tests/core/"


class FileScheduling(LoadFileScheduling):
    """As `--dist loadfile`, with the files of gangs as one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return GANGS[0] if file in GANGS else file


def places_of_files(items: list[pytest.Item]) -> dict[Path, tuple[float, int]]:
    """The place of each file in the order of all files; no two files have the same."""
    kinds: dict[Path, int] = {}
    for item in items:
        kinds[item.path] = min(kind_of(item), kinds.get(item.path, len(LONGEST_FIRST)))
    in_order = sorted(kinds, key=lambda path: kinds[path])
    num_waiting = sum(kind < len(LONGEST_FIRST) for kind in kinds.values())
    waiting, others = in_order[:num_waiting], _others(in_order[num_waiting:], num_waiting)
    return {path: (float(place), 0) for place, path in enumerate(waiting)} | {
        path: (place / OTHERS_PER_WAITING_FILE, 1 + place) for place, path in enumerate(others)
    }


def kind_of(item: pytest.Item) -> int:
    """The index in LONGEST_FIRST of what the test is; its length if the test is none of them."""
    names = {marker.name for marker in item.iter_markers()} | {item.path.parent.name}
    return next(
        (kind for kind, name in enumerate(LONGEST_FIRST) if name in names), len(LONGEST_FIRST)
    )


def _others(paths: list[Path], num_waiting: int) -> list[Path]:
    """The files that do not wait, in their order."""
    gangs = [path for path in paths if path.as_posix().endswith(GANGS)]
    rest = [path for path in paths if path not in gangs]
    rest.sort(key=lambda path: SHORT in path.as_posix())
    return [*rest[:num_waiting], *gangs, *rest[num_waiting:]]
