"""Messages to people who do not watch a sweep: texts from its snapshots and result.

It sends nothing, and knows no address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.trial.failure_kinds import OUT_OF_MEMORY_KINDS, FailureKind
from orchestrator.core.trial.gpu_hours_text import gpu_hours_text
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.sweep.progress import BUDGETS, CellSettled, Snapshot, StopReason, SweepResult

# This many failures of one kind in a call are no coincidence.
EQUAL_FAILURES = 5
# In one message; the store has the others.
MOST_CELLS_NAMED = 10
# Failures of these kinds are results, or what a person asked for.
_EXPECTED = OUT_OF_MEMORY_KINDS | {FailureKind.CANCELLED}


class NoticeEvent(StrEnum):
    END = "end"
    WINNER = "winner"
    BUDGET = "budget"
    FAILURES = "failures"


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A message about a sweep, in plain text."""

    event: NoticeEvent
    text: str


class Notices:
    """The notices of one call of `run_sweep`."""

    def __init__(self, sweep: str, objective: Objective, *, is_simulated: bool) -> None:
        self._sweep, self._objective = sweep, objective
        self._mark = "Simulated, nothing was measured. " if is_simulated else ""
        self._failures: Counter[FailureKind] = Counter()
        self._passed: set[StopReason] = set()
        self._best: Mapping[Cell, tuple[Layout, float]] = {}

    def of_snapshot(self, snapshot: Snapshot) -> list[Notice]:
        """Return what has happened since the last snapshot, a notice for each kind of event."""
        self._best = snapshot.best
        texts = {
            NoticeEvent.FAILURES: list(self._equal_failures(snapshot)),
            NoticeEvent.BUDGET: list(self._budgets(snapshot)),
            NoticeEvent.WINNER: [self._winner(one) for one in snapshot.settled],
        }
        return [self._notice(event, some) for event, some in texts.items() if some]

    def of_result(self, result: SweepResult) -> Notice:
        """Return how the call ended, with the best of each cell."""
        counts = [
            f"{number:,} {state.replace('_', ' ')}"
            for state in TrialState
            if (number := result.counts.get(state, 0))
        ]
        reasons = "; ".join(sorted({str(reason) for reason in result.stopped.values()}))
        how = "stopped on request" if result.interrupted else f"ended ({reasons})"
        lines = [f"{how}: {', '.join(counts) or 'no trial'}"]
        lines += [self._best_text(cell, tied) for cell, tied in result.tied.items() if tied]
        lines += [f"{cell.key}: nothing was measured" for cell in result.nothing_feasible]
        return self._notice(NoticeEvent.END, lines)

    def of_error(self, error: BaseException) -> Notice:
        """Return that the call ended with an error."""
        text = f"ended with an error: {error}"
        return self._notice(NoticeEvent.END, [text, "The same command continues."])

    def _notice(self, event: NoticeEvent, lines: list[str]) -> Notice:
        more = len(lines) - MOST_CELLS_NAMED - 1
        shown = lines[: MOST_CELLS_NAMED + 1] + ([f"and {more:,} more lines"] if more > 0 else [])
        return Notice(event=event, text=f"{self._mark}Sweep {self._sweep}: " + "\n".join(shown))

    def _equal_failures(self, snapshot: Snapshot) -> Iterator[str]:
        for one in snapshot.ended:
            kind = one.failure_kind
            if kind is None or kind in _EXPECTED:
                continue
            self._failures[kind] += 1
            if self._failures[kind] == EQUAL_FAILURES:
                yield f"{EQUAL_FAILURES} attempts failed with {kind}, the last: {one.text}"

    def _budgets(self, snapshot: Snapshot) -> Iterator[str]:
        for one in snapshot.searched:
            if one.reason in BUDGETS and one.reason not in self._passed:
                self._passed.add(one.reason)
                hours = f"{gpu_hours_text(snapshot.gpu_seconds)} GPU-hours are reserved so far"
                yield f"{one.reason}: no new layout is started in {one.cell.key}; {hours}"

    def _winner(self, settled: CellSettled) -> str:
        if len(settled.tied) == 1 and settled.num_runs > 1:
            runs = f"confirmed by {settled.num_runs} runs"
            return f"{self._best_text(settled.cell, settled.tied)}: the winner, {runs}"
        return self._best_text(settled.cell, settled.tied)

    def _best_text(self, cell: Cell, tied: Sequence[Layout]) -> str:
        layout, best, value = tied[0], self._best.get(cell), ""
        if best is not None and best[0] == layout:
            value = f", {best[1]:,.0f} tokens/s/GPU"
            if self._objective is Objective.STEP_SECONDS:
                value = f", {best[1]:.4g} s per step"
        more = f" (tied with {len(tied) - 1} more)" if len(tied) > 1 else ""
        return f"{cell.key}: {layout.short}{value}{more}"
