"""Why an attempt of a trial is made. Stored with the attempt, so that SQL can tell a first measurement from each kind of repeat."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Purpose(StrEnum):
    """NEW and RETRY measure a trial for the first time; the others repeat a measured one."""

    NEW = "new"
    RETRY = "retry"  # it waited again: the machine was at fault, or it was asked for by a person
    DOUBT = "doubt"  # its neighbours contradict what was measured
    PHYSICS = "physics"  # it does less work than a layout that was faster, or is that layout
    ANCHOR = "anchor"  # to see whether the machine has changed
    CONFIRMATION = "confirmation"  # of what may be the winner


# Why a measured trial is measured again, for people.
REASONS: Mapping[Purpose, str] = {
    Purpose.DOUBT: "(its neighbours contradict it)",
    Purpose.PHYSICS: "(it contradicts physics)",
    Purpose.ANCHOR: "(has the machine drifted?)",
    Purpose.CONFIRMATION: "(to confirm the winner)",
}
REPEATS = frozenset(REASONS)
