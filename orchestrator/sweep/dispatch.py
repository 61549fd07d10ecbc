"""Decides which attempt to start next: retries, then anchors and doubtful results, then new layouts, then confirmations.

It holds the attempts under way. How they end is recorded in outcomes.py; placement.py says which cell may start one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from db.store import Store
from db.write.writes import NewAttempt, NewTrial
from orchestrator.cluster.contract import Scheduler
from orchestrator.core.machines.packing import FreeOnNode
from orchestrator.core.problem.layout import Layout
from orchestrator.core.search.trial_cost import TrialCost
from orchestrator.core.sweepfile.sections import Exclusive
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.workload_options import SyntheticOptions, options_of
from orchestrator.core.trial.limits import PredictedStep, resolve_limits
from orchestrator.core.trial.protocol import TrialRequest
from orchestrator.core.trial.purpose import Purpose
from orchestrator.search.searcher import Proposal
from orchestrator.sweep import sharing
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.confirmation import Repeat
from orchestrator.sweep.node_pool import NodePool
from orchestrator.sweep.outcomes import Flight, Outcomes
from orchestrator.sweep.placement import Placement
from orchestrator.sweep.progress import BUDGETS, CONFIRMED, DECIDED, StopReason
from orchestrator.sweep.spending import SPENT, Spending

logger = logging.getLogger(__name__)

MOST_TOGETHER = 64  # launches in one commit: more make a trial hardly cheaper (benchmarks/results/write-path.md)
CELL_PAUSE_SECONDS = 600.0  # that nothing of a cell ran: its machine may have changed meanwhile,
CELL_PAUSE_TRIALS = 4.0  # if as many trials would have run
CHOOSING_SECONDS = 0.1  # that the first of them waits for the others, where a search thinks long: a commit costs hundredths of that


@dataclass(frozen=True, kw_only=True)
class _Decision:
    """An attempt that is about to be written down, and then started."""

    run: CellSearch
    layout: Layout
    nodes: tuple[str, ...]
    ticket: int
    begins: NewTrial | NewAttempt
    predicted: PredictedStep | None  # None: nothing is
    expected_gpu_seconds: float | None

    @property
    def is_repeat(self) -> bool:
        return isinstance(self.begins, NewAttempt) and self.begins.is_repeat


class Dispatch:
    """The attempts that one call of `run_sweep` starts. `trial_cost` is what a trial holds beside its steps; `learn` begins a cell's search anew with what others taught."""

    def __init__(
        self,
        spec: SweepSpec,
        epoch: int,
        *,
        store: Store,
        scheduler: Scheduler,
        outcomes: Outcomes,
        node_pool: NodePool,
        clock: Callable[[], float],
        spending: Spending,
        trial_cost: Callable[[], TrialCost],
        learn: Callable[[CellSearch], None],
        began: float,
    ) -> None:
        self._began = began
        self._spec, self._epoch, self._store, self._scheduler, self._outcomes = (
            spec,
            epoch,
            store,
            scheduler,
            outcomes,
        )
        self._clock, self._spending, self._trial_cost, self._learn = (
            clock,
            spending,
            trial_cost,
            learn,
        )
        self._node_pool = node_pool
        self._plan, self._limits = spec.measurement.plan, spec.measurement.limits.asked
        self._placement = Placement(
            scheduler.slots.nodes,
            exclusive=spec.measurement.exclusive is Exclusive.NODE,
            turn_of=sharing.turn if spending.is_shared else None,
        )
        self._runs: Sequence[CellSearch] = ()
        self._without_nodes_since: dict[
            int, float
        ] = {}  # cell id -> when the nodes that are left could no longer hold its gangs
        self._nodes: dict[str, int] = {}  # those that can be used, as seen last, with their slots
        self._usable: Mapping[str, int] = self._nodes  # as it was given
        # Nodes that went while cells waited for nodes, the first of them included.
        self._gone: set[str] = set()
        self._lost_at = -inf  # when the last of these went for the first time
        self._decided: list[_Decision] = []  # in this turn, not started yet
        self.flights: dict[int, Flight] = {}

    def what_fits(self, runs: Sequence[CellSearch]) -> None:
        """Start trials until none may start, or no cell wants one."""
        self._runs = runs
        self._see_nodes(self._node_pool.usable(self._scheduler.slots.nodes))
        spent = self._spending.spent()
        for run in runs:
            if run.stopped is None:
                self._may_stop(run, spent)
        wanting = [run for run in runs if self._wants(run)]
        began, most_at_once = self._clock(), self._most_at_once
        free_on_nodes: Mapping[str, FreeOnNode] | None = None  # as of the last launch
        while (
            wanting
            and len(self.flights) + len(self._decided) < most_at_once
            and self._placement.may_have_room(wanting)
        ):
            free_on_nodes = (
                self._scheduler.free_on_nodes() if free_on_nodes is None else free_on_nodes
            )
            turn = self._placement.next(
                wanting,
                self._clock(),
                free_on_nodes,
                suspected=self._outcomes.stop_rules.suspected_cells,
            )
            if turn is None:
                break
            run, nodes = turn
            if free_on_nodes and any(
                node in free_on_nodes and node in one.nodes
                for one in self._decided
                for node in nodes
            ):
                self._launch()  # what was chosen there takes of that room: how much is left, the scheduler knows when it has started
                free_on_nodes = None
                continue
            if not self._one(run, nodes) or not self._wants(run):
                wanting.remove(run)
            if len(self._decided) >= MOST_TOGETHER or self._clock() - began > CHOOSING_SECONDS:
                self._launch()
                began, free_on_nodes = self._clock(), None
        self._launch()

    def think_ahead(self, runs: Iterable[CellSearch]) -> None:
        """Have searches ask for their next layout while trials run, where asking takes long."""
        for run in runs:
            if (
                run.stopped is None
                and self.flights
                and not run.waiting
                and self._within_trials(run)
            ):
                run.ask_ahead(self._clock)

    def waits_for_nodes(self, runs: Iterable[CellSearch]) -> bool:
        """Whether a cell wants to go on and cannot, for nodes are gone that may come back."""
        return any(self._wants(run) and self._waits(run) for run in runs)

    def is_open(self, run: CellSearch) -> bool:
        """Say whether the cell may start another attempt of a trial that is not measured."""
        return run.stopped is None or (run.stopped in DECIDED and bool(run.waiting))

    def ended(self, flight: Flight) -> None:
        """An attempt is over: its nodes are free."""
        del self.flights[flight.trial_id]
        self._placement.ended(flight.ticket)
        flight.run.landed(is_repeat=flight.is_repeat, seconds=self._clock() - flight.since)
        flight.run.ended_at = self._clock()

    @property
    def _most_at_once(self) -> int:
        asked, slots = self._spec.search.max_parallel_trials, self._scheduler.slots
        return asked if isinstance(asked, int) else slots.usual_at_once or slots.total

    # -- who wants what ------------------------------------------------------------------------------------------------------

    def _may_stop(self, run: CellSearch, spent: StopReason | None) -> None:
        run.stopped = spent or self._gave_up_nodes(run)
        if not run.has_changed:
            return
        run.has_changed = False
        run.stopped = run.stopped or run.had_enough(self._spec.search)
        if run.stopped is None and not run.has_something(within_trials=self._within_trials(run)):
            if run.num_new:
                run.rests = True  # what runs may change that
            else:
                run.stopped = StopReason.EXHAUSTED

    def _see_nodes(self, usable: Mapping[str, int]) -> None:
        """Nodes may have gone or come. While cells wait for nodes, each that goes for the first time is waited for anew."""
        if usable is self._usable or usable == self._nodes:
            return
        self._usable = usable
        self._placement.see(usable)
        if not self._without_nodes_since:
            self._gone.clear()
        if gone := self._nodes.keys() - usable.keys() - self._gone:
            self._gone |= gone
            self._lost_at = self._clock()
        self._nodes = dict(usable)

    def _gave_up_nodes(self, run: CellSearch) -> StopReason | None:
        """Whether the nodes that are left cannot hold its gangs, and were waited for long enough."""
        if self._placement.is_possible(run.shape):
            self._without_nodes_since.pop(run.id, None)
            return None
        patience = self._spec.measurement.wait_for_nodes
        if run.id not in self._without_nodes_since:
            self._without_nodes_since[run.id] = self._clock()
            logger.warning(
                "%s: the nodes that are left cannot hold its gangs; it waits %.0f s for others (measurement.wait_for_nodes)",
                run.cell.key,
                patience,
            )
        waited = self._clock() - max(self._without_nodes_since[run.id], self._lost_at)
        return StopReason.NODES if waited > patience and not self._node_pool.is_looking else None

    def _waits(self, run: CellSearch) -> bool:
        """Once its search has ended, what is left of it, a repeat or another attempt, is given up when the patience is over; the search said why it ended."""
        is_left = run.stopped is None or self._gave_up_nodes(run) is None
        return is_left and run.id in self._without_nodes_since

    def _wants(self, run: CellSearch) -> bool:
        """Whether the cell has something to launch; asked again and again, and for nothing that costs."""
        if run.stopped is None:
            return not run.rests
        if run.stopped not in CONFIRMED or run.is_settled:
            return False
        if run.waiting and run.stopped in DECIDED:
            return True
        if run.num_new:
            return False
        has_repeat = self._next_repeat(run) is not None
        run.is_settled = not has_repeat and not run.num_repeats
        return has_repeat

    def _next_repeat(self, run: CellSearch) -> Repeat | None:
        search = self._spec.search
        if (
            run.stopped in BUDGETS
            and (again := run.confirmation.repeat_of_best(search.confirm)) is not None
        ):
            return again  # no more than that was kept: it goes before anchors
        return run.confirmation.next_repeat(search.confirm, anchor_every=search.anchor_every)

    def _within_trials(self, run: CellSearch) -> bool:
        most = self._spec.search.max_trials
        return most is None or run.launched < most

    # -- one launch ----------------------------------------------------------------------------------------------------------

    def _one(self, run: CellSearch, nodes: tuple[str, ...]) -> bool:
        """Start what the cell wants next; False: it wants nothing now."""
        if run.stopped is None:
            reason = self._search_on(run, nodes)
            if reason is None:
                return True
            if reason in SPENT and self._is_anything_under_way:
                return False  # that may hold less than it should
            if reason in BUDGETS:
                self._stop_within_budget(run, reason)
            elif run.num_new:
                run.rests = True
                return False
            else:
                run.stopped = reason
        return run.stopped in CONFIRMED and self._settle(run, nodes)

    def _search_on(self, run: CellSearch, nodes: tuple[str, ...]) -> StopReason | None:
        """Start what the search of a cell wants next, or say why there is nothing."""
        if not run.launched:
            self._learn(run)
        is_over = run.reached(self._spec.search.bound)
        if is_over and not run.waiting:
            return StopReason.BOUND
        passed = self._passed_by(run, None)
        if passed is None:
            self._note_pause(run)
            # What failed by the machine's fault, and anchors, let new layouts go first, until one of them shows that the machine is well.
            is_trusted = not self._outcomes.stop_rules.suspects_the_machine
            if is_trusted and self._waiting(run, nodes, elsewhere=not is_over):
                return None
            search = self._spec.search
            checks = is_trusted and self._goes_on(run)
            check = (
                run.confirmation.next_check(search.confirm, anchor_every=search.anchor_every)
                if checks
                else None
            )
            if check is not None:
                self._repeat(run, nodes, check)
                return None
            doubt = run.take_doubt()
            if doubt is not None:
                trial_id, layout, why = doubt
                self._repeat(
                    run,
                    nodes,
                    Repeat(trial_id=trial_id, layout=layout, purpose=Purpose.DOUBT, why=why),
                )
                return None
        reason = self._new(run, nodes)
        if reason is not StopReason.EXHAUSTED or not (run.waiting or run.doubt):
            return reason
        return None if passed is None and self._waiting(run, nodes) else passed or reason

    def _note_pause(self, run: CellSearch) -> None:
        """Note a pause where nothing of the cell ran for long: others had their turn, or its nodes were gone."""
        if run.ended_at is None or run.num_new or run.num_repeats:
            return
        if self._clock() - run.ended_at > max(
            CELL_PAUSE_SECONDS, CELL_PAUSE_TRIALS * run.trial_seconds
        ):
            run.confirmation.pause()
            run.ended_at = None

    def _goes_on(self, run: CellSearch) -> bool:
        """Say whether a new layout is still to be launched. If not, anchors come with the confirmation."""
        return run.ahead is not None or (self._within_trials(run) and run.searcher.untried > 0)

    def _new(self, run: CellSearch, nodes: tuple[str, ...]) -> StopReason | None:
        """Start what the search asks for, or say why it is not started."""
        proposal = run.ask(self._clock) if self._within_trials(run) else None
        if proposal is None:
            return StopReason.EXHAUSTED
        passed = self._passed_by(run, proposal)
        if passed is not None:
            run.ahead = proposal  # as if it had been asked for ahead
            return passed
        begins = NewTrial(
            cell_id=run.id,
            layout=proposal.layout,
            why=proposal.why,
            predicted_tokens_per_second_per_gpu=proposal.predicted_tokens_per_second_per_gpu,
            predicted_memory_bytes=proposal.predicted_memory_bytes,
            nodes=nodes,
        )
        run.launched += 1
        self._outcomes.launched(is_new=proposal.layout not in run.added)
        self._decide(
            run,
            proposal.layout,
            nodes,
            begins,
            predicted=proposal.predicted_step,
            proposal=proposal,
        )
        return None

    def _waiting(self, run: CellSearch, nodes: tuple[str, ...], *, elsewhere: bool = False) -> bool:
        """Start what was launched before, and waits; what should be alone, only where it is.

        What hung goes to other nodes. Where it cannot, it comes last: not while only what can go `elsewhere` is asked for.
        """
        is_alone = bool(run.waiting) and self._placement.are_unused(nodes)
        trials = [trial for trial in run.waiting if is_alone or trial.id not in run.suspects]
        fresh = [
            trial for trial in trials if run.hung_on.get(trial.id, frozenset()).isdisjoint(nodes)
        ]
        trial = next(iter(fresh if elsewhere or fresh else trials), None)
        if trial is None:
            return False
        if trial not in fresh:
            hung_on = run.hung_on[trial.id]
            if self._placement.is_possible_without(run.shape, hung_on):
                others = self._placement.elsewhere(run, hung_on, self._scheduler.free_on_nodes())
                if others is None and run.num_new:
                    return False  # they may be free when what runs has ended
                nodes = others or nodes
        run.waiting.remove(trial)
        run.launched += trial.num_attempts == 0
        self._outcomes.launched(is_new=False)
        self._decide(
            run,
            trial.layout,
            nodes,
            NewAttempt(trial_id=trial.id, nodes=nodes),
            predicted=run.predicted_step(trial.layout),
            alone=trial.id in run.suspects,
        )
        return True

    def _settle(self, run: CellSearch, nodes: tuple[str, ...]) -> bool:
        """Start what still waits after the search of a cell has ended, then repeat contenders until one layout is the winner.

        Where a budget ended the search, what waits is for the next call, and what is kept of the budget is for repeats.
        """
        self._note_pause(run)
        found = None if run.num_new else self._next_repeat(run)
        may_wait = run.waiting and run.stopped in DECIDED
        if not may_wait and found is None:
            return False
        if found is not None and self._passed_by(run, None) is not None:
            # What is kept is for the best: another repeat would take its place.
            found = run.confirmation.repeat_of_best(self._spec.search.confirm) or found
        spent = self._spending.spent() or self._passed_by(run, None, is_repeat=found is not None)
        if spent is not None:
            if spent not in SPENT or not self._is_anything_under_way:
                run.stopped, run.is_settled = spent, True  # the next call may go on with it
            return False
        if may_wait and self._waiting(run, nodes):
            return True
        if found is None:
            return False
        self._repeat(run, nodes, found)
        return True

    # -- budgets -------------------------------------------------------------------------------------------------------------

    def _passed_by(
        self, run: CellSearch, proposal: Proposal | None, *, is_repeat: bool = False
    ) -> StopReason | None:
        if not self._spending.is_shared:  # what is under way need not be added up
            return None
        kept = self._reserved(run, is_repeat=is_repeat)
        # What is kept has to begin in time, and so may this one: as long as it takes, the last of what is kept may take longer.
        if kept.seconds and (late := self._spending.out_of_time(kept.seconds)) is not None:
            return late
        if not self._spending.is_limited:
            return None
        expected = self._expected(run, proposal)
        if expected is None and not self._is_anything_under_way:
            return None  # nothing measured tells what it holds: it shows that
        to_come = self._to_come() + kept.gpu_seconds
        return self._spending.passed_by(
            run.guessed_gpu_seconds if expected is None else expected, to_come=to_come
        )

    def _expected(self, run: CellSearch, proposal: Proposal | None) -> float | None:
        """GPU-seconds that its next attempt should hold, by its own trials, else by those of other cells; None: nothing tells."""
        own = run.expected_gpu_seconds(proposal, self._trial_cost())
        return sharing.expected_by_others(run, self._runs) if own is None else own

    def _reserved(self, run: CellSearch, *, is_repeat: bool = False) -> sharing.ReservedBudget:
        """The share of the budgets that this cell leaves to first trials and repeats."""
        confirm, slots = self._spec.search.confirm, self._scheduler.slots.total
        return sharing.reserved_from(
            run,
            self._runs,
            confirm=confirm,
            is_repeat=is_repeat,
            slots=slots,
            at_once=self._most_at_once,
        )

    def _to_come(self) -> float:
        """GPU-seconds that what is under way should still hold: as was foreseen, or where nothing was then, as its cell has shown since, or by a guess."""
        now = self._clock()
        under_way = [(one.run, one.expected_gpu_seconds, now) for one in self._decided]
        under_way += [
            (flight.run, flight.expected_gpu_seconds, flight.since)
            for flight in self.flights.values()
        ]
        return sum(
            max(
                (run.guessed_gpu_seconds if expected is None else expected)
                - (now - since) * run.cell.num_gpus,
                0.0,
            )
            for run, expected, since in under_way
        )

    @property
    def _is_anything_under_way(self) -> bool:
        return bool(self.flights or self._decided)

    def _stop_within_budget(self, run: CellSearch, reason: StopReason) -> None:
        run.stopped = reason
        if reason in SPENT:
            expected = self._expected(run, run.ahead)
            assert expected is not None
            why = self._spending.why(expected, kept=self._reserved(run).gpu_seconds)
        else:
            why = "what is left of search.max_wall_time is kept for first trials and repeats"
        logger.info(
            "%s: no new layout is started: %s", run.cell.key, why, extra={"action": "budget"}
        )
        run.take_back()

    # -- starting ------------------------------------------------------------------------------------------------------------

    def _repeat(self, run: CellSearch, nodes: tuple[str, ...], again: Repeat) -> None:
        """Measure a measured trial once more, beside its other runs."""
        run.confirmation.begin(again.trial_id, again.purpose)
        begins = NewAttempt(
            trial_id=again.trial_id, nodes=nodes, purpose=again.purpose, why=again.why
        )
        measured = run.confirmation.seconds_of(again.trial_id)
        self._decide(
            run,
            again.layout,
            nodes,
            begins,
            predicted=run.predicted_step(again.layout, at_least=measured),
        )

    def _decide(
        self,
        run: CellSearch,
        layout: Layout,
        nodes: tuple[str, ...],
        begins: NewTrial | NewAttempt,
        *,
        predicted: PredictedStep | None,
        proposal: Proposal | None = None,
        alone: bool = False,
    ) -> None:
        """From now on its nodes are taken, and the cell has it under way; it starts with the others that are chosen in this turn."""
        expected = run.expected_gpu_seconds(proposal, self._trial_cost())
        ticket = self._placement.began(run, nodes, self._clock(), alone=alone)
        self._decided.append(
            _Decision(
                run=run,
                layout=layout,
                nodes=nodes,
                ticket=ticket,
                begins=begins,
                predicted=predicted,
                expected_gpu_seconds=expected,
            )
        )
        run.took_off(is_repeat=self._decided[-1].is_repeat)

    def _launch(self) -> None:
        """Start what was chosen."""
        decided, self._decided = self._decided, []
        # Written down before it happens: an attempt that a dead orchestrator may have started is never started under the same number.
        begun = self._store.begin_trials([one.begins for one in decided], epoch=self._epoch)
        for one, (trial_id, attempt) in zip(decided, begun, strict=True):
            if one.is_repeat:
                extra = {"action": "repeated", "trial_id": trial_id, "attempt": attempt}
                logger.info("Trial %d again: %s", trial_id, one.begins.why, extra=extra)
            self._start(one, trial_id, attempt)

    def _start(self, one: _Decision, trial_id: int, attempt: int) -> None:
        run, layout = one.run, one.layout
        self.flights[trial_id] = Flight(
            run=run,
            trial_id=trial_id,
            layout=layout,
            attempt=attempt,
            nodes=one.nodes,
            ticket=one.ticket,
            since=self._clock(),
            expected_gpu_seconds=one.expected_gpu_seconds,
            purpose=one.begins.purpose if isinstance(one.begins, NewAttempt) else Purpose.NEW,
        )
        workload = self._spec.workload
        request = TrialRequest(
            sweep=self._spec.name,
            trial_id=trial_id,
            attempt=attempt,
            workload=workload.name,
            options=options_of(workload, layout),
            model=run.cell.model,
            sequence_length=run.cell.sequence_length,
            layout=layout,
            device=self._scheduler.slots.device,
            measurement=self._plan,
            limits=resolve_limits(
                self._limits, plan=self._plan, num_ranks=layout.world_size, predicted=one.predicted
            ),
            seed=self._spec.search.seed,
            one_rank_per_node=isinstance(workload.options, SyntheticOptions)
            and workload.options.one_rank_per_node,
            peaks=self._outcomes.peaks.of(layout.precision),
            elapsed_seconds=self._clock() - self._began,
            nodes=one.nodes,
        )
        self._scheduler.start(request, run.shape, one.nodes)
