"""Schedulers of workload replay: a launch ends with its row in a table of measured runs.

It ends at once, or through a process that Ray places. GPU-seconds are those of the measured run,
not of this machine. Time is virtual: of several launches the shortest ends first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.cluster.contract import Finished, Scheduler, SchedulerEvent, Slots
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.machines.packing import FreeOnNode, FreeSlots, Shape, WaitingGang
from orchestrator.core.pretend.replay import (
    LAYOUT_OPTION,
    ReplayTable,
    read_table,
    replayed_failure,
    replayed_result,
    reserved_gpu_seconds,
)
from orchestrator.core.pretend.run_table import MeasuredRun, RunStatus
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.workload_options import ReplayOptions
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.node_report import NodeReport, RankOutcome
from orchestrator.core.trial.protocol import Device, TrialRequest
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.node.text_file import TooLarge, read_text

ONE_PROCESS = Shape(num_nodes=1, slots_per_node=1)  # represents the whole gang


def table_of(spec: SweepSpec) -> ReplayTable | None:
    """Return the checked table of a sweep that replays one, else None. Raises UsageInvalid."""
    options = spec.workload.options
    if not isinstance(options, ReplayOptions):
        return None
    table = table_in(options.table, options.table_id)
    table.check(spec)
    return table


def goes_through_ray(spec: SweepSpec) -> bool:
    """Return whether each launch is a process."""
    options = spec.workload.options
    return isinstance(options, ReplayOptions) and options.through_ray


MAX_TABLE_BYTES = 64 << 20  # the largest published one has 2


def table_in(path: str | Path, table_id: str) -> ReplayTable:
    """Read one table of a file of measured runs. Raises UsageInvalid."""
    text = table_text(path)
    try:
        return read_table(text, table_id)
    except UsageInvalid as exc:
        raise UsageInvalid(f"{path}: {exc}") from None


def table_text(path: str | Path) -> str:
    """Read a file of measured runs. Raises UsageInvalid."""
    try:
        return read_text(Path(path), most_bytes=MAX_TABLE_BYTES)
    except TooLarge:
        raise UsageInvalid(
            f"the table {path} is larger than {MAX_TABLE_BYTES >> 20} MiB;"
            " keep the rows of one table in a file of its own"
        ) from None
    except UnicodeDecodeError as exc:
        raise UsageInvalid(f"{path}: not UTF-8 text: {exc.reason} at byte {exc.start}") from None
    except OSError as exc:
        raise UsageInvalid(f"cannot read the table {path}: {exc.strerror}") from None


@dataclass(frozen=True, kw_only=True)
class _ReplayedTrial:
    request: TrialRequest
    nodes: Sequence[str]
    run: MeasuredRun
    began_at: float  # virtual seconds
    ends_at: float


class ReplayScheduler:
    """A `Scheduler` of as many gangs at once as the sweep file asks for by number, else one."""

    def __init__(self, spec: SweepSpec, table: ReplayTable) -> None:
        self._table = table
        self._slots = _slots(spec, table)
        self._running: dict[int, _ReplayedTrial] = {}
        self._cancelled: set[int] = set()
        self._now = 0.0
        self._reserved_gpu_seconds = 0.0  # by what has ended

    @property
    def slots(self) -> Slots:
        return self._slots

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        return {}

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        run = self._table.run(cell_of(request), request.layout)
        seconds = reserved_gpu_seconds(run, request.measurement) / run.num_gpus
        self._running[request.trial_id] = _ReplayedTrial(
            request=request, nodes=nodes, run=run, began_at=self._now, ends_at=self._now + seconds
        )

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        if not self._running:
            return []
        trial_id, trial = min(self._running.items(), key=lambda item: (item[1].ends_at, item[0]))
        del self._running[trial_id]
        if trial_id in self._cancelled:
            self._cancelled.discard(trial_id)
            return [_cancelled(trial_id, trial.nodes)]
        self._now = trial.ends_at
        self._reserved_gpu_seconds += (trial.ends_at - trial.began_at) * trial.run.num_gpus
        return [self._finished(trial_id, trial)]

    def cancel(self, trial_id: int) -> None:
        if trial_id in self._running:
            self._cancelled.add(trial_id)

    def leased(self) -> Leased:
        under_way = sum(
            (self._now - trial.began_at) * trial.run.num_gpus for trial in self._running.values()
        )
        return Leased(
            reserved=self._reserved_gpu_seconds + under_way,
            idle=0.0,
            capacity=self._now * self._slots.total,
        )

    def close(self) -> None:
        self._running.clear()

    def _finished(self, trial_id: int, trial: _ReplayedTrial) -> Finished:
        nodes, run = trial.nodes, trial.run
        reserved = reserved_gpu_seconds(run, trial.request.measurement)
        if run.status is RunStatus.OK:
            result, failure = replayed_result(run, self._table.device), None
        else:
            result, failure = None, replayed_failure(run, node=nodes[0])
        # One rank represents all, as one row of the table does.
        rank = RankOutcome(rank=0, exit_code=0 if failure is None else 1, result=result)
        reports = [
            NodeReport(node=nodes[0], ranks=[rank], failure=failure),
            *(NodeReport(node=node, ranks=[]) for node in nodes[1:]),
        ]
        return Finished(
            trial_id=trial_id,
            reports=reports,
            failure=failure,
            gpu_seconds=reserved,
            shared_nodes=False,
        )


class RayReplayScheduler:
    """A `Scheduler` whose launches are processes of Ray, which read the table; one for a gang.

    Processes take slots of the real cluster, and wait here until one is free.
    """

    def __init__(self, spec: SweepSpec, table: ReplayTable, inner: Scheduler) -> None:
        self._table, self._inner = table, inner
        self._slots = _slots(spec, table)
        self._free_slots = FreeSlots(inner.slots.nodes)
        self._waiting: deque[TrialRequest] = deque()
        self._running: dict[int, TrialRequest] = {}
        self._ended: list[SchedulerEvent] = []
        self._reserved_gpu_seconds = 0.0

    @property
    def slots(self) -> Slots:
        return self._slots

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        return {}

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        self._waiting.append(request)
        self._start_what_fits()

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        if not self._ended:
            self._ended = [self._replayed(event) for event in self._inner.poll(timeout_seconds)]
        self._free_slots.resize(self._inner.slots.nodes)
        self._start_what_fits()
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, trial_id: int) -> None:
        waiting = next((request for request in self._waiting if request.trial_id == trial_id), None)
        if waiting is None:
            self._inner.cancel(trial_id)
        else:
            self._waiting.remove(waiting)
            self._ended.append(_cancelled(trial_id, ["nowhere yet"]))

    def leased(self) -> Leased:
        """Return what the runs of the table reserved, not what the processes reserve."""
        return Leased(reserved=self._reserved_gpu_seconds, idle=0.0, capacity=None)

    def close(self) -> None:
        self._inner.close()

    def _start_what_fits(self) -> None:
        gang = WaitingGang(shape=ONE_PROCESS, seconds=0.0)
        while self._waiting:
            free_on_nodes = self._inner.free_on_nodes()
            found = self._free_slots.next_start([gang], now=0.0, free_on_nodes=free_on_nodes)
            if found is None:
                return
            request = self._waiting.popleft()
            self._free_slots.take(request.trial_id, ONE_PROCESS, found.nodes, ends_at=0.0)
            self._running[request.trial_id] = request
            self._inner.start(for_one_process(request), ONE_PROCESS, found.nodes)

    def _replayed(self, event: SchedulerEvent) -> SchedulerEvent:
        if not isinstance(event, Finished):
            return event
        request = self._running.pop(event.trial_id)
        self._free_slots.give_back(event.trial_id)
        if event.failure is not None and event.failure.kind is FailureKind.CANCELLED:
            return replace(event, gpu_seconds=0.0)
        reserved = reserved_gpu_seconds(
            self._table.run(cell_of(request), request.layout), request.measurement
        )
        self._reserved_gpu_seconds += reserved
        return replace(event, gpu_seconds=reserved)


def for_one_process(request: TrialRequest) -> TrialRequest:
    """Return the request to the process that represents a gang, with the key of the layout.

    The path of the table is absolute, since the process runs in its run folder.
    """
    options: Mapping[str, object] = {
        **request.options,
        "table": str(Path(str(request.options["table"])).resolve()),
        LAYOUT_OPTION: request.layout.key,
    }
    return request.model_copy(
        update={
            "options": options,
            "layout": Layout(precision=request.layout.precision),
            "device": Device.CPU,
        }
    )


def cell_of(request: TrialRequest) -> Cell:
    """Return the cell of a request."""
    return Cell(
        model=request.model,
        num_gpus=request.layout.world_size,
        sequence_length=request.sequence_length,
        global_batch_size=request.layout.global_batch_size,
    )


def _slots(spec: SweepSpec, table: ReplayTable) -> Slots:
    """Return enough of the table's nodes for the trials at once."""
    per_node = spec.gpus_per_node if isinstance(spec.gpus_per_node, int) else table.gpus_per_node
    asked = spec.search.max_parallel_trials
    nodes = (asked if isinstance(asked, int) else 1) * -(-max(spec.gpus) // per_node)
    return Slots(
        device=Device.CUDA,
        device_name=table.hardware,
        nodes={f"replay-{number}": per_node for number in range(nodes)},
        usual_at_once=1,
    )


def _cancelled(trial_id: int, nodes: Sequence[str]) -> Finished:
    failure = Failure(kind=FailureKind.CANCELLED, message="cancelled")
    return Finished(
        trial_id=trial_id,
        reports=[NodeReport(node=nodes[0], ranks=[], failure=failure)],
        failure=failure,
        gpu_seconds=0.0,
    )
