"""Decides which attempt to start next, and starts it.

Retries come first, then anchors and doubtful results, then new layouts, then confirmations.
placement.py says which cell may start one, trial_requests.py what its ranks are asked;
outcomes.py records how they end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from db.write.writes import NewAttempt, NewTrial
from orchestrator.core.machines.packing import FreeOnNode
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.limits import PredictedStep
from orchestrator.core.trial.purpose import DOUBTS
from orchestrator.search.proposal import Proposal
from orchestrator.sweep.attempts import Attempt
from orchestrator.sweep.budgets import Budgets
from orchestrator.sweep.call import Call
from orchestrator.sweep.cell_life import CellState
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.cell_searches import CellSearches
from orchestrator.sweep.confirmation import Repeat
from orchestrator.sweep.missing_nodes import MissingNodes
from orchestrator.sweep.node_pool import NodePool
from orchestrator.sweep.outcomes import Outcomes
from orchestrator.sweep.placement import Placement, most_at_once
from orchestrator.sweep.progress import BUDGETS, CONFIRMED, DECIDED, StopReason
from orchestrator.sweep.trial_requests import TrialRequests

logger = logging.getLogger(__name__)

# Most launches in one commit: more make a trial hardly cheaper (benchmarks/results/write-path.md).
MOST_TOGETHER = 64
# The longest that a decided attempt waits for others to share its commit. A commit takes a few
# hundredths of it.
DECIDING_SECONDS = 0.1


class Dispatch:
    """Starts the attempts of one call of `run_sweep`."""

    def __init__(
        self,
        call: Call,
        *,
        outcomes: Outcomes,
        node_pool: NodePool,
        placement: Placement,
        missing_nodes: MissingNodes,
        budgets: Budgets,
        cell_searches: CellSearches,
        requests: TrialRequests,
    ) -> None:
        self._call, self._clock = call, call.clock
        self._scheduler, self._attempts = call.scheduler, call.attempts
        self._outcomes, self._node_pool, self._placement = outcomes, node_pool, placement
        self._missing_nodes, self._budgets = missing_nodes, budgets
        self._cell_searches, self._requests = cell_searches, requests
        self._settings = call.spec.search

    def start_what_fits(self) -> None:
        """Start attempts until no more may start, or no cell wants one."""
        self._missing_nodes.see(self._node_pool.usable(self._scheduler.slots.nodes))
        spent = self._budgets.spent
        for search in self._call.searches.values():
            if search.is_searched:
                self._check(search, spent)
        wanting = [one for one in self._call.searches.values() if self._wants_or_settles(one)]
        began, most = self._clock(), most_at_once(self._settings, self._scheduler.slots)
        free_on_nodes: Mapping[str, FreeOnNode] | None = None  # as of the last launch
        suspected = self._outcomes.stop_rules.suspected_cells
        while wanting and len(self._attempts) < most and self._placement.may_start(wanting):
            if free_on_nodes is None:
                free_on_nodes = self._scheduler.free_on_nodes()
            found = self._placement.next(wanting, self._clock(), free_on_nodes, suspected=suspected)
            if found is None:
                break
            search, nodes = found
            if self._shares_a_node(nodes, free_on_nodes):
                # Start those first: only then does the scheduler know how much of the node is left.
                self._launch()
                free_on_nodes = None
                continue
            if not self._decide_one(search, nodes) or not self._wants_or_settles(search):
                wanting.remove(search)
            is_late = self._clock() - began > DECIDING_SECONDS
            if len(self._attempts.decided) >= MOST_TOGETHER or is_late:
                self._launch()
                began, free_on_nodes = self._clock(), None
        self._launch()

    def think_ahead(self) -> None:
        """Have searches ask for their next layout while trials run, if to ask takes long."""
        if not self._attempts:
            return
        for search in self._call.searches.values():
            if not search.is_searched or search.retries.waiting:
                continue
            if search.should_ask_ahead and self._within_trials(search):
                search.ask_ahead(self._clock)

    @property
    def waits_for_nodes(self) -> bool:
        """True if a cell wants to go on and cannot, since nodes are gone that may come back."""
        wanting = (search for search in self._call.searches.values() if self._wants(search))
        return any(self._missing_nodes.waits(search) for search in wanting)

    def is_open(self, search: CellSearch) -> bool:
        """Return whether the cell may start another attempt of a trial that is not measured."""
        if search.is_searched:
            return True
        return self._may_retry(search) and search.life.state is CellState.CONFIRMING

    def note_ended(self, attempt: Attempt, search: CellSearch) -> None:
        """Note that an attempt is over: its nodes are free."""
        now = self._clock()
        self._placement.give_back(attempt)
        search.note_ended(seconds=now - attempt.since, now=now)

    def _shares_a_node(self, nodes: Sequence[str], free_on_nodes: Mapping[str, FreeOnNode]) -> bool:
        """Return whether a node's leased slots are taken by an attempt that has still to start."""
        if not free_on_nodes:
            return False
        leased = [node for node in nodes if node in free_on_nodes]
        return any(node in one.nodes for one in self._attempts.decided for node in leased)

    # -- what a cell wants -----------------------------------------------------------------------

    def _check(self, search: CellSearch, spent: StopReason | None) -> None:
        reason = spent or self._missing_nodes.gave_up(search)
        if reason is not None:
            search.stop(reason)
        else:
            search.check(self._settings, within_trials=self._within_trials(search))

    def _wants_or_settles(self, search: CellSearch) -> bool:
        """Return whether the cell has something to start; else settle it, if it was searched.

        What is left after a search is for the next call if the nodes for it do not come back.
        """
        if not (self._wants(search) or self._requeue_ended_early(search)):
            search.settle()
            return False
        reason = None if search.is_searched else self._missing_nodes.gave_up(search)
        if reason is not None:
            search.stop(reason)
        return reason is None

    def _requeue_ended_early(self, search: CellSearch) -> bool:
        """Requeue trials that were ended early and could be the fastest.

        Return whether there were any. Call it only when nothing else of the cell is left.
        """
        life, confirm = search.life, self._settings.confirm
        if life.state is not CellState.CONFIRMING or life.stopped not in DECIDED:
            return False
        if search.num_new or search.num_repeats or not confirm.repeats:
            return False
        found = search.confirmation.ended_early_that_could_win()
        if not found or self._budgets.spent or self._passed_by(search, None) is not None:
            return False
        if self._budgets.are_set:
            # The first must run to show whether the budget pays for another.
            found = dict([next(iter(found.items()))])
        search.begin_anew(self._cell_searches.plan(search.cell, search.id))
        self._outcomes.requeue_ended_early(search, found)
        return True

    def _wants(self, search: CellSearch) -> bool:
        """Return whether the cell has something to start. Asked often, so it looks at no budget."""
        state = search.life.state
        if state is not CellState.CONFIRMING:
            return state is CellState.SEARCHING
        if self._may_retry(search):
            return True
        return not search.num_new and self._next_repeat(search) is not None

    def _may_retry(self, search: CellSearch) -> bool:
        """Return whether what waits may start after the search. A spent budget keeps it waiting."""
        return bool(search.retries.waiting) and search.life.stopped in DECIDED

    def _next_repeat(self, search: CellSearch) -> Repeat | None:
        settings, confirmation = self._settings, search.confirmation
        if search.life.stopped in BUDGETS:
            # The budget was reserved for this repeat alone, so it goes before anchors.
            repeat = confirmation.repeat_of_best(settings.confirm)
            if repeat is not None:
                return repeat
        return confirmation.next_repeat(settings.confirm, anchor_every=settings.anchor_every)

    def _within_trials(self, search: CellSearch) -> bool:
        most = self._settings.max_trials
        return most is None or search.launched < most

    # -- one decision ----------------------------------------------------------------------------

    def _decide_one(self, search: CellSearch, nodes: tuple[str, ...]) -> bool:
        """Decide on what the cell wants next. False: it wants nothing now."""
        if self._waits_for_check(search):
            check = search.confirmation.next_machine_check()
            return check is not None and self._repeat(search, nodes, check)
        if search.is_searched:
            reason = self._search_on(search, nodes)
            if reason is None:
                return True
            if self._budgets.may_still_suffice(reason):
                return False
            if reason in BUDGETS:
                self._budgets.stop(search, reason, self._cell_searches.trial_cost)
            elif search.num_new or (search.doubt is not None and search.num_repeats):
                search.rest()
                return False
            else:
                search.stop(reason)
        return search.life.stopped in CONFIRMED and self._confirm(search, nodes)

    def _waits_for_check(self, search: CellSearch) -> bool:
        """Return whether a measured layout has to show first whether the machine still works."""
        if search.id not in self._outcomes.stop_rules.cells_to_check:
            return False
        has_more = search.is_searched or self._may_retry(search)
        is_paid = self._passed_by(search, None, is_repeat=True) is None
        return has_more and is_paid and search.confirmation.can_check_machine

    def _search_on(self, search: CellSearch, nodes: tuple[str, ...]) -> StopReason | None:
        """Decide on what the search of a cell wants next, or return why there is nothing."""
        if not search.launched and self._cell_searches.read_again(self._attempts.num_recorded):
            search.begin_anew(self._cell_searches.plan(search.cell, search.id))
            self._outcomes.take_up_again(search)
        is_over = search.reached(self._settings.bound)
        if is_over and not search.retries.waiting:
            return StopReason.BOUND
        passed = self._passed_by(search, None)
        if passed is None:
            search.note_pause(self._clock)
            # While the machine may be at fault, new layouts go before retries and anchors: they
            # show whether it works.
            is_trusted = not self._outcomes.stop_rules.suspects_the_machine
            if is_trusted and self._retry(search, nodes, elsewhere=not is_over):
                return None
            repeat = self._next_check(search) if is_trusted else None
            if repeat is not None and self._repeat(search, nodes, repeat):
                return None
            if repeat is None and (doubt := search.take_doubt()) is not None:
                if self._repeat(search, nodes, doubt):
                    return None
                search.put_back_doubt(doubt)
        reason = self._new(search, nodes)
        if reason is not StopReason.EXHAUSTED or not (search.retries.waiting or search.doubt):
            return reason
        return None if passed is None and self._retry(search, nodes) else passed or reason

    def _next_check(self, search: CellSearch) -> Repeat | None:
        """Return the anchor or contradiction to measure again while new layouts are still to come.

        Else anchors come with the confirmation.
        """
        settings = self._settings
        is_untried = self._within_trials(search) and search.searcher.untried > 0
        if search.ahead is None and not is_untried:
            return None
        num_left = search.searcher.untried
        if settings.max_trials is not None:
            num_left = min(num_left, settings.max_trials - search.launched)
        return search.confirmation.next_check(
            settings.confirm, anchor_every=settings.anchor_every, num_left=num_left
        )

    def _new(self, search: CellSearch, nodes: tuple[str, ...]) -> StopReason | None:
        """Decide on the layout that the search asks for, or return why not."""
        proposal = search.ask(self._clock) if self._within_trials(search) else None
        if proposal is None:
            return StopReason.EXHAUSTED
        passed = self._passed_by(search, proposal)
        if passed is not None:
            search.put_back(proposal)
            return passed
        begins = NewTrial(
            cell_id=search.id,
            layout=proposal.layout,
            why=proposal.why,
            predicted_tokens_per_second_per_gpu=proposal.predicted_tokens_per_second_per_gpu,
            predicted_memory_bytes=proposal.predicted_memory_bytes,
            nodes=nodes,
        )
        search.note_first_attempt()
        if proposal.layout in search.added:
            self._outcomes.trial_counts.note_launched()
        step = proposal.predicted_step
        self._decide(search, proposal.layout, nodes, begins, predicted=step, proposal=proposal)
        return None

    def _retry(
        self, search: CellSearch, nodes: tuple[str, ...], *, elsewhere: bool = False
    ) -> bool:
        """Decide on a waiting trial, if any. What should be alone starts on unused nodes only.

        What hung goes to other nodes. If it cannot, it comes last: not while only what can go
        `elsewhere` is asked for.
        """
        retries = search.retries
        is_alone = bool(retries.waiting) and self._placement.are_unused(nodes)
        trials = retries.startable(alone=is_alone)
        fresh = [one for one in trials if not retries.avoids(one, nodes)]
        trial = next(iter(fresh if elsewhere or fresh else trials), None)
        if trial is None:
            return False
        if trial not in fresh:
            avoided = retries.avoided[trial.id]
            if self._placement.is_possible_without(search.shape, avoided):
                others = self._elsewhere(search, avoided)
                if others is None and search.num_new:
                    # Other nodes may be free once a running attempt has ended.
                    return False
                nodes = others or nodes
        search.note_retried(trial)
        self._outcomes.trial_counts.note_launched()
        begins = NewAttempt(trial_id=trial.id, nodes=nodes)
        step, alone = search.predicted_step(trial.layout), trial.id in retries.suspects
        self._decide(search, trial.layout, nodes, begins, predicted=step, alone=alone)
        return True

    def _elsewhere(self, search: CellSearch, without: frozenset[str]) -> tuple[str, ...] | None:
        """Return free nodes for a gang of the cell, none of these. None: there are too few now."""
        free_on_nodes = self._scheduler.free_on_nodes()
        return self._placement.elsewhere(search, without, free_on_nodes)

    def _confirm(self, search: CellSearch, nodes: tuple[str, ...]) -> bool:
        """Decide on trials that wait after the search, then on repeats until one layout is best.

        If a budget ended the search, what waits is for the next call, and what is reserved of the
        budget is for repeats.
        """
        search.note_pause(self._clock)
        repeat = None if search.num_new else self._next_repeat(search)
        may_retry = self._may_retry(search)
        if not may_retry and repeat is None:
            return False
        if repeat is not None and self._passed_by(search, None) is not None:
            # The reserved budget is for a repeat of the best, so that one replaces any other.
            repeat = search.confirmation.repeat_of_best(self._settings.confirm) or repeat
        is_repeat = repeat is not None
        spent = self._budgets.spent or self._passed_by(search, None, is_repeat=is_repeat)
        if spent is not None:
            if not self._budgets.may_still_suffice(spent):
                search.settle_without_repeats(spent)
            return False
        if may_retry and self._retry(search, nodes):
            return True
        return repeat is not None and self._repeat(search, nodes, repeat)

    def _passed_by(
        self, search: CellSearch, proposal: Proposal | None, *, is_repeat: bool = False
    ) -> StopReason | None:
        cost = self._cell_searches.trial_cost
        return self._budgets.passed_by(search, proposal, cost, is_repeat=is_repeat)

    # -- starting --------------------------------------------------------------------------------

    def _repeat(self, search: CellSearch, nodes: tuple[str, ...], repeat: Repeat) -> bool:
        """Decide to measure a measured trial once more.

        False: its nodes may have made it slow, and others will be free once something has ended.
        """
        trial_id, layout = repeat.trial_id, repeat.layout
        before = search.confirmation.runs.nodes_of(trial_id)
        may_be_slow = repeat.purpose in DOUBTS and not before.isdisjoint(nodes)
        if may_be_slow and self._placement.is_possible_without(search.shape, before):
            others = self._elsewhere(search, before)
            if others is None and (search.num_new or search.num_repeats):
                return False
            nodes = others or nodes
        begins = NewAttempt(trial_id=trial_id, nodes=nodes, purpose=repeat.purpose, why=repeat.why)
        measured = search.confirmation.runs.seconds_of(trial_id)
        step = search.predicted_step(layout, at_least=measured)
        self._decide(search, layout, nodes, begins, predicted=step)
        search.note_repeat_begun(trial_id)
        return True

    def _decide(
        self,
        search: CellSearch,
        layout: Layout,
        nodes: tuple[str, ...],
        begins: NewTrial | NewAttempt,
        *,
        predicted: PredictedStep | None,
        proposal: Proposal | None = None,
        alone: bool = False,
    ) -> None:
        """Add an attempt to the ledger and reserve its nodes; `_launch` starts it."""
        attempt = self._attempts.decide(
            cell_id=search.id,
            cell=search.cell,
            layout=layout,
            nodes=nodes,
            begins=begins,
            predicted=predicted,
            expected_gpu_seconds=search.cost.expected_gpu_seconds(
                proposal, self._cell_searches.trial_cost
            ),
            now=self._clock(),
        )
        self._placement.take(attempt, search, alone=alone)
        search.note_started()

    def _launch(self) -> None:
        """Start the attempts that were decided on."""
        decided = list(self._attempts.decided)
        # Store attempts before they start: if this process dies in between, no number is used
        # twice.
        begins = [attempt.begins for attempt in decided]
        begun = self._call.store.begin_trials(begins, epoch=self._call.epoch)
        for attempt, (trial_id, number) in zip(decided, begun, strict=True):
            if attempt.is_repeat:
                extra = {"action": "repeated", "trial_id": trial_id, "attempt": number}
                logger.info("Trial %d again: %s", trial_id, attempt.begins.why, extra=extra)
            code = self._call.code.as_of_now()
            self._attempts.start(attempt, trial_id, number, now=self._clock(), code=code)
            shape = self._call.searches[attempt.cell_id].shape
            self._scheduler.start(self._requests.of(attempt), shape, attempt.nodes)
