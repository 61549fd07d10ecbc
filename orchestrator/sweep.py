"""The loop: asks for layouts, has them run, and writes down what became of each. One process decides; SQL remembers.

Whatever is killed, the same call goes on: finished trials are told to the search from the store, and attempts of a dead
orchestrator are given back first. Nothing here knows Ray, a terminal or a file format.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from db.schema import StopRequest, SweepState
from db.store import Store
from orchestrator.blame import Blame
from orchestrator.cell_run import CellRun
from orchestrator.core.cell import Cell
from orchestrator.core.errors import SweepError
from orchestrator.core.failures import OUT_OF_MEMORY_KINDS, POLICIES, Failure, FailureKind, Fault, may_retry, proves_out_of_memory
from orchestrator.core.fingerprint import Fingerprint, Stack
from orchestrator.core.hardware import Hardware
from orchestrator.core.layout import Layout
from orchestrator.core.lifecycle import TrialEvent, TrialState
from orchestrator.core.measurement import ImplausibleMeasurement, Measurement
from orchestrator.core.planner import plan_cell
from orchestrator.core.protocol import Device, Phase, RankResult, TrialRequest
from orchestrator.core.spec import SweepSpec
from orchestrator.core.winner import Run
from orchestrator.core.workload_options import options_of
from orchestrator.evidence import attempt_facts, failed_memory, gpu_usage, relative_excess, worst_parts
from orchestrator.gang import Finished, Placed, Progressed, Scheduler, Shape, Slots, shapes_of
from orchestrator.learned import learned
from orchestrator.peaks import Peaks
from orchestrator.progress import Running, Snapshot, Stop, StopReason, SweepResult
from orchestrator.provenance import with_stack
from orchestrator.searcher import Failed, Measured, OutOfMemory, Searcher

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
RENEW_SECONDS = 5.0
POLL_SECONDS = 0.5
DECIDED = frozenset(
    {StopReason.EXHAUSTED, StopReason.TRIALS, StopReason.PLATEAU}
)  # a search that has ended by itself: what it found is confirmed
CELL_TURN = 8  # trials a cell gets in a row: changing the gang's shape costs up to a second


@dataclass(eq=False)
class _Flight:
    run: CellRun
    trial_id: int
    layout: Layout
    attempt: int
    since: float
    nodes: Sequence[str] | None  # None: its gang has still to be placed
    alone: bool  # nothing else is started while it runs
    is_repeat: bool  # of what is measured: its trial's state stays as it is
    phase: Phase | None = None
    step: int = 0
    stepped: bool = False  # FIRST_STEP is in the store


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
) -> SweepResult:
    """Work on a sweep until every cell is done, a budget is spent, or somebody asks to stop.

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
    ) -> None:
        self._spec, self._sweep_id, self._epoch = spec, sweep_id, epoch
        self._store, self._scheduler, self._code, self._clock = store, scheduler, code, clock
        self._stop, self._observe = stop, observe
        slots = scheduler.slots
        self._peaks = Peaks(store.measured_peaks(sweep_id), device_name=slots.device_name)
        self._gpus_per_node = spec.gpus_per_node if isinstance(spec.gpus_per_node, int) else slots.per_node
        self._learned = learned(store, spec, hardware(slots), device_name=slots.device_name, gpus_per_node=self._gpus_per_node)
        parallel = spec.search.max_parallel_trials
        # On a machine without GPUs trials share caches and memory bandwidth: one at a time keeps their timing apart.
        self._parallel = parallel if isinstance(parallel, int) else 1 if slots.device is Device.CPU else slots.total
        self._runs: list[CellRun] = []
        self._flights: dict[int, _Flight] = {}
        self._counts: Counter[TrialState] = Counter()
        self._fingerprints: set[str] = set()
        self._gpu_seconds = 0.0
        self._finished_now = 0
        self._began = self._renewed = clock()
        self._last = ""
        self._blame = Blame()
        self._cancelling = False
        self._requested = Stop.GO_ON

    def run(self) -> SweepResult:
        shapes = shapes_of(self._spec.cells(), self._scheduler.slots, gpus_per_node=self._gpus_per_node)
        lost = self._store.reap(self._sweep_id, self._epoch)
        if lost:
            logger.warning("%d attempts of a dead orchestrator were given back", len(lost), extra={"action": "reaped"})
        self._runs = [self._open_cell(cell, shape) for cell, shape in shapes.items()]
        self._gpu_seconds = sum(status.gpu_seconds for status in self._store.status(self._sweep_id))
        try:
            self._work()
        except BaseException:
            for trial_id in self._flights:  # the store or the cluster is gone: its trials are given back by the next call
                self._scheduler.cancel(trial_id)
            raise
        return self._result()

    # -- opening -------------------------------------------------------------------------------------------------------------

    def _open_cell(self, cell: Cell, shape: Shape) -> CellRun:
        calibration = self._learned.calibration(cell, with_own=False)
        candidates = plan_cell(
            self._spec, cell, hardware=self._learned.hardware, gpus_per_node=self._gpus_per_node, calibration=calibration
        ).candidates
        cell_id = self._store.ensure_cell(self._sweep_id, cell, epoch=self._epoch)
        objective = self._spec.objective
        searcher = Searcher(candidates, search=self._spec.search, objective=objective, num_layers=cell.model.num_layers, sequence=cell_id)
        run = CellRun(id=cell_id, cell=cell, shape=shape, objective=objective, searcher=searcher, num_candidates=len(candidates))
        trials = self._store.trials(self._sweep_id, cell_id=cell_id)
        self._counts.update(trial.state for trial in trials)
        self._fingerprints.update(t.fingerprint_digest for t in trials if t.fingerprint_digest is not None)
        for layout, (proof, proof_id) in run.take_up(trials, self._store.repeats(cell_id)).items():
            self._prune(run, [layout], proof_id, proof)
        run.nothing_fits = searcher.nothing_fits()
        run.alone = {t.id for t in run.waiting if FailureKind.OOM_HOST in self._store.failure_counts(t.id)}
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
                        self._placed(event)
                    case Progressed():
                        self._progressed(event)
                    case Finished():
                        self._finished(event)
            self._blame.raise_if_it_is_not_the_layouts()
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
            if run.stopped is None:
                if self._launch_next(run):
                    return True
                if not run.waiting and not self._is_busy(run):
                    run.stopped = StopReason.EXHAUSTED
            if run.stopped in DECIDED and self._confirm(run):
                return True
        return False

    def _is_busy(self, run: CellRun) -> bool:
        """Whether something new of the cell is under way."""
        return any(flight.run is run and not flight.is_repeat for flight in self._flights.values())

    def _confirm(self, run: CellRun) -> bool:
        """The search of a cell has ended: repeat what stands at its top, until one layout is the winner or the repeats are spent."""
        if self._is_busy(run) or self._budget_spent() is not None:
            return False
        found = run.contest.next_repeat(self._spec.search.confirm)
        if found is not None:
            self._repeat(run, *found)
        return found is not None

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
        return self._gpu_seconds + sum((now - f.since) * f.run.cell.num_gpus for f in self._flights.values())

    def _launch_next(self, run: CellRun) -> bool:
        # What failed by the machine's fault lets others go first, until one of them shows that the machine is well.
        trial = run.next_waiting(beside_others=bool(self._flights)) if not self._blame.suspects_the_machine else None
        if trial is None and (doubted := run.doubted()) is not None:
            self._repeat(run, *doubted)
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
            if proposal.layout not in run.added:
                self._counts[TrialState.QUEUED] += 1
            run.launched += 1
            self._launch(run, trial_id, proposal.layout, attempt, nodes)
            return True
        trial = trial or run.next_waiting(beside_others=bool(self._flights))
        if trial is None:
            return False
        run.launched += trial.num_attempts == 0
        self._launch(run, trial.id, trial.layout, self._store.start_attempt(trial.id, self._epoch, nodes), nodes)
        return True

    def _think_ahead(self) -> None:
        for run in self._runs:
            if run.stopped is None and self._flights and not run.waiting and self._within_trials(run):
                run.ask_ahead(self._clock)

    def _repeat(self, run: CellRun, trial_id: int, layout: Layout, why: str) -> None:
        """Measure a measured trial once more, beside its other runs."""
        nodes = self._scheduler.standing(run.shape)
        attempt = self._store.start_repeat(trial_id, self._epoch, nodes, why=why)
        run.contest.begin(trial_id)
        logger.info("Trial %d again: %s", trial_id, why, extra={"action": "repeated", "trial_id": trial_id, "attempt": attempt})
        self._launch(run, trial_id, layout, attempt, nodes, is_repeat=True)

    def _launch(
        self, run: CellRun, trial_id: int, layout: Layout, attempt: int, nodes: Sequence[str] | None, *, is_repeat: bool = False
    ) -> None:
        if not is_repeat:
            self._move(TrialState.QUEUED, TrialState.LAUNCHING)
        self._flights[trial_id] = _Flight(
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
                peaks=self._peaks.of(layout.precision),
            ),
            run.shape,
        )

    # -- what came back ------------------------------------------------------------------------------------------------------

    def _placed(self, event: Placed) -> None:
        flight = self._flights[event.trial_id]
        if flight.nodes is None or list(flight.nodes) != list(event.nodes):
            flight.nodes = event.nodes
            self._store.note_nodes(flight.trial_id, flight.attempt, event.nodes, epoch=self._epoch)

    def _progressed(self, event: Progressed) -> None:
        flight = self._flights[event.trial_id]
        flight.phase, flight.step = event.phase, event.step
        if not flight.stepped and not flight.is_repeat and event.phase in (Phase.STEADY, Phase.TEARDOWN):
            flight.stepped = True
            self._store.transition(flight.trial_id, TrialEvent.FIRST_STEP, epoch=self._epoch, attempt=flight.attempt)
            self._move(TrialState.LAUNCHING, TrialState.RUNNING)

    def _finished(self, event: Finished) -> None:
        flight = self._flights.pop(event.trial_id)
        flight.run.trial_seconds = self._clock() - flight.since
        self._gpu_seconds += event.gpu_seconds
        self._finished_now += 1
        failure = event.failure
        results = [outcome.result for report in event.reports for outcome in report.ranks if outcome.result is not None]
        measurement: Measurement | None = None
        if failure is None and not results:
            failure = Failure(kind=FailureKind.BAD_RESULT, message="every rank ended well, and none left a result")
        if failure is None:
            try:
                measurement = self._peaks.measure(
                    event.reports,
                    model=flight.run.cell.model,
                    sequence_length=flight.run.cell.sequence_length,
                    layout=flight.layout,
                    plan=self._spec.measurement.plan,
                )
            except ImplausibleMeasurement as exc:
                failure = Failure(kind=FailureKind.BAD_RESULT, message=str(exc))
        if measurement is not None:
            self._measured(flight, event, results, measurement)
        else:
            assert failure is not None
            self._failed(flight, event, results, failure)

    def _measured(self, flight: _Flight, event: Finished, results: Sequence[RankResult], measurement: Measurement) -> None:
        fingerprint = with_stack(self._code, self._stack_of(results))
        counts = self._store.record_measurement(
            flight.trial_id,
            flight.attempt,
            epoch=self._epoch,
            measurement=measurement,
            gpu=gpu_usage(event.reports),
            memory_by_part=worst_parts(results),
            **attempt_facts(event, results, fingerprint),
        )
        self._fingerprints.add(fingerprint.digest)
        precision, device_name = flight.layout.precision, fingerprint.stack.device_name
        self._peaks.note(event.reports, measurement, precision=precision, device_name=device_name)
        self._blame.note_measured()
        run, trial_id, layout = flight.run, flight.trial_id, flight.layout
        taken = Run(step_seconds=measurement.step_time.median, relative_confidence=measurement.step_time.relative_confidence)
        if not flight.is_repeat:
            self._move(TrialState.RUNNING if flight.stepped else TrialState.LAUNCHING, TrialState.MEASURED)
            run.measured_with(fingerprint.digest)
            run.note_measured(trial_id, layout, taken)
        elif counts:
            run.contest.note(trial_id, layout, taken)
        else:  # measured with other software than its trial: kept, but of another contest
            run.contest.give_up(trial_id)
        if counts:
            peak = measurement.peak_memory_reserved_bytes or measurement.peak_memory_allocated_bytes
            run.searcher.tell(layout, Measured(value=run.value_of(run.contest.seconds_of(trial_id)), peak_memory_bytes=peak))
        self._say(
            flight,
            f"{measurement.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
            + (f", MFU {measurement.mfu:.1%}" if measurement.mfu is not None else ""),
        )

    def _failed(self, flight: _Flight, event: Finished, results: Sequence[RankResult], failure: Failure) -> None:
        outcome = self._outcome_of(flight, failure)
        self._blame.note_failure(failure)
        peak, device = failed_memory(event.reports)
        self._store.record_failure(
            flight.trial_id,
            flight.attempt,
            epoch=self._epoch,
            failure=failure,
            event=outcome,
            peak_memory_bytes=peak,
            device_memory_bytes=device,
            **attempt_facts(event, results, with_stack(self._code, self._stack_of(results)) if results else None),
        )
        if flight.is_repeat:
            (flight.run.contest.drop if outcome is TrialEvent.REQUEUED else flight.run.contest.give_up)(flight.trial_id)
            self._say(flight, f"measured before; once more it failed, {failure.kind}: {failure.message}")
            return
        before = TrialState.RUNNING if flight.stepped else TrialState.LAUNCHING
        searcher, layout = flight.run.searcher, flight.layout
        match outcome:
            case TrialEvent.OUT_OF_MEMORY:
                self._move(before, TrialState.OUT_OF_MEMORY)
                flight.run.note_infeasible()
                flight.run.take_back()
                proves = proves_out_of_memory(failure, on_cpu=self._scheduler.slots.device is Device.CPU)
                excess = relative_excess(peak, device, failure.message)
                condemned = searcher.tell(layout, OutOfMemory(excess=excess), proves=proves)
                self._prune(flight.run, condemned, flight.trial_id, layout)
                flight.run.nothing_fits = searcher.nothing_fits()
                self._say(flight, f"out of memory{f'; {len(condemned)} more cannot fit' if condemned else ''}")
            case TrialEvent.REQUEUED:
                self._move(before, TrialState.QUEUED)
                flight.run.wait(self._store.trial(flight.trial_id).trial, alone=flight.alone or failure.kind is FailureKind.OOM_HOST)
                why = "cancelled" if failure.kind is FailureKind.CANCELLED else f"{failure.kind}: {failure.message}"
                self._say(flight, f"{why}; waits for another attempt")
            case _:
                self._move(before, TrialState.FAILED)
                flight.run.note_infeasible()
                if POLICIES[failure.kind].fault is not Fault.MACHINE:
                    searcher.tell(layout, Failed())
                # Else it says nothing of the layout; in flight for the search, it is not asked for again.
                where = f" (log: {failure.log_path})" if failure.log_path else ""
                self._say(flight, f"failed, {failure.kind}: {failure.message}{where}")

    def _outcome_of(self, flight: _Flight, failure: Failure) -> TrialEvent:
        if failure.kind is FailureKind.CANCELLED:
            # Asked to stop: the trial waits for the next call rather than being given up.
            return TrialEvent.REQUEUED
        earlier = Counter(self._store.failure_counts(flight.trial_id))
        earlier[failure.kind] += 1
        if may_retry(failure.kind, earlier):
            return TrialEvent.REQUEUED
        return TrialEvent.OUT_OF_MEMORY if failure.kind in OUT_OF_MEMORY_KINDS else TrialEvent.FAILED

    # -- ending --------------------------------------------------------------------------------------------------------------

    def _result(self) -> SweepResult:
        interrupted = self._asked() is not Stop.GO_ON
        nothing = [run.cell for run in self._runs if run.best is None and (run.ended or not run.num_candidates) and not interrupted]
        return SweepResult(
            sweep_id=self._sweep_id,
            counts=dict(self._counts),
            stopped={run.cell: run.stopped or StopReason.INTERRUPTED for run in self._runs},
            interrupted=interrupted,
            nothing_feasible=nothing,
            nothing_fits={run.cell: run.nothing_fits for run in self._runs if run.nothing_fits is not None},
            tied={run.cell: run.contest.tied() for run in self._runs if run.best is not None},
            num_fingerprints=len(self._fingerprints),
        )

    def _stack_of(self, results: Sequence[RankResult]) -> Stack:
        """As the ranks saw it; a foreign program that says nothing of its device ran on the cluster's."""
        stack = results[0].stack
        return stack if stack.device_name is not None else stack.model_copy(update={"device_name": self._scheduler.slots.device_name})

    def _prune(self, run: CellRun, layouts: Sequence[Layout], proof_id: int, proof: Layout) -> None:
        """Write down what an out-of-memory proves of others, without launching them."""
        if layouts:
            why = f"needs at least the memory of trial {proof_id} ({proof.short}), which ran out of it"
            pruned = self._store.add_pruned(run.id, [(layout, why) for layout in layouts], condemned_by=proof_id, epoch=self._epoch)
            self._counts[TrialState.PRUNED] += pruned

    # -- small things --------------------------------------------------------------------------------------------------------

    def _move(self, before: TrialState, after: TrialState) -> None:
        self._counts[before] -= 1
        self._counts[after] += 1

    def _say(self, flight: _Flight, what: str) -> None:
        self._last = f"trial {flight.trial_id} {flight.run.cell.num_gpus} GPU {flight.layout.short}: {what}"
        logger.info("%s", self._last, extra={"action": "finished", "trial_id": flight.trial_id, "attempt": flight.attempt})
        self._show()

    def _show(self) -> None:
        self._observe(
            Snapshot(
                sweep=self._spec.name,
                counts=dict(self._counts),
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
