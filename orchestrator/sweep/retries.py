"""The trials of a cell that wait for another attempt, and on which nodes each may have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from db.read.rows import TrialRow
from orchestrator.core.trial.failure_kinds import HANG_KINDS, FailureKind


@dataclass(eq=False, kw_only=True)
class Retries:
    waiting: list[TrialRow] = field(default_factory=list)
    # Trials whose node was lost. They are tried again alone, to tell which of the two failed.
    suspects: set[int] = field(default_factory=set)
    # By trial: the nodes that it hung on, or that may have been slow.
    avoided: dict[int, frozenset[str]] = field(default_factory=dict)
    # True once a trial ran a node out of memory: on a shared node the next one might do so again.
    needs_own_nodes: bool = False

    def add(self, trial: TrialRow, kind: FailureKind, nodes: Iterable[str]) -> None:
        """Let a trial wait, since its last attempt, on these nodes, failed in this way."""
        self.waiting.append(trial)
        self.needs_own_nodes |= kind is FailureKind.OOM_HOST
        if kind is FailureKind.NODE_LOST:
            self.suspects.add(trial.id)
        if kind in HANG_KINDS:
            self.avoid(trial.id, nodes)

    def avoid(self, trial_id: int, nodes: Iterable[str]) -> None:
        """Prefer other nodes for a trial; if there are none now, start it after the others."""
        self.avoided[trial_id] = frozenset(nodes)

    def restore(
        self,
        *,
        lost_a_node: Iterable[int],
        avoided: Mapping[int, frozenset[str]],
        needs_own_nodes: bool,
    ) -> None:
        """Continue from the failures of earlier calls."""
        self.suspects, self.avoided = set(lost_a_node), dict(avoided)
        self.needs_own_nodes = needs_own_nodes

    @property
    def are_all_suspects(self) -> bool:
        """True if trials wait, and each of them should be alone on its nodes."""
        if not self.suspects or not self.waiting:
            return False
        return all(trial.id in self.suspects for trial in self.waiting)

    def startable(self, *, alone: bool) -> list[TrialRow]:
        """The trials that may start; suspects only where they are `alone`."""
        return [one for one in self.waiting if alone or one.id not in self.suspects]

    def avoids(self, trial: TrialRow, nodes: Iterable[str]) -> bool:
        """True if the trial should avoid one of these nodes."""
        return not self.avoided.get(trial.id, frozenset()).isdisjoint(nodes)
