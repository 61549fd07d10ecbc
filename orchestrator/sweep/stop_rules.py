"""Judges failures together: do those of one cell repeat, or does everything fail?

A layout's own failures are left to the search. A cell that fails again and again is stopped alone
while others run. Only if nothing works anywhere is it the machine's fault, or the program's. Where
attempts only hang, a layout of the cell that was measured runs again: if it works, the layouts
cause the hangs, and the cell continues.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from orchestrator.core.errors import ClusterUnavailable, UsageInvalid
from orchestrator.core.trial.failure_kinds import (
    HANG_KINDS,
    OUT_OF_MEMORY_KINDS,
    POLICIES,
    SUSPECT_KINDS,
    Failure,
    FailureKind,
    Fault,
)
from orchestrator.core.trial.failures import LAST_LINE

# After this many in a row something is wrong: a full disk, a foreign process on the GPU. To
# continue would use up the retries of every trial.
MACHINE_FAULTS_IN_A_ROW = 5
# After this many failures with the same words, before anything was measured, an option or a path is
# wrong: say so once instead of once per layout.
SAME_FAILURES = 5


@dataclass(eq=False, kw_only=True)
class _Streak:
    """Faults in a row that the machine may cause.

    An attempt that began before the last fault was known adds none.
    """

    num: int = 0
    cells: set[int] = field(default_factory=set)
    kinds: set[FailureKind] = field(default_factory=set)
    nodes: set[str | None] = field(default_factory=set)
    last: str = ""
    # True once a layout that had been measured hung too: the machine is at fault.
    measured_layout_hung: bool = False
    # When the first fault, and the last one that was counted, became known.
    began_at: float = inf
    known_at: float = -inf

    def add(
        self, cell_id: int, failure: Failure, *, node: str | None, began: float, now: float
    ) -> None:
        self.cells.add(cell_id)
        self.kinds.add(failure.kind)
        self.nodes.add(node)
        self.began_at = min(self.began_at, now)
        if began >= self.known_at:
            self.num += 1
            self.last, self.known_at = failure.message, now

    @property
    def needs_check(self) -> bool:
        """True if so many hung that a measured layout must show whether the machine still works."""
        many = self.num >= MACHINE_FAULTS_IN_A_ROW
        return many and self.kinds <= HANG_KINDS and not self.measured_layout_hung


class StopRules:
    """Counts over one call of `run_sweep`. `cell_id` is the cell of the attempt that is told."""

    def __init__(self, sweep: str) -> None:
        self._sweep = sweep
        self._streak = _Streak()  # since any attempt worked
        # By cell: since an attempt of it worked.
        self._streak_of: dict[int, _Streak] = {}
        # By cell: when an attempt last ended by itself.
        self._worked_at: dict[int, float] = {}
        self._nothing_measured = True
        self._same_failures, self._first_failure, self._same_cells = 0, "", set[int]()
        # With those that show nothing new.
        self._num_failed_alike = 0
        self._same = ""  # what these failures have in common
        # When the last edit was known that an attempt failed by, and that was counted.
        self._edit_known_at = -inf
        # Measurements that cannot be true before any that can.
        self._num_implausible, self._first_implausible = 0, ""

    @property
    def suspects_the_machine(self) -> bool:
        """True if the last attempt failed in a way that the machine may cause."""
        return bool(self._streak.cells)

    @property
    def suspected_cells(self) -> Collection[int]:
        """Cells that let others go first, which show whether anything works."""
        return self._streak.cells | self._same_cells

    def note_measured(self, cell_id: int, *, now: float) -> None:
        self._note_worked(cell_id, now)
        self._nothing_measured, self._same_failures, self._same_cells = False, 0, set()

    def note_implausible(self, reason: str, cell_id: int, *, now: float) -> None:
        """Count a measurement whose numbers cannot be true."""
        self._note_worked(cell_id, now)
        self._num_implausible += 1
        self._same_cells.add(cell_id)
        self._first_implausible = self._first_implausible or reason

    @property
    def cells_to_check(self) -> set[int]:
        """Cells that start nothing new until a measured layout has shown whether the machine works.

        Those without such a layout go on until `stuck_cells` stops them.
        """
        found = {cell_id for cell_id, streak in self._streak_of.items() if streak.needs_check}
        return found | (self._streak.cells if self._streak.needs_check else set())

    def note_failure(
        self,
        failure: Failure,
        *,
        cell_id: int,
        began: float,
        now: float,
        num_nodes: int = 1,
        is_repeat: bool = False,
    ) -> None:
        """Count a failure of an attempt that began at `began`, on `num_nodes` nodes.

        One that began before the last fault was known shows nothing new: all attempts on a node are
        lost with it, and one edit of the program is seen by all that start meanwhile. `is_repeat`:
        its layout had been measured.
        """
        # We ended these attempts, so their equal messages prove nothing.
        if POLICIES[failure.kind].fault is Fault.NOBODY:
            return
        if failure.kind in SUSPECT_KINDS:
            # It is not known which of several nodes hangs.
            is_known = num_nodes == 1 or failure.kind not in HANG_KINDS
            node = failure.node if is_known else None
            for streak in (self._streak, self._streak_of.setdefault(cell_id, _Streak())):
                # Only an attempt that began after the last hang was known shows anything new.
                is_check = is_repeat and streak.needs_check and began >= streak.known_at
                streak.add(cell_id, failure, node=node, began=began, now=now)
                streak.measured_layout_hung |= is_check
            return
        # Repeats that fail are given up one by one; their layouts were measured by an earlier call.
        is_edit = failure.kind is FailureKind.EDITED
        is_telling = not is_repeat and failure.kind not in OUT_OF_MEMORY_KINDS
        if self._nothing_measured and is_telling:
            said = re.sub(r"^rank \d+ ", "", failure.message)
            if _in_common(said, failure.kind) != self._same:
                self._same_failures, self._same_cells, self._first_failure = 0, set(), said
                self._num_failed_alike = 0
                self._same = _in_common(said, failure.kind)
            self._same_cells.add(cell_id)
            self._num_failed_alike += 1
            if not is_edit:
                self._same_failures += 1
            elif began >= self._edit_known_at:
                self._same_failures += 1
                self._edit_known_at = now
        # What was edited may have hung, too.
        if not is_edit:
            self._note_worked(cell_id, now)

    @property
    def may_stop(self) -> bool:
        """True if so many failures are alike that `stuck_cells` may return some."""
        faults = [self._streak, *self._streak_of.values()]
        return (
            self._is_all_implausible
            or self._same_failures >= SAME_FAILURES
            or any(streak.num >= MACHINE_FAULTS_IN_A_ROW for streak in faults)
        )

    def stuck_cells(
        self,
        open_cells: Collection[int],
        can_check: Collection[int] = (),
        checking: Collection[int] = (),
    ) -> set[int]:
        """Return the cells to stop: they fail again and again while others work or may work.

        `open_cells`: those that may go on; `can_check`: those with a measured layout that can run
        again, which shows whether the machine works; `checking`: those in which one does. Raises
        UsageInvalid for the program's mistake, ClusterUnavailable for the machine's.
        """
        waiting = self.cells_to_check & set(can_check)
        if self._streak.kinds <= HANG_KINDS:
            waiting |= self._streak.cells & set(checking)
        if self._is_all_implausible and self._same_cells.issuperset(open_cells):
            raise UsageInvalid(
                f"the first {self._num_implausible} trials that were measured have numbers that"
                f" cannot be true, the first: {self._first_implausible}. Correct the program, then"
                f" measure them again: sweep invalidate --sweep {self._sweep}"
                ' --where "implausible IS NOT NULL" --yes'
            )
        if self._same_failures >= SAME_FAILURES and self._same_cells.issuperset(open_cells):
            raise UsageInvalid(
                f"the first {self._num_failed_alike} attempts failed in the same way, so the"
                f" layouts are not the cause: {self._first_failure}. Correct the sweep file or the"
                " program. If you correct the program alone, its failures are kept until you give:"
                f" sweep invalidate --sweep {self._sweep} --where \"state = 'failed'\" --yes."
                " Then give the same `sweep run`"
            )
        if not open_cells:
            return set()
        stuck = {cell_id for cell_id in open_cells if self._is_stuck(cell_id, open_cells)} - waiting
        is_everywhere = (
            self._streak.num >= MACHINE_FAULTS_IN_A_ROW
            and self._streak.cells.issuperset(open_cells)
        )
        is_decided = not stuck and not waiting
        if is_everywhere and is_decided and not self._is_a_hang_of_some(self._streak):
            raise ClusterUnavailable(
                f"{self._streak.num} attempts one after the other failed by the machine's fault"
                f"{self._on_one_node()}, the last one: {self._streak.last}. Fix it (`sweep doctor`"
                " helps to find it); the same command continues"
            )
        return stuck

    @property
    def _is_all_implausible(self) -> bool:
        """True if nothing but numbers that cannot be true was measured."""
        return self._nothing_measured and self._num_implausible >= SAME_FAILURES

    def stuck_message(self, cell_id: int) -> str:
        """Return why a cell is stopped."""
        streak = self._streak_of[cell_id]
        told = f"{streak.num} attempts in a row failed{self._on_one_node(streak)}"
        return f"{told}, the last one: {streak.last}"

    def forget(self, cell_id: int) -> None:
        """Judge the others without a cell that was stopped."""
        self._streak_of.pop(cell_id, None)
        self._streak.cells.discard(cell_id)
        if not self._streak.cells:
            self._streak = _Streak()

    def _is_stuck(self, cell_id: int, open_cells: Collection[int]) -> bool:
        own = self._streak_of.get(cell_id)
        if own is None or own.num < MACHINE_FAULTS_IN_A_ROW:
            return False
        others_may_work = bool(set(open_cells) - self._streak.cells - {cell_id})
        others_worked = any(
            at >= own.began_at for other, at in self._worked_at.items() if other != cell_id
        )
        return others_may_work or others_worked or self._is_a_hang_of_some(own)

    def _is_a_hang_of_some(self, streak: _Streak) -> bool:
        """Return whether all of these hung while something worked: then their layouts hang."""
        return (
            streak.kinds <= HANG_KINDS and bool(self._worked_at) and not streak.measured_layout_hung
        )

    def _on_one_node(self, streak: _Streak | None = None) -> str:
        nodes = (streak or self._streak).nodes
        return f", all on node {next(iter(nodes))}" if len(nodes) == 1 and None not in nodes else ""

    def _note_worked(self, cell_id: int, now: float) -> None:
        """Note that an attempt ended by itself: its machine works, and so does its cell."""
        self._worked_at[cell_id] = now
        self._streak = _Streak()
        self._streak_of.pop(cell_id, None)


def _in_common(said: str, kind: FailureKind) -> str:
    """A message without the parts that differ by layout: the program's numbers, its log."""
    if kind is FailureKind.BAD_RESULT:
        return re.sub(r"\d[\d,.]*", "#", said)
    return said.partition(LAST_LINE)[0]
