"""Noticing what no layout is to blame for: a machine that fails everybody, or a program that fails the same way from the first trial on."""

from __future__ import annotations

import re
from math import inf

from orchestrator.core.errors import ClusterUnavailable, UsageInvalid
from orchestrator.core.failures import OUT_OF_MEMORY_KINDS, POLICIES, Failure, Fault

MACHINE_FAULTS_IN_A_ROW = (
    5  # then it is not bad luck: a full disk, a foreign process on the GPU; going on would use up every trial's retries
)
SAME_FAILURES = 5  # word for word, before anything was measured: a wrong option or path, told once instead of once per layout


class Blame:
    """Counts over one call of `run_sweep`."""

    def __init__(self, sweep: str) -> None:
        self._sweep = sweep
        self.suspects_the_machine = False  # whether the last attempt failed by the machine's fault
        self._machine_faults_in_a_row, self._last_machine_fault, self._known_at = 0, "", -inf
        self._nothing_measured = True
        self._same_failures, self._first_failure = 0, ""

    def note_measured(self) -> None:
        self._trust_the_machine()
        self._nothing_measured, self._same_failures = False, 0

    def note_failure(self, failure: Failure, *, began: float, now: float) -> None:
        """`began`: when its attempt did. One that began before the last fault was known says nothing new: a lost node takes all that it ran."""
        fault = POLICIES[failure.kind].fault
        if fault is Fault.NOBODY:  # we ended it: several at once say the same words
            return
        is_machines = fault is Fault.MACHINE
        if self._nothing_measured and not is_machines and failure.kind not in OUT_OF_MEMORY_KINDS:
            said = re.sub(r"^rank \d+ ", "", failure.message)
            self._same_failures = self._same_failures + 1 if said == self._first_failure else 1
            self._first_failure = said
        if not is_machines:
            self._trust_the_machine()
            return
        self.suspects_the_machine = True
        if began >= self._known_at:
            self._machine_faults_in_a_row += 1
            self._last_machine_fault, self._known_at = failure.message, now

    def raise_if_it_is_not_the_layouts(self) -> None:
        """Raise UsageInvalid for the program's mistake, ClusterUnavailable for the machine's."""
        if self._same_failures >= SAME_FAILURES:
            raise UsageInvalid(
                f"the first {self._same_failures} trials failed in the same way, so it is not their layouts: {self._first_failure}."
                f" Mend it, then have them measured: sweep invalidate --sweep {self._sweep} --where \"state = 'failed'\" --yes;"
                " where the file itself changes, give the sweep a new name"
            )
        if self._machine_faults_in_a_row >= MACHINE_FAULTS_IN_A_ROW:
            raise ClusterUnavailable(
                f"{self._machine_faults_in_a_row} attempts one after the other failed by the machine's fault, the last one:"
                f" {self._last_machine_fault}. Mend it (`sweep doctor` helps to find it); the same command goes on"
            )

    def _trust_the_machine(self) -> None:
        self.suspects_the_machine, self._machine_faults_in_a_row = False, 0
