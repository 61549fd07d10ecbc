"""The reason for an attempt; stored, so that SQL can separate first measurements from repeats."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Purpose(StrEnum):
    """NEW and RETRY measure a trial for the first time; the others repeat a measured one."""

    NEW = "new"
    RETRY = "retry"  # the machine failed, or on request
    DOUBT = "doubt"  # its neighbours contradict the result
    # It does less work than a layout that was faster, or is that layout.
    PHYSICS = "physics"
    ANCHOR = "anchor"  # shows whether the machine has changed
    CONFIRMATION = "confirmation"  # it may be the winner


# Why a measured trial is measured again, for people.
REASONS: Mapping[Purpose, str] = {
    Purpose.DOUBT: "(its neighbours contradict it)",
    Purpose.PHYSICS: "(it contradicts physics)",
    Purpose.ANCHOR: "(has the machine drifted?)",
    Purpose.CONFIRMATION: "(to confirm the winner)",
}
REPEATS = frozenset(REASONS)
# Repeats of a result that similar layouts contradict.
DOUBTS = frozenset({Purpose.DOUBT, Purpose.PHYSICS})
