"""Why an attempt of a trial is made. Stored with the attempt, so that SQL can tell a first measurement from each kind of repeat."""

from __future__ import annotations

from enum import StrEnum


class Purpose(StrEnum):
    """NEW and RETRY measure a trial for the first time; the others repeat a measured one."""

    NEW = "new"
    RETRY = "retry"  # it waited again: the machine was at fault, or it was asked for by a person
    DOUBT = "doubt"  # its neighbours contradict what was measured
    PHYSICS = "physics"  # it does less work than a layout that was faster, or is that layout
    ANCHOR = "anchor"  # to see whether the machine has changed
    CONFIRMATION = "confirmation"  # of what may be the winner


REPEATS = frozenset({Purpose.DOUBT, Purpose.PHYSICS, Purpose.ANCHOR, Purpose.CONFIRMATION})
