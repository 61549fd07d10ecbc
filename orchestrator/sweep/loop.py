"""The loop: asks for layouts, has them run, and records how each ended. One process decides; SQL remembers.

Whatever is killed, the same call goes on: finished trials are told to the search from the store, and attempts of a dead
orchestrator are given back first. Nothing here knows Ray, a terminal or a file format.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from db.read.rows import SweepRow
from db.store import LEASE_SECONDS, Store
from db.types import StopRequest, SweepState
from orchestrator.cluster.contract import (
    Finished,
    Placed,
    Prober,
    Progressed,
    Scheduler,
    SchedulerEvent,
    Slots,
    shapes_of,
)
from orchestrator.core.errors import ClusterUnavailable, StoreUnavailable, SweepError
from orchestrator.core.machines.packing import Shape
from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout import Layout
from orchestrator.core.search.planner import plan_cell
from orchestrator.core.sweepfile.budget import Price, budget_of, price_of
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import HANG_KINDS, FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.purpose import REASONS
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.search.searcher import Searcher
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.dispatch import Dispatch
from orchestrator.sweep.node_pool import NodePool
from orchestrator.sweep.outcomes import Flight, Outcomes
from orchestrator.sweep.prior_knowledge import PriorKnowledge, learned
from orchestrator.sweep.progress import (
    BUDGETS,
    DECIDED,
    Running,
    SearchEnded,
    Snapshot,
    Stop,
    StopReason,
    SweepResult,
    TimeLeft,
    TrialEnded,
    time_left,
)
from orchestrator.sweep.recovery import Recovery
from orchestrator.sweep.spending import Spending
from orchestrator.sweep.spool import FOLDER, Spool, Spooled

logger = logging.getLogger(__name__)

RENEW_SECONDS = 5.0
POLL_SECONDS = 0.5
STOOD_STILL_SECONDS = (
    120.0  # that the loop stood still: a process that was stopped, a machine that slept
)
SHOW_SECONDS = 0.1  # between two looks of whoever watches


def run_sweep(
    spec: SweepSpec,
    *,
    store: Store,
    open_scheduler: Callable[[], Scheduler],
    code: Fingerprint,
    hardware: Callable[[Slots], Hardware | None],
    clock: Callable[[], float],
    stop: Callable[[], Stop] = lambda: Stop.GO_ON,
    observe: Callable[[Snapshot], None] = lambda _: None,
    takeover: bool = False,
    among: Callable[[Cell], Collection[Layout] | None] = lambda _: None,
    run_root: Callable[[str], Path] | None = None,
) -> SweepResult:
    """Work on a sweep until every cell is done, a budget is spent, or somebody asks to stop. `among`: all that can be run in a cell.

    `run_root` gives the folder of a sweep's run folder on this machine: ends of attempts wait there while the database does not answer
    (None: only in memory). Raises SweepChanged, SweepHeld, ResourcesInsufficient, StoreUnavailable, ClusterUnavailable; whatever was
    acknowledged by then is in the store, and whatever was measured is there or in that folder, for the next call.
    """
    hold = _hold(spec, store, takeover=takeover, run_root=run_root)
    call = _Call(
        spec=spec,
        store=store,
        hold=hold,
        code=code,
        hardware=hardware,
        clock=clock,
        stop=stop,
        observe=observe,
        among=among,
    )
    return _work_on(call, open_scheduler)


@dataclass(frozen=True, kw_only=True)
class _Hold:
    """A sweep that is this call's to work on, and where what the database cannot take waits."""

    sweep_id: int
    epoch: int
    spool: Spool | None
    before: SweepRow  # as it was then


