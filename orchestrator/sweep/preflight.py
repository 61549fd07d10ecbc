"""Checks nodes: new ones while trials run elsewhere, and unfit ones again after a while.

It waits for no node, and does not know how trials end on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property

from db.store import Store
from orchestrator.cluster.contract import Prober
from orchestrator.core.machines.check import Check, Status
from orchestrator.core.machines.node_health import NodeFacts, judge_nodes, unfit
from orchestrator.node.probe import versions_here

logger = logging.getLogger(__name__)

# An unfit node is checked again after this long: another job may have used its GPUs, or somebody
# may have repaired it.
AGAIN_SECONDS = 600.0
# Answers are collected for this long and judged together: judging a thousand nodes takes most of a
# second.
TOGETHER_SECONDS = 5.0


class Preflight:
    """Checks the nodes of one call of `run_sweep`. Without a prober nodes are taken as fit."""

    def __init__(
        self,
        sweep_id: int,
        epoch: int,
        *,
        store: Store,
        prober: Prober | None,
        clock: Callable[[], float],
    ) -> None:
        self._sweep_id, self._epoch, self._store, self._prober, self._clock = (
            sweep_id,
            epoch,
            store,
            prober,
            clock,
        )
        self._facts: dict[str, NodeFacts] = {}
        # Nodes that could not be probed, and why.
        self._unanswered: dict[str, str] = {}
        # Node -> the id of its start when it was checked last.
        self._checked_starts: dict[str, str] = {}
        # Node -> when its last check began.
        self._began: dict[str, float] = {}
        self._awaited: set[str] = set()
        self._unjudged: dict[str, NodeFacts | str] = {}  # answers that are not judged yet
        self._judged_at = clock()
        self._unfit: dict[str, str] = {}

    @property
    def probes_nodes(self) -> bool:
        """True if nodes are checked before they are used."""
        return self._prober is not None

    @property
    def unfit(self) -> Mapping[str, str]:
        """Nodes that are not to be used, and why."""
        return self._unfit

    @property
    def awaits_answers(self) -> bool:
        """True while a node has not answered yet."""
        return bool(self._awaited)

    def fit(self, nodes: Collection[str]) -> Collection[str]:
        """Return those of these nodes that are fit.

        Nodes that are new, back again or were unfit for long are checked first.
        """
        if self._prober is None:
            return nodes
        now = self._clock()
        self._collect_answers(now)
        starts = {node: self._prober.start_id(node) for node in nodes}
        if due := [
            node
            for node, start in starts.items()
            if self._checked_starts.get(node) != start or self._is_to_be_asked_again(node, now)
        ]:
            self._forget(due)
            self._checked_starts |= {node: starts[node] for node in due}
            self._began |= dict.fromkeys(due, now)
            self._awaited.update(due)
            self._prober.begin_probes(due)
        return {node for node in nodes if node in self._facts and node not in self._unfit}

    def _is_to_be_asked_again(self, node: str, now: float) -> bool:
        return (
            node in self._unfit
            and node not in self._awaited
            and now - self._began[node] >= AGAIN_SECONDS
        )

    def _forget(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            self._facts.pop(node, None)
            self._unanswered.pop(node, None)
            self._unjudged.pop(node, None)

    def _collect_answers(self, now: float) -> None:
        """Collect the answers of nodes. An answer waits for the others only for a while."""
        assert self._prober is not None
        said = self._prober.probed()
        self._awaited -= said.keys()
        self._unjudged |= said
        if self._unjudged and (not self._awaited or now - self._judged_at >= TOGETHER_SECONDS):
            said, self._unjudged, self._judged_at = self._unjudged, {}, now
            self._facts |= {
                node: answer for node, answer in said.items() if isinstance(answer, NodeFacts)
            }
            self._unanswered |= {
                node: answer for node, answer in said.items() if isinstance(answer, str)
            }
            self._judge(said)

    def _judge(self, asked: Collection[str]) -> None:
        """Judge all nodes anew, since each is compared with the others. Write down what is new."""
        checks = judge_nodes(list(self._facts.values()), own=self._own_versions)
        checks |= {
            node: (Check(name="answers", status=Status.FAIL, found=text),)
            for node, text in self._unanswered.items()
        }
        found = {node: why for node, some in checks.items() if (why := unfit(some)) is not None}
        new = {
            node: some
            for node, some in checks.items()
            if node in asked or (node in found) != (node in self._unfit)
        }
        self._store.record_node_checks(self._sweep_id, self._epoch, self._facts, new)
        for node, some in new.items():
            self._tell(node, some, found.get(node))
        self._unfit = found

    @cached_property
    def _own_versions(self) -> Mapping[str, str | None]:
        return versions_here()

    def _tell(self, node: str, checks: Collection[Check], why: str | None) -> None:
        if why is not None:
            logger.warning(
                "Node %s is not used: %s", node, why, extra={"action": "unfit", "node": node}
            )
        elif node in self._unfit:
            logger.info("Node %s is fit now, and used", node, extra={"action": "fit", "node": node})
        for check in checks:
            if check.status is Status.WARN:
                logger.warning(
                    "Node %s, %s: %s. %s",
                    node,
                    check.name,
                    check.found,
                    check.advice,
                    extra={"action": "doubtful", "node": node},
                )
