"""The loop: asks for layouts, has them run, and writes down what became of each. One process decides; SQL remembers.

Whatever is killed, the same call goes on: finished trials are told to the search from the store, and attempts of a dead
orchestrator are given back first. Nothing here knows Ray, a terminal or a file format.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection, Sequence

from db.rows import TrialRow
from db.schema import StopRequest, SweepState
from db.store import Store
from orchestrator.books import Books, Flight
from orchestrator.cell_run import CellRun
from orchestrator.core.cell import Cell
from orchestrator.core.errors import SweepError
from orchestrator.core.failures import FailureKind
from orchestrator.core.fingerprint import Fingerprint
from orchestrator.core.hardware import Hardware
from orchestrator.core.layout import Layout
from orchestrator.core.planner import plan_cell
from orchestrator.core.protocol import Device, TrialRequest
from orchestrator.core.spec import SweepSpec
from orchestrator.core.workload_options import options_of
from orchestrator.gang import Finished, Placed, Progressed, Scheduler, Shape, Slots, shapes_of
from orchestrator.learned import Learned, learned
from orchestrator.progress import Running, Snapshot, Stop, StopReason, SweepResult
from orchestrator.searcher import Searcher

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
RENEW_SECONDS = 5.0
POLL_SECONDS = 0.5
DECIDED = frozenset(
    {StopReason.EXHAUSTED, StopReason.TRIALS, StopReason.PLATEAU, StopReason.BOUND}
)  # a search that has ended by itself: what it found is confirmed
CELL_TURN = 8  # trials a cell gets in a row: changing the gang's shape costs up to a second


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
) -> SweepResult:
    """Work on a sweep until every cell is done, a budget is spent, or somebody asks to stop. `among`: all that can be run in a cell.

    Raises SweepChanged, SweepHeld, ResourcesInsufficient, StoreUnavailable, ClusterUnavailable; whatever was acknowledged by then
    is in the store.
    """
    spec_json = spec.model_dump_json()
    sweep_id = store.ensure_sweep(spec.name, spec_json, spec.conditions())
    epoch = store.acquire(
        sweep_id, host=socket.gethostname(), pid=os.getpid(), spec_json=spec_json, ttl_seconds=LEASE_SECONDS, takeover=takeover
    )
    state = SweepState.STOPPED
    try:
        scheduler = open_scheduler()  # only now: who does not hold the sweep starts nothing
        try:
            loop = _Loop(
                spec,
                sweep_id,
                epoch,
                store=store,
                scheduler=scheduler,
                code=code,
                hardware=hardware,
                clock=clock,
                stop=stop,
                observe=observe,
                among=among,
            )
            result = loop.run()
            state = SweepState.FINISHED if result.finished else SweepState.STOPPED
            return result
        finally:
            scheduler.close()
    finally:
        _release(store, sweep_id, epoch, state)


def _release(store: Store, sweep_id: int, epoch: int, state: SweepState) -> None:
    try:
        store.release(sweep_id, epoch, state)
    except SweepError as exc:
        logger.warning("The lease was not given back and ends by itself within %.0f s: %s", LEASE_SECONDS, exc)


class _Loop:
    def __init__(
        self,
        spec: SweepSpec,
        sweep_id: int,
        epoch: int,
        *,
        store: Store,
        scheduler: Scheduler,
        code: Fingerprint,
        hardware: Callable[[Slots], Hardware | None],
        clock: Callable[[], float],
        stop: Callable[[], Stop],
        observe: Callable[[Snapshot], None],
        among: Callable[[Cell], Collection[Layout] | None],
    ) -> None:
        self._spec, self._sweep_id, self._epoch = spec, sweep_id, epoch
        self._store, self._scheduler, self._clock = store, scheduler, clock
        self._stop, self._observe, self._among = stop, observe, among
        slots = scheduler.slots
        lost = store.reap(sweep_id, epoch)
        if lost:
            logger.warning("%d trials of a dead orchestrator wait again", len(lost), extra={"action": "reaped"})
        self._books = Books(spec, sweep_id, epoch, store=store, slots=slots, code=code)
        self._gpus_per_node = spec.gpus_per_node if isinstance(spec.gpus_per_node, int) else slots.per_node
        self._data_sheet = hardware(slots)
        self._learned, self._learned_of = self._learn(), 0  # trials of this call by then
        parallel = spec.search.max_parallel_trials
        # On a machine without GPUs trials share caches and memory bandwidth: one at a time keeps their timing apart.
        self._parallel = parallel if isinstance(parallel, int) else 1 if slots.device is Device.CPU else slots.total
        self._runs: list[CellRun] = []
        self._flights: dict[int, Flight] = {}
        self._finished_now = 0
        self._began = self._renewed = clock()
        self._last = ""
        self._cancelling = False
        self._requested = Stop.GO_ON

    def run(self) -> SweepResult:
        shapes = shapes_of(self._spec.cells(), self._scheduler.slots, gpus_per_node=self._gpus_per_node)
        self._runs = [self._open_cell(cell, shape) for cell, shape in shapes.items()]
        try:
            self._work()
        except BaseException:
            for trial_id in self._flights:  # the store or the cluster is gone: its trials are given back by the next call
                self._scheduler.cancel(trial_id)
            raise
        return self._result()

    # -- opening -------------------------------------------------------------------------------------------------------------

    def _learn(self) -> Learned:
        device_name = self._scheduler.slots.device_name
        return learned(self._store, self._spec, self._data_sheet, device_name=device_name, gpus_per_node=self._gpus_per_node)

    def _search(self, cell: Cell, cell_id: int) -> tuple[Searcher, int]:
        """A search over a cell that starts from what its relatives taught, and how many layouts it has."""
        calibration = self._learned.calibration(cell, with_own=False)
        candidates = plan_cell(
            self._spec,
            cell,
            hardware=self._learned.hardware,
            gpus_per_node=self._gpus_per_node,
            calibration=calibration,
            among=self._among(cell),
        ).candidates
        search, objective = self._spec.search, self._spec.objective
        cost = self._learned.trial_cost()
        searcher = Searcher(
            candidates,
            search=search,
            objective=objective,
            num_layers=cell.model.num_layers,
            sequence=cell_id,
            launch_seconds=cost.launch_seconds,
            steps_per_trial=cost.num_steps,
        )
        return searcher, len(candidates)

    def _open_cell(self, cell: Cell, shape: Shape) -> CellRun:
        cell_id = self._store.ensure_cell(self._sweep_id, cell, epoch=self._epoch)
        searcher, num_candidates = self._search(cell, cell_id)
        run = CellRun(id=cell_id, cell=cell, shape=shape, objective=self._spec.objective, searcher=searcher, num_candidates=num_candidates)
        trials = self._store.trials(self._sweep_id, cell_id=cell_id)
        self._books.take_up(trials)
        for layout, (proof, proof_id) in run.take_up(trials, self._store.repeats(cell_id)).items():
            self._books.prune(run, [layout], proof_id, proof)
        run.nothing_fits = searcher.nothing_fits()
        run.alone = self._store.trials_that_met(cell_id, FailureKind.OOM_HOST)
        self._keep_lease()  # a space of many cells takes a while to list
        return run

    # -- working -------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            asked = self._asked()
            if asked is Stop.CANCEL and not self._cancelling:
                self._cancelling = True
                for trial_id in self._flights:
                    self._scheduler.cancel(trial_id)
            if asked is Stop.GO_ON:
                while self._launch_one():
                    pass
                self._think_ahead()
            if not self._flights:
                break
            self._show()
            for event in self._scheduler.poll(POLL_SECONDS):
                match event:
                    case Placed():
                        self._books.placed(self._flights[event.trial_id], event.nodes)
                    case Progressed():
                        flight = self._flights[event.trial_id]
                        flight.phase, flight.step = event.phase, event.step
                        self._books.progressed(flight)
                    case Finished():
                        flight = self._flights.pop(event.trial_id)
                        flight.run.trial_seconds = self._clock() - flight.since
                        self._finished_now += 1
                        self._say(flight, self._books.ended(flight, event))
            self._books.blame.raise_if_it_is_not_the_layouts()
            self._keep_lease()
        self._show()

    def _keep_lease(self) -> None:
        if self._clock() - self._renewed <= RENEW_SECONDS:
            return
        request = self._store.renew(self._sweep_id, self._epoch, LEASE_SECONDS)
        self._renewed = self._clock()
        if request is not None:  # `sweep cancel`, from another terminal
            self._requested = Stop.CANCEL if request is StopRequest.CANCEL else Stop.DRAIN

    def _asked(self) -> Stop:
        return max(self._stop(), self._requested)

    def _launch_one(self) -> bool:
        """Start the next trial, if one may start. The cell with the fewest turns goes first."""
        if len(self._flights) >= self._parallel or any(flight.alone for flight in self._flights.values()):
            return False
        for run in sorted(self._runs, key=lambda r: r.launched // CELL_TURN):
            if run.stopped is None:
                run.stopped = self._budget_spent() or run.had_enough(self._spec.search)
            if not self._scheduler.can_start(run.shape):
                continue
            if run.stopped is None and (reason := self._search_on(run)) is not None:
                if self._is_busy(run):
                    continue  # what runs may change that
                run.stopped = reason
            elif run.stopped is None:
                return True
            if run.stopped in DECIDED and (self._launch_waiting(run) or self._confirm(run)):
                return True
        return False

    def _search_on(self, run: CellRun) -> StopReason | None:
        """Start what the search of a cell wants next, or say why there is nothing."""
        if not run.launched and self._finished_now > self._learned_of:
            self._learn_from_others(run)
        if run.reached(self._spec.search.bound) and not run.waiting:
            return StopReason.BOUND
        return None if self._launch_next(run) else StopReason.EXHAUSTED

    def _learn_from_others(self, run: CellRun) -> None:
        """Begin the search of a cell anew, of which nothing was launched: other cells have taught something since it was opened."""
        self._learned, self._learned_of = self._learn(), self._finished_now
        run.searcher, _ = self._search(run.cell, run.id)
        run.take_up(self._store.trials(self._sweep_id, cell_id=run.id), self._store.repeats(run.id))

    def _is_busy(self, run: CellRun) -> bool:
        """Whether something new of the cell is under way."""
        return any(flight.run is run and not flight.is_repeat for flight in self._flights.values())

    def _confirm(self, run: CellRun) -> bool:
        """The search of a cell has ended: repeat what stands at its top, until one layout is the winner or the repeats are spent."""
        found = None if self._is_busy(run) or run.waiting else run.contest.next_repeat(self._spec.search.confirm)
        if found is None:
            return False
        spent = self._budget_spent()
        if spent is not None:
            run.stopped = spent  # the next call may go on with it
            return False
        return self._repeat(run, *found)

    def _budget_spent(self) -> StopReason | None:
        search = self._spec.search
        if search.max_gpu_hours is not None and self._held_gpu_seconds() >= search.max_gpu_hours * 3600:
            return StopReason.GPU_HOURS
        if search.max_wall_time is not None and self._clock() - self._began >= search.max_wall_time:
            return StopReason.WALL_TIME
        return None

    def _within_trials(self, run: CellRun) -> bool:
        most = self._spec.search.max_trials
        return most is None or run.launched < most

    def _held_gpu_seconds(self) -> float:
        """What is spent, with what runs now: a budget counts what is held, not what succeeded."""
        now = self._clock()
        return self._books.gpu_seconds + sum((now - f.since) * f.run.cell.num_gpus for f in self._flights.values())

    def _launch_next(self, run: CellRun) -> bool:
        # What failed by the machine's fault lets others go first, until one of them shows that the machine is well.
        trial = run.next_waiting(beside_others=bool(self._flights)) if not self._books.blame.suspects_the_machine else None
        if trial is None and (doubted := run.doubted()) is not None and self._repeat(run, *doubted):
            return True
        proposal = run.ask(self._clock) if trial is None and self._within_trials(run) else None
        nodes = self._scheduler.standing(run.shape)
        # Written down before it happens: an attempt that a dead orchestrator may have started is never started under the same number.
        if proposal is not None:
            trial_id, attempt = self._store.begin_trial(
                run.id,
                proposal.layout,
                epoch=self._epoch,
                why=proposal.why,
                predicted_tokens_per_second_per_gpu=proposal.predicted_tokens_per_second_per_gpu,
                predicted_memory_bytes=proposal.predicted_memory_bytes,
                nodes=nodes,
            )
            run.launched += 1
            self._books.launched(is_new=proposal.layout not in run.added)
            self._launch(run, trial_id, proposal.layout, attempt, nodes)
            return True
        return self._launch_waiting(run, trial)

    def _launch_waiting(self, run: CellRun, trial: TrialRow | None = None) -> bool:
        trial = trial or run.next_waiting(beside_others=bool(self._flights))
        if trial is None:
            return False
        nodes = self._scheduler.standing(run.shape)
        run.launched += trial.num_attempts == 0
        self._books.launched(is_new=False)
        self._launch(run, trial.id, trial.layout, self._store.start_attempt(trial.id, self._epoch, nodes), nodes)
        return True

    def _think_ahead(self) -> None:
        for run in self._runs:
            if run.stopped is None and self._flights and not run.waiting and self._within_trials(run):
                run.ask_ahead(self._clock)

    def _repeat(self, run: CellRun, trial_id: int, layout: Layout, why: str) -> bool:
        """Measure a measured trial once more, beside its other runs; not while others run, where it took their memory before."""
        if trial_id in run.alone and self._flights:
            return False
        nodes = self._scheduler.standing(run.shape)
        attempt = self._store.start_repeat(trial_id, self._epoch, nodes, why=why)
        run.contest.begin(trial_id)
        logger.info("Trial %d again: %s", trial_id, why, extra={"action": "repeated", "trial_id": trial_id, "attempt": attempt})
        self._launch(run, trial_id, layout, attempt, nodes, is_repeat=True)
        return True

    def _launch(
        self, run: CellRun, trial_id: int, layout: Layout, attempt: int, nodes: Sequence[str] | None, *, is_repeat: bool = False
    ) -> None:
        self._flights[trial_id] = Flight(
            run=run,
            trial_id=trial_id,
            layout=layout,
            attempt=attempt,
            since=self._clock(),
            nodes=nodes,
            alone=trial_id in run.alone,
            is_repeat=is_repeat,
        )
        self._scheduler.start(
            TrialRequest(
                sweep=self._spec.name,
                trial_id=trial_id,
                attempt=attempt,
                workload=self._spec.workload.name,
                options=options_of(self._spec.workload, layout),
                model=run.cell.model,
                sequence_length=run.cell.sequence_length,
                layout=layout,
                device=self._scheduler.slots.device,
                measurement=self._spec.measurement.plan,
                limits=self._spec.measurement.limits.plan,
                seed=self._spec.search.seed,
                peaks=self._books.peaks.of(layout.precision),
            ),
            run.shape,
        )

    # -- ending --------------------------------------------------------------------------------------------------------------

    def _result(self) -> SweepResult:
        interrupted = self._asked() is not Stop.GO_ON
        nothing = [run.cell for run in self._runs if run.best is None and (run.ended or not run.num_candidates) and not interrupted]
        return SweepResult(
            sweep_id=self._sweep_id,
            counts=dict(self._books.counts),
            stopped={run.cell: run.stopped or StopReason.INTERRUPTED for run in self._runs},
            interrupted=interrupted,
            nothing_feasible=nothing,
            nothing_fits={run.cell: run.nothing_fits for run in self._runs if run.nothing_fits is not None},
            tied={run.cell: run.contest.tied() for run in self._runs if run.best is not None},
            num_fingerprints=len(self._books.fingerprints),
        )

    # -- small things --------------------------------------------------------------------------------------------------------

    def _say(self, flight: Flight, what: str) -> None:
        self._last = f"trial {flight.trial_id} {flight.run.cell.num_gpus} GPU {flight.layout.short}: {what}"
        logger.info("%s", self._last, extra={"action": "finished", "trial_id": flight.trial_id, "attempt": flight.attempt})
        self._show()

    def _show(self) -> None:
        self._observe(
            Snapshot(
                sweep=self._spec.name,
                counts=dict(self._books.counts),
                untried=sum(run.searcher.untried for run in self._runs if run.stopped is None),
                launched_now=self._finished_now,
                running=[
                    Running(trial_id=f.trial_id, cell=f.run.cell, layout=f.layout, phase=f.phase, step=f.step, since=f.since)
                    for f in self._flights.values()
                ],
                best={run.cell: run.best for run in self._runs if run.best is not None},
                gpu_seconds=self._held_gpu_seconds(),
                seconds=self._clock() - self._began,
                last=self._last,
            )
        )