def _hold(
    spec: SweepSpec, store: Store, *, takeover: bool, run_root: Callable[[str], Path] | None
) -> _Hold:
    spec_json = spec.model_dump_json()
    conditions = spec.conditions()
    sweep_id = store.ensure_sweep(spec.name, spec_json, conditions)
    before = store.sweep_named(spec.name)
    spool = Spool(run_root(before.run_folder) / FOLDER) if run_root is not None else None
    try:
        epoch = store.acquire(
            sweep_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            spec_json=spec_json,
            conditions=conditions,
            ttl_seconds=LEASE_SECONDS,
            takeover=takeover,
        )
    except Exception:
        raise
    except BaseException:  # a signal
        store.give_back(before, None)
        raise
    return _Hold(sweep_id=sweep_id, epoch=epoch, spool=spool, before=before)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What one call of `run_sweep` was given, and its hold of the sweep."""

    spec: SweepSpec
    store: Store
    hold: _Hold
    code: Fingerprint
    hardware: Callable[[Slots], Hardware | None]
    clock: Callable[[], float]
    stop: Callable[[], Stop]
    observe: Callable[[Snapshot], None]
    among: Callable[[Cell], Collection[Layout] | None]


def _work_on(call: _Call, open_scheduler: Callable[[], Scheduler]) -> SweepResult:
    """Start the scheduler only now that the lease is ours, and release the lease however the call ends.

    Where it ends with an error before the first launch, the sweep is left as it was before this call.
    """
    result: SweepResult | None = None
    is_reachable = True
    scheduler: Scheduler | None = None
    try:
        scheduler = open_scheduler()
        try:
            result = _Loop(call, scheduler).run()
            return result
        finally:
            scheduler.close()
    except StoreUnavailable:
        is_reachable = False  # nor would it hear of this; the lease ends by itself
        raise
    finally:
        call.store.while_away(time.sleep)
        leased = (
            scheduler.leased() if scheduler is not None else None
        )  # closed by now: all that it ever will have held
        if is_reachable:
            _release(call.store, call.hold, result, leased)


def _release(store: Store, hold: _Hold, result: SweepResult | None, leased: Leased | None) -> None:
    """`result` is None where the call ended with an error."""
    try:
        if result is None:
            store.give_back(hold.before, hold.epoch, leased=leased)
            return
        state = SweepState.FINISHED if result.finished else SweepState.STOPPED
        store.release(
            hold.sweep_id,
            hold.epoch,
            state,
            leased=leased,
            stop_reasons=sorted(set(result.stopped.values())),
        )
    except SweepError as exc:
        logger.warning(
            "The lease was not given back and ends by itself within %.0f s: %s", LEASE_SECONDS, exc
        )


class _Loop:
    def __init__(self, call: _Call, scheduler: Scheduler) -> None:
        self._spec, self._sweep_id, self._epoch = call.spec, call.hold.sweep_id, call.hold.epoch
        self._store, self._scheduler, self._clock = call.store, scheduler, call.clock
        self._stop, self._observe, self._among, self._spool = (
            call.stop,
            call.observe,
            call.among,
            call.hold.spool,
        )
        self._began, self._renewed = call.clock(), time.monotonic()
        # The date of the beginning; later than all stored dates, also those of a simulated clock.
        self._epoch_seconds = time.time()
        self._seen_at = time.time()
        self._requested = Stop.GO_ON
        self._inbox: deque[tuple[SchedulerEvent, Flight]] = (
            deque()
        )  # said by the scheduler, and not written down yet
        self._take_up_what_was_left(call.code)
        self._node_pool = self._look_after_nodes()
        self._data_sheet = call.hardware(scheduler.slots)
        self._gpus_per_node = (
            self._spec.gpus_per_node
            if isinstance(self._spec.gpus_per_node, int)
            else scheduler.slots.per_node
        )
        self._outcomes = Outcomes(
            self._spec,
            self._sweep_id,
            self._epoch,
            store=self._store,
            slots=scheduler.slots,
            code=call.code,
        )
        self._spending = self._begin_session(price_of(self._spec, self._data_sheet))
        self._prior_knowledge, self._learned_of = self._learn(), 0  # trials of this call by then
        self._dispatch = Dispatch(
            self._spec,
            self._epoch,
            store=self._store,
            scheduler=scheduler,
            outcomes=self._outcomes,
            node_pool=self._node_pool,
            clock=self._clock,
            spending=self._spending,
            trial_cost=lambda: self._prior_knowledge.trial_cost(),
            learn=self._learn_from_others,
            began=self._began,
        )
        self._runs: list[CellSearch] = []
        self._finished_now = 0
        self._progressed: dict[int, Flight] = {}  # since the lease was renewed
        self._shown = 0.0  # monotonic
        self._ended: list[TrialEnded] = []  # for the next snapshot
        self._searched: list[SearchEnded] = []  # as well
        self._told_as_searched: set[int] = set()  # cells
        self._cancelling = False

    def run(self) -> SweepResult:
        shapes = shapes_of(
            self._spec.cells(), self._scheduler.slots, gpus_per_node=self._gpus_per_node
        )
        self._node_pool.usable(self._scheduler.slots.nodes)  # they answer while cells are opened
        self._runs = [self._open_cell(cell, shape) for cell, shape in shapes.items()]
        self._epoch_seconds = max(
            [time.time(), *(run.confirmation.newest or 0.0 for run in self._runs)]
        )
        self._store.while_away(self._wait)
        try:
            self._await_nodes(shapes.values())
            self._work()
        except BaseException:
            self._keep_ends()
            self._abandon()
            raise
        return self._result()

    def _abandon(self) -> None:
        """The store or the cluster is gone: what runs is given back by the next call."""
        try:
            for trial_id in list(self._flights):
                self._scheduler.cancel(trial_id)
        except ClusterUnavailable as exc:  # what is known already says more
            logger.debug("Nothing can be cancelled: %s", exc)

    # -- opening -------------------------------------------------------------------------------------------------------------

    def _take_up_what_was_left(self, code: Fingerprint) -> None:
        """What earlier calls could not write down, and then what they left under way."""
        if self._spool is not None:
            recovery = Recovery(
                store=self._store,
                sweep_id=self._sweep_id,
                epoch=self._epoch,
                plan=self._spec.measurement.plan,
                code=code,
                device_name=self._scheduler.slots.device_name,
            )
            if (found := recovery.take_up(self._spool)) > 0:
                ended = "trial" if found == 1 else "trials"
                logger.warning(
                    "Written down: %d %s of an earlier call that ended while the database was away",
                    found,
                    ended,
                    extra={"action": "salvaged"},
                )
        if lost := self._store.reap(self._sweep_id, self._epoch):
            wait = (
                "trial of a dead orchestrator waits"
                if len(lost) == 1
                else "trials of a dead orchestrator wait"
            )
            logger.warning("%d %s again", len(lost), wait, extra={"action": "reaped"})

    def _look_after_nodes(self) -> NodePool:
        scheduler = self._scheduler
        prober = (
            scheduler
            if self._spec.measurement.preflight and isinstance(scheduler, Prober)
            else None
        )
        pool = NodePool(
            self._sweep_id, self._epoch, store=self._store, prober=prober, clock=self._clock
        )
        pool.refresh(now=True)
        return pool

    def _begin_session(self, price: Price | None) -> Spending:
        """Note that this call works, and what it may spend beside what was held before it."""
        spending = Spending(
            budget_of(self._spec, price),
            max_wall_seconds=self._spec.search.max_wall_time,
            earlier_gpu_seconds=self._store.held(
                self._sweep_id
            ).total.held,  # what was reaped included
            leased=self._scheduler.leased,
            clock=self._clock,
        )
        self._store.begin_session(
            self._sweep_id,
            self._epoch,
            num_gpus=self._scheduler.slots.total,
            price_per_gpu_hour=price.per_gpu_hour if price is not None else None,
            leased=self._scheduler.leased(),
        )
        return spending

    def _learn(self, begin: Mapping[str, Calibration] | None = None) -> PriorKnowledge:
        slots = self._scheduler.slots
        return learned(
            self._store,
            self._spec,
            self._data_sheet,
            device_name=slots.device_name,
            gpus_per_node=self._gpus_per_node,
            nodes=slots.nodes,
            begin=begin,
        )

    def _search(self, cell: Cell, cell_id: int) -> tuple[Searcher, int, float]:
        """A search over a cell that starts from what its relatives taught, how many layouts it has, and how long a trial is predicted to take."""
        calibration = self._prior_knowledge.calibration(cell, with_own=False)
        candidates = plan_cell(
            self._spec,
            cell,
            hardware=self._prior_knowledge.hardware,
            gpus_per_node=self._gpus_per_node,
            calibration=calibration,
            among=self._among(cell),
        ).candidates
        search, objective = self._spec.search, self._spec.objective
        cost = self._prior_knowledge.trial_cost()
        searcher = Searcher(
            candidates,
            search=search,
            objective=objective,
            num_layers=cell.model.num_layers,
            sequence=cell_id,
            launch_seconds=cost.launch_seconds,
            steps_per_trial=cost.num_steps,
            dominance=self._spec.dominance,
        )
        steps = (
            candidates.step_seconds[candidates.order[:1]].sum()
            if candidates.predict is not None
            else 0.0
        )
        return searcher, len(candidates), cost.launch_seconds + cost.num_steps * float(steps)

    def _open_cell(self, cell: Cell, shape: Shape) -> CellSearch:
        cell_id = self._store.ensure_cell(self._sweep_id, cell, epoch=self._epoch)
        searcher, num_candidates, predicted_seconds = self._search(cell, cell_id)
        run = CellSearch(
            id=cell_id,
            cell=cell,
            shape=shape,
            objective=self._spec.objective,
            searcher=searcher,
            num_candidates=num_candidates,
            predicted_seconds=predicted_seconds,
        )
        self._outcomes.take_up(run)
        run.needs_own_nodes = bool(self._store.trials_that_met(cell_id, FailureKind.OOM_HOST))
        run.suspects = self._store.trials_that_met(cell_id, FailureKind.NODE_LOST)
        hung = [trial.id for trial in run.waiting if trial.failure_kind in HANG_KINDS]
        run.hung_on = {
            trial_id: frozenset(self._store.trial(trial_id).attempts[-1].nodes or ())
            for trial_id in hung
        }
        self._keep_lease()  # a space of many cells takes a while to list
        return run

    def _await_nodes(self, shapes: Collection[Shape]) -> None:
        """Wait until nodes have said how they are, unless somebody asks to stop."""
        while self._asked() is Stop.GO_ON and not self._node_pool.may_begin(
            shapes, self._scheduler.slots.nodes
        ):
            self._poll(POLL_SECONDS)
            self._show()
            self._keep_lease()

    # -- working -------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._note_pauses()
            asked = self._asked()
            if asked is Stop.CANCEL and not self._cancelling:
                self._cancelling = True
                for trial_id in self._flights:
                    self._scheduler.cancel(trial_id)
            if asked is Stop.GO_ON:
                self._dispatch.what_fits(self._runs)
                self._dispatch.think_ahead(self._runs)
                self._note_searched()
            if not self._flights and not (
                asked is Stop.GO_ON and self._dispatch.waits_for_nodes(self._runs)
            ):
                break
            self._poll(POLL_SECONDS)
            self._hear()
            self._show()
            self._stop_stuck_cells()
            self._keep_lease()
            self._measure_again(self._node_pool.refresh(self._flights))
        self._show(at_once=True)

    def _stop_stuck_cells(self) -> None:
        """Stop the cells that fail again and again while others run. Raises UsageInvalid or ClusterUnavailable where it is not their fault."""
        stop_rules = self._outcomes.stop_rules
        if not stop_rules.may_stop:
            return
        open_runs = {run.id: run for run in self._runs if self._dispatch.is_open(run)}
        for cell_id in stop_rules.stuck_cells(open_runs):
            run = open_runs[cell_id]
            run.stopped = StopReason.FAULTS
            run.take_back()
            why = f"{run.cell.key}: stopped: {stop_rules.told_stuck(cell_id)}. The same command tries it again"
            logger.warning("%s", why, extra={"action": "stuck", "cell_id": cell_id})
            stop_rules.forget(cell_id)

    def _poll(self, seconds: float) -> None:
        self._inbox.extend(
            (event, self._flights[event.trial_id]) for event in self._scheduler.poll(seconds)
        )

    def _hear(self) -> None:
        """Write down what was said since: however much ended, in one commit."""
        heard = list(self._inbox)
        over: list[tuple[Flight, Finished]] = []
        for event, flight in heard:
            match event:
                case Placed():
                    pass  # where, was known before
                case Progressed():
                    flight.phase, flight.step = event.phase, event.step
                    self._progressed[event.trial_id] = flight
                case Finished():
                    self._dispatch.ended(flight)
                    over.append((flight, event))
                    self._progressed.pop(
                        event.trial_id, None
                    )  # how far it came is written down with its end
        self._finished_now += len(over)
        to_come, launched = len(over), self._num_launched
        ended = self._outcomes.ended(over, now=self._clock(), at=self._date())
        for (flight, end), (words, counts) in zip(over, ended, strict=True):
            to_come -= 1
            self._say(
                flight,
                words,
                counts,
                num_launched=launched,
                num_running=len(self._flights) + to_come,
            )
            if self._spool is not None:
                self._spool.drop(Spooled(attempt=flight.attempt, end=end))
        for _ in heard:  # what came while the database was away stands behind it
            self._inbox.popleft()
        for flight, event in over:
            self._measure_again(
                self._node_pool.ended(flight.trial_id, event, self._flights, began=flight.since)
            )

    def _date(self) -> dt.datetime:
        """Now, by the clock that the sweep goes by: simulated time has dates of its own."""
        return dt.datetime.fromtimestamp(
            self._epoch_seconds + self._clock() - self._began, tz=dt.UTC
        )

    def _note_pauses(self) -> None:
        """A loop that stood still was stopped, or the machine slept: it may be another since."""
        now, before = time.time(), self._seen_at
        self._seen_at = now
        if now - before > STOOD_STILL_SECONDS:
            logger.warning(
                "The orchestrator stood still for %.0f s: the machine may have changed meanwhile",
                now - before,
            )
            for run in self._runs:
                run.confirmation.pause()

    def _measure_again(self, cells: Collection[int]) -> None:
        """Trials of these cells wait again, since a node that they were measured on is sick: their searches begin anew with what still counts."""
        if cells:
            self._outcomes.recount(self._store.trials(self._sweep_id))
        for run in (run for run in self._runs if run.id in cells):
            run.searcher, _, run.predicted_seconds = self._search(run.cell, run.id)
            self._outcomes.take_up_again(run)
            run.stopped = None

    def _wait(self, seconds: float) -> None:
        """The database does not answer: what runs goes on, and what ends is kept where no kill reaches it. Nothing new is started meanwhile."""
        until = time.monotonic() + seconds
        self._keep_ends()
        self._poll(seconds)
        self._keep_ends()
        if self._stop() is Stop.CANCEL:
            raise StoreUnavailable(
                "stopped while the database did not answer. What was measured waits here for the same command"
            )
        time.sleep(max(0.0, until - time.monotonic()))

    def _keep_ends(self) -> None:
        """Spool what the store has not been told, or not all of it."""
        for event, flight in self._inbox:
            if isinstance(event, Finished) and self._spool is not None:
                try:
                    self._spool.keep(Spooled(attempt=flight.attempt, end=event))
                except OSError as exc:
                    logger.warning(
                        "Trial %d has ended, and cannot be written down here either: %s",
                        flight.trial_id,
                        exc,
                    )

    def _keep_lease(self) -> None:
        # Leases end by the database's clock, whatever clock the sweep goes by.
        if time.monotonic() - self._renewed <= RENEW_SECONDS:
            return
        self._outcomes.progressed(
            self._progressed.values()
        )  # not at once: nobody acts on it, and it would be a commit for each trial
        self._progressed.clear()
        request = self._store.renew(
            self._sweep_id, self._epoch, LEASE_SECONDS, leased=self._scheduler.leased()
        )
        self._renewed = time.monotonic()
        if request is not None:  # `sweep cancel`, from another terminal
            self._requested = max(
                self._requested, Stop.CANCEL if request is StopRequest.CANCEL else Stop.DRAIN
            )

    @property
    def _flights(self) -> dict[int, Flight]:
        return self._dispatch.flights

    def _asked(self) -> Stop:
        self._requested = max(self._stop(), self._requested)
        return self._requested

    def _learn_from_others(self, run: CellSearch) -> None:
        """Begin the search of a cell anew, of which nothing was launched, where other cells have taught something since it was opened."""
        if self._finished_now <= self._learned_of:
            return
        self._prior_knowledge, self._learned_of = (
            self._learn(self._prior_knowledge.fits),
            self._finished_now,
        )
        run.searcher, _, run.predicted_seconds = self._search(run.cell, run.id)
        self._outcomes.take_up_again(run)

    # -- ending --------------------------------------------------------------------------------------------------------------

    def _result(self) -> SweepResult:
        interrupted = self._asked() is not Stop.GO_ON
        nothing = [run.cell for run in self._runs if run.has_nothing and not interrupted]
        unconfirmed = [
            run.cell
            for run in self._runs
            if run.stopped in BUDGETS
            and run.confirmation.repeat_of_best(self._spec.search.confirm) is not None
        ]
        return SweepResult(
            sweep_id=self._sweep_id,
            counts=dict(self._outcomes.counts),
            stopped={run.cell: run.stopped or StopReason.INTERRUPTED for run in self._runs},
            interrupted=interrupted,
            nothing_feasible=nothing,
            nothing_fits={
                run.cell: run.nothing_fits for run in self._runs if run.nothing_fits is not None
            },
            tied={run.cell: run.confirmation.tied() for run in self._runs if run.best is not None},
            untried=self._untried,
            num_fingerprints=len(self._outcomes.fingerprints),
            launched={run.cell: run.launched for run in self._runs},
            unconfirmed=unconfirmed,
        )

    # -- small things --------------------------------------------------------------------------------------------------------

    def _say(
        self,
        flight: Flight,
        what: str,
        counts: Mapping[TrialState, int],
        *,
        num_launched: int,
        num_running: int,
    ) -> None:
        num = flight.run.cell.num_gpus
        again = f" again {REASONS[flight.purpose]}" if flight.is_repeat else ""
        line = f"trial {flight.trial_id}{again}, {num} {'GPU' if num == 1 else 'GPUs'}, {flight.layout.short}: {what}"
        logger.info(
            "%s",
            line,
            extra={"action": "finished", "trial_id": flight.trial_id, "attempt": flight.attempt},
        )
        seconds = self._clock() - self._began
        self._ended.append(
            TrialEnded(
                text=line,
                seconds=seconds,
                counts=counts,
                num_launched=num_launched,
                num_running=num_running,
            )
        )

    def _note_searched(self) -> None:
        for run in self._runs:
            if run.stopped is None:
                self._told_as_searched.discard(run.id)  # it may have begun anew
            elif run.id not in self._told_as_searched:
                self._told_as_searched.add(run.id)
                seconds = self._clock() - self._began
                self._searched.append(
                    SearchEnded(
                        cell=run.cell,
                        reason=run.stopped,
                        untried=self._untried_of(run),
                        seconds=seconds,
                    )
                )

    @property
    def _untried(self) -> int:
        return sum(self._untried_of(run) for run in self._runs)

    def _untried_of(self, run: CellSearch) -> int:
        return run.searcher.untried + (run.ahead is not None)

    @property
    def _num_launched(self) -> int:
        return sum(run.launched for run in self._runs)

    def _most_trials(self, run: CellSearch) -> int:
        """The most trials that a cell will have, those that were launched included."""
        if run.stopped is not None:
            return run.launched
        waiting = sum(trial.num_attempts == 0 for trial in run.waiting)
        possible = run.launched + waiting + self._untried_of(run)
        return min(possible, self._spec.search.max_trials or possible)

    def _time_left(self, most_trials: Mapping[int, int]) -> TimeLeft | None:
        """`most_trials`: of each cell."""
        search, confirm = self._spec.search, self._spec.search.confirm
        new_of = {
            run.id: most_trials[run.id] - run.launched + len(run.waiting) for run in self._runs
        }
        new, most = (
            sum(new_of.values()),
            confirm.contenders * confirm.repeats,
        )  # of a machine that does not drift
        searching = [run for run in self._runs if run.stopped is None]
        anchors = (
            sum(new_of[run.id] // search.anchor_every + 1 for run in searching)
            if search.anchor_every and confirm.repeats
            else 0
        )
        # Counted only where a search has ended: the runs of thousands of trials are not gone through for every snapshot.
        confirming = [run for run in self._runs if run.stopped in DECIDED and not run.is_settled]
        repeats = (
            anchors
            + most * len(searching)
            + sum(run.confirmation.most_to_confirm(confirm) for run in confirming)
        )
        return time_left(
            seconds=self._clock() - self._began,
            num_ended=self._finished_now,
            num_running=len(self._flights),
            most_to_come=new + repeats if self._requested is Stop.GO_ON else 0,
            may_end_early=bool(repeats) or search.plateau is not None or search.bound is not None,
            wall_seconds_left=self._spending.wall_seconds_left,
            gpu_seconds_left=self._spending.gpu_seconds_left,
            gpu_seconds=self._spending.held_gpu_seconds - self._spending.earlier_gpu_seconds,
        )

    def _show(self, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - self._shown < SHOW_SECONDS:
            return
        self._shown = time.monotonic()
        ended, self._ended = self._ended, []
        searched, self._searched = self._searched, []
        most_trials = {run.id: self._most_trials(run) for run in self._runs}
        self._observe(
            Snapshot(
                sweep=self._spec.name,
                counts=dict(self._outcomes.counts),
                untried=self._untried,
                num_launched=self._num_launched,
                at_most=sum(most_trials.values()),
                launched_now=self._finished_now,
                running=[
                    Running(
                        trial_id=f.trial_id,
                        cell=f.run.cell,
                        layout=f.layout,
                        phase=f.phase,
                        step=f.step,
                        since=f.since,
                    )
                    for f in self._flights.values()
                ],
                best={run.cell: run.best for run in self._runs if run.best is not None},
                gpu_seconds=self._spending.held_gpu_seconds,
                seconds=self._clock() - self._began,
                left=self._time_left(most_trials),
                ended=ended,
                searched=searched,
            )
        )
