"""Decides which nodes a running sweep uses: fit ones that are not benched as slow or failing.

It decides nothing about trials, but names the cells that have some to measure again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from db.read.rows import BenchRow
from db.store import Store
from db.types import BenchReason
from orchestrator.cluster.contract import Finished, Prober
from orchestrator.core.errors import ClusterUnavailable
from orchestrator.core.machines.node_score import NodeScore, evidence_in_words, score_nodes
from orchestrator.core.machines.packing import FreeSlots, Shape
from orchestrator.core.trial.failure_kinds import (
    HANG_KINDS,
    NODE_KINDS,
    ONE_NODE_KINDS,
    SUSPECT_KINDS,
    Failure,
    FailureKind,
)
from orchestrator.sweep.preflight import Preflight

logger = logging.getLogger(__name__)

# A node is benched once this many trials failed by its fault within this time.
FAULTS, FAULTS_SECONDS = 2, 1800.0
# After this long a call begins without the nodes that have not answered, if others hold a gang.
PATIENCE_SECONDS = 20.0
# Nodes are scored again after this share of new measurements.
MORE_RUNS = 0.02
# Or after this many for each node, if that is more: scoring thousands of nodes takes most of a
# second.
RUNS_PER_NODE = 1.0
# How often the store is asked whether a person has benched a node, by this machine's clock.
REFRESH_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hang:
    """A gang on one node hung.

    That counts against the node once the same trial did not hang on another node. Else the layout
    hangs.
    """

    node: str
    failure: Failure
    began: float
    at: float


class NodePool:
    """Decides which nodes one call of `run_sweep` may use. Without a prober all nodes are fit."""

    def __init__(
        self,
        sweep_id: int,
        epoch: int,
        *,
        store: Store,
        prober: Prober | None,
        clock: Callable[[], float],
    ) -> None:
        self._sweep_id, self._epoch, self._store, self._clock = sweep_id, epoch, store, clock
        self._preflight = Preflight(sweep_id, epoch, store=store, prober=prober, clock=clock)
        self._opened = clock()
        # The nodes of the last call of `usable`, with their slots.
        self._nodes: dict[str, int] = {}
        # Those of them that may be used.
        self._usable: dict[str, int] = {}
        # The mapping that `usable` was given last: comparing thousands of nodes takes time.
        self._given: Mapping[str, int] | None = None
        # Shapes of the gangs that the nodes have to hold.
        self._shapes: set[Shape] = set()
        self._benched: dict[str, BenchRow] = {}
        self._asked_at = time.monotonic()
        # By trial: the hang of its last attempt, if that hung.
        self._hangs: dict[int, _Hang] = {}
        # By node: when each fault became known, and its trial.
        self._faults: dict[str, list[tuple[float, int]]] = {}
        self._num_measured, self._num_scored = 0, 0
        # Trials that were under way when measurements were last withdrawn. They are judged once
        # they have ended.
        self._left: set[int] = set()
        # Nodes that would be benched if the gangs could do without them.
        self._spared: set[str] = set()

    @property
    def awaits_answers(self) -> bool:
        """True while a node has not answered its check yet."""
        return self._preflight.awaits_answers

    def usable(self, nodes: Mapping[str, int]) -> dict[str, int]:
        """Return those of these nodes, with their slots, that may be used by now.

        New nodes are checked; they are used once they have answered.
        """
        if not self._benched and not self._preflight.probes_nodes:
            if nodes is not self._given and nodes != self._nodes:
                self._nodes = self._usable = dict(nodes)
            self._given = nodes
            return self._nodes
        fit = self._preflight.fit([node for node in nodes if node not in self._benched])
        self._given = None
        self._nodes, self._usable = (
            dict(nodes),
            {node: nodes[node] for node in nodes if node in fit and node not in self._benched},
        )
        return self._usable

    def may_begin(self, shapes: Iterable[Shape], nodes: Mapping[str, int]) -> bool:
        """Return whether enough nodes have answered their checks to begin with these gangs.

        That is all of them, or after a while those that hold one gang. Raises ClusterUnavailable if
        all have answered and the fit ones hold no gang, though all of them together would.
        """
        self._shapes = set(shapes)
        free_slots = FreeSlots(self.usable(nodes))
        is_possible = any(free_slots.holds(shape) for shape in self._shapes)
        if is_possible or self.awaits_answers:
            return is_possible and (
                not self.awaits_answers or self._clock() - self._opened >= PATIENCE_SECONDS
            )
        why = [f"{node} ({reason})" for node, reason in sorted(self._preflight.unfit.items())]
        why += [
            f"{node} (benched: {row.reason}; `sweep unbench {node}`)"
            for node, row in sorted(self._benched.items())
        ]
        raise ClusterUnavailable(
            f"no node that is left can be used: {'; '.join(why)}. Fix them (`sweep doctor"
            " --cluster`"
            " shows all of it), or use them as they are with measurement.preflight=false; the same"
            " command continues"
        )

    def refresh(self, under_way: Collection[int] = (), *, now: bool = False) -> set[int]:
        """Ask the store, from time to time or now, which nodes a person has benched.

        Return the cells whose trials wait again because of it.
        """
        if not now and time.monotonic() - self._asked_at < REFRESH_SECONDS:
            return set()
        self._asked_at = time.monotonic()
        before = set(self._bad)
        self._benched = {
            row.node: row for row in self._store.benches(self._sweep_id) if row.until is None
        }
        return self._remeasure(under_way) if set(self._bad) - before else set()

    def ended(
        self, trial_id: int, event: Finished, under_way: Collection[int], *, began: float
    ) -> set[int]:
        """Note that an attempt is over. `began`: when it did.

        Return the cells whose trials wait again, since a node that measured them is slow.
        """
        is_due = trial_id in self._left
        self._left.discard(trial_id)
        self._judge_hang(trial_id, event, began=began)
        if event.failure is not None and event.failure.kind not in HANG_KINDS:
            self._note_fault(
                trial_id,
                event.failure,
                num_nodes=len(event.reports),
                began=began,
                now=self._clock(),
            )
        if event.failure is None:
            self._num_measured += 1
            is_due |= self._bench_the_slow() or not {
                report.node for report in event.reports
            }.isdisjoint(self._bad)
        return self._remeasure(under_way) if is_due else set()

    @property
    def _bad(self) -> list[str]:
        """Nodes whose measurements do not count."""
        return [node for node, row in self._benched.items() if row.is_remeasured]

    def _remeasure(self, under_way: Collection[int]) -> set[int]:
        self._left |= set(under_way)
        return self._store.remeasure(
            self._sweep_id, self._epoch, self._bad, except_trials=under_way
        )

    # -- nodes that are at fault -----------------------------------------------------------------

    def _judge_hang(self, trial_id: int, event: Finished, *, began: float) -> None:
        """Remember a hang, and judge the one before it.

        A trial that hung and then ended by itself elsewhere has shown that its node is at fault.
        """
        failure, nodes = event.failure, {report.node for report in event.reports}
        if failure is not None and failure.kind is FailureKind.EDITED:
            # It may have hung, too.
            return
        before = self._hangs.pop(trial_id, None)
        if failure is not None and failure.kind in HANG_KINDS:
            if before is None and failure.node is not None and len(event.reports) == 1:
                self._hangs[trial_id] = _Hang(
                    node=failure.node, failure=failure, began=began, at=self._clock()
                )
        elif (
            before is not None
            and before.node not in nodes
            and (failure is None or failure.kind not in SUSPECT_KINDS)
        ):
            self._note_fault(
                trial_id, before.failure, num_nodes=1, began=before.began, now=before.at
            )

    def _note_fault(
        self, trial_id: int, failure: Failure, *, num_nodes: int, began: float, now: float
    ) -> None:
        node = failure.node
        at_fault = NODE_KINDS | ONE_NODE_KINDS if num_nodes == 1 else NODE_KINDS
        if node is None or failure.kind not in at_fault:
            return
        recent = [
            (at, trial) for at, trial in self._faults.get(node, []) if now - at <= FAULTS_SECONDS
        ]
        if recent and began < recent[-1][0]:
            # This is the same event as the last fault: with a node, all its attempts are lost.
            return
        recent.append((now, trial_id))
        self._faults[node] = recent
        # Only several trials count: one that fails wherever it runs is not its nodes' fault.
        trials = sorted({trial for _, trial in recent})
        if len(trials) >= FAULTS:
            self._bench(
                node,
                BenchReason.FAULTS,
                {"trials": trials, "last": f"{failure.kind}: {failure.message}"},
                is_remeasured=False,
            )

    def _bench_the_slow(self) -> bool:
        """Score the nodes if enough was measured since. Return whether one more is benched now."""
        enough = max(1.0, MORE_RUNS * self._num_scored, RUNS_PER_NODE * len(self._nodes))
        if len(self._nodes) < 2 or self._num_measured - self._num_scored < enough:
            return False
        self._num_scored = self._num_measured
        scores = score_nodes(self._store.node_runs(self._sweep_id))
        return sum(self._bench_if_slow(node, score) for node, score in scores.items()) > 0

    def _bench_if_slow(self, node: str, score: NodeScore) -> bool:
        if not score.is_slow:
            return False
        evidence = {
            "slower": round(score.slower, 4),
            "standard_error": round(score.standard_error, 4),
            "num_runs": score.num_runs,
        }
        return self._bench(node, BenchReason.SLOW, evidence, is_remeasured=True)

    def _bench(
        self, node: str, reason: BenchReason, evidence: Mapping[str, Any], *, is_remeasured: bool
    ) -> bool:
        if node in self._benched or node not in self._nodes:
            return False
        told = evidence_in_words(evidence)
        if not self._can_spare(node):
            if node not in self._spared:
                self._spared.add(node)
                logger.warning(
                    "Node %s would be benched (%s: %s), but no other can do its work",
                    node,
                    reason,
                    told,
                )
            return False
        self._store.bench(
            self._sweep_id,
            node,
            reason=reason,
            is_remeasured=is_remeasured,
            evidence=evidence,
            epoch=self._epoch,
        )
        self._benched = {
            row.node: row for row in self._store.benches(self._sweep_id) if row.until is None
        }
        logger.warning(
            "Node %s is benched, %s: %s",
            node,
            reason,
            told,
            extra={"action": "benched", "node": node},
        )
        return True

    def _can_spare(self, node: str) -> bool:
        """Return whether every gang that the usable nodes hold fits without this node."""
        usable = {name: slots for name, slots in self._usable.items() if name not in self._benched}
        with_it, without = (
            FreeSlots(usable),
            FreeSlots({name: slots for name, slots in usable.items() if name != node}),
        )
        return all(without.holds(shape) for shape in self._shapes if with_it.holds(shape))
