"""The states of a cell's search in one call of `run_sweep`, and the table of its transitions.

A cell is searched, then its best is confirmed. What a state allows to start is in dispatch.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from orchestrator.sweep.progress import CONFIRMED, StopReason


class CellState(StrEnum):
    SEARCHING = "searching"  # it may want another layout
    # It starts nothing until one of its attempts has ended.
    RESTING = "resting"
    # Its search has ended; retries and repeats are left.
    CONFIRMING = "confirming"
    # Nothing is left to start in this call.
    SETTLED = "settled"
    # Given up: its best is not confirmed.
    STOPPED = "stopped"


class CellEvent(StrEnum):
    # Until one of its attempts has ended.
    NOTHING_TO_START = "nothing_to_start"
    ATTEMPT_ENDED = "attempt_ended"
    # By a rule of the file, a budget, or with all layouts known.
    SEARCH_ENDED = "search_ended"
    # Its nodes are gone, its trials fail again and again, or nothing fits.
    GIVEN_UP = "given_up"
    # Its best is confirmed, or no budget is left for that.
    NOTHING_LEFT = "nothing_left"
    # Layouts may run after all: the proof that ruled them out is void.
    LAYOUTS_FREED = "layouts_freed"
    # The cell was read from the store again.
    READ_AGAIN = "read_again"
    # Trials wait again: a node that they ran on is slow.
    RESULTS_WITHDRAWN = "results_withdrawn"


_S, _E = CellState, CellEvent

TRANSITIONS: Mapping[tuple[CellState, CellEvent], CellState] = MappingProxyType(
    {
        (_S.SEARCHING, _E.NOTHING_TO_START): _S.RESTING,
        (_S.RESTING, _E.ATTEMPT_ENDED): _S.SEARCHING,
        (_S.RESTING, _E.READ_AGAIN): _S.SEARCHING,
        (_S.SEARCHING, _E.SEARCH_ENDED): _S.CONFIRMING,
        (_S.RESTING, _E.SEARCH_ENDED): _S.CONFIRMING,
        (_S.SEARCHING, _E.GIVEN_UP): _S.STOPPED,
        (_S.RESTING, _E.GIVEN_UP): _S.STOPPED,
        (_S.CONFIRMING, _E.GIVEN_UP): _S.STOPPED,
        (_S.CONFIRMING, _E.NOTHING_LEFT): _S.SETTLED,
        (_S.CONFIRMING, _E.LAYOUTS_FREED): _S.SEARCHING,
        (_S.SETTLED, _E.READ_AGAIN): _S.CONFIRMING,
        **{(s, _E.RESULTS_WITHDRAWN): _S.SEARCHING for s in _S if s is not _S.SEARCHING},
    }
)  # fmt: skip
INITIAL = CellState.SEARCHING
SEARCHED = frozenset({CellState.SEARCHING, CellState.RESTING})
ENDS = (CellState.SETTLED, CellState.STOPPED)
# Events that may come in every state, and change nothing in those that the table lacks.
EVERYWHERE = frozenset({_E.ATTEMPT_ENDED, _E.LAYOUTS_FREED, _E.READ_AGAIN, _E.RESULTS_WITHDRAWN})


class IllegalCellTransition(ValueError):
    """A cell cannot take this event in its state; nothing was changed."""


def advance(state: CellState, event: CellEvent) -> CellState:
    """Return the state that follows. Raises IllegalCellTransition for an impossible pair."""
    if (state, event) in TRANSITIONS:
        return TRANSITIONS[state, event]
    if event in EVERYWHERE:
        return state
    raise IllegalCellTransition(f"{event} is not possible in state {state}")


@dataclass(eq=False)
class CellLife:
    """The state of one cell, and why its search has ended."""

    state: CellState = INITIAL
    stopped: StopReason | None = None  # None: the cell is searched

    @property
    def is_searched(self) -> bool:
        """True until the search has ended."""
        return self.state in SEARCHED

    @property
    def may_be_confirmed(self) -> bool:
        """True while a repeat may still be started, now or once the search has ended."""
        return self.state not in ENDS

    def take(self, event: CellEvent, reason: StopReason | None = None) -> None:
        """Change the state. `reason`: why the search ends, or why nothing more is started."""
        self.state = advance(self.state, event)
        self.stopped = None if self.is_searched else reason or self.stopped

    def free(self) -> None:
        """Search again if the search ended because all layouts were known."""
        if self.stopped is StopReason.EXHAUSTED:
            self.take(CellEvent.LAYOUTS_FREED)

    def stop(self, reason: StopReason) -> None:
        """End the search, or what is left of it."""
        self.take(CellEvent.SEARCH_ENDED if reason in CONFIRMED else CellEvent.GIVEN_UP, reason)


def mermaid() -> str:
    """Draw the table as a Mermaid state diagram, which docs/architecture.md shows."""
    lines = ["stateDiagram-v2", f"    [*] --> {INITIAL}"]
    lines += [
        f"    {state} --> {target}: {event}" for (state, event), target in TRANSITIONS.items()
    ]
    lines += [f"    {state} --> [*]" for state in ENDS]
    return "\n".join(lines)
