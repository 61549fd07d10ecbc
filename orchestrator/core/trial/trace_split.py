"""Splits the time of profiled steps by what the rank did, so that the parts add up exactly.

Each moment belongs to one part. While a kernel runs it is computation, whatever is communicated at
the same time; else communication that is exposed; else the device waits: for the host, for another
stage of the pipeline, or for something unknown. On a CPU operations are the kernels.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from orchestrator.core.trial import kernel_names
from orchestrator.core.trial.intervals import Interval, Intervals, common, length, minus, union
from orchestrator.core.trial.intervals import within as cut
from orchestrator.core.trial.kernel_names import Axis, Work
from orchestrator.core.trial.trace_events import AXIS_ANNOTATION, Trace, TraceEvent

_OPTIMIZER_RANGE = "Optimizer.step#"
# Own annotation, if an optimizer does more than torch's `step`.
OPTIMIZER_ANNOTATION = "sweep::optimizer"
# A launch that takes longer than this many usual ones waits for a full queue: the device is behind.
LAUNCH_WAITS = 5.0
NAMED_UNKNOWN = 5


class Part(StrEnum):
    """The parts of a step, in the order in which they claim a moment."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    OPTIMIZER = "optimizer"
    OTHER = "other_kernels"
    UNKNOWN = "unknown"
    EXPOSED_TP = "exposed_tp"
    EXPOSED_CP = "exposed_cp"
    EXPOSED_PP = "exposed_pp"
    EXPOSED_DP = "exposed_dp"
    EXPOSED_OTHER = "exposed_other"
    BUBBLE = "bubble"
    HOST_BOUND = "host_bound"
    IDLE = "idle"


# What each part means, for people.
MEANS: Mapping[Part, str] = MappingProxyType(
    {
        Part.MATMUL: "a matrix product runs",
        Part.ATTENTION: "an attention kernel runs, and no matrix product",
        Part.OPTIMIZER: "a kernel of the optimizer runs: one with such a name, or one that was"
        " launched in its step",
        Part.OTHER: "another kernel runs: norms, activations, the loss, copies",
        Part.UNKNOWN: "a kernel runs whose name no table has. Shown beyond 3 % of the step",
        Part.EXPOSED_TP: "no kernel runs, and tensor parallelism communicates",
        Part.EXPOSED_CP: "the same, context parallelism",
        Part.EXPOSED_PP: "the same, pipeline parallelism, without the waiting of its messages",
        Part.EXPOSED_DP: "the same, data parallelism: gradients, and weights with ZeRO",
        Part.EXPOSED_OTHER: "the same, a group that serves no single axis or has no description",
        Part.BUBBLE: "a message of the pipeline waits for another stage: what it takes longer than"
        " the fastest message that is at least as large",
        Part.HOST_BOUND: "nothing runs, and the host has not launched the next kernel yet; on a CPU"
        " all time outside of operations: Python, dispatch, views",
        Part.IDLE: "nothing runs although the next kernel was launched",
    }
)

_PART_OF_WORK: Mapping[Work, Part] = {work: Part(work.value) for work in Work}
_PART_OF_AXIS: Mapping[Axis, Part] = {
    axis: Part(f"exposed_{axis}") for axis in (Axis.TP, Axis.CP, Axis.PP, Axis.DP, Axis.OTHER)
}
COMPUTATION = tuple(_PART_OF_WORK.values())
EXPOSED = tuple(_PART_OF_AXIS.values())


class AttentionKernel(StrEnum):
    """Kernels of attention, where the operations show which."""

    FUSED = "fused"
    # Torch's fallback, which makes the score matrix.
    MATH = "math"
    # Products and a softmax of the program's own.
    EAGER = "eager"


@dataclass(frozen=True, kw_only=True)
class Split:
    """The split of a rank's profiled steps. Nanoseconds are of all steps together."""

    window: int
    num_steps: int
    # All of them; they add up to the window.
    parts: Mapping[Part, int]
    # Communication while a kernel ran. It took no time of its own, so it is no part.
    overlapped: Mapping[Axis, int]
    # The names that no table has, longest first.
    unknown: Sequence[tuple[str, int]]
    num_kernels: int  # computation only
    median_kernel: int | None  # nanoseconds
    is_on_device: bool
    # What the host did without waiting for the device; None on a CPU.
    host: int | None
    attention: AttentionKernel | None
    is_compiled: bool  # kernels or regions of torch.compile ran

    @property
    def computing(self) -> int:
        """Nanoseconds in which a kernel ran."""
        return sum(self.parts[part] for part in COMPUTATION)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CommunicationCall:
    """One collective or message, on a device or in a thread of gloo."""

    name: str
    axis: Axis
    start: int
    end: int
    num_elements: int | None

    @property
    def nanoseconds(self) -> int:
        return self.end - self.start


@dataclass(kw_only=True)
class _Activity:
    """The kernels in the window: computation by kind, communication, and the rest."""

    work: dict[Work, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    calls: list[_CommunicationCall] = field(default_factory=list)
    kernels: list[TraceEvent] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def split(trace: Trace, *, single_axis: Axis | None = None) -> Split:
    """Split the window of a trace.

    `single_axis`: the only axis that communicates, so that groups without a description serve it.
    """
    window = trace.window
    events = [one for one in trace.events if one.start < window[1] and one.end > window[0]]
    is_on_device = any(one.is_on_device for one in events)
    activity = _Activity()
    axis_of = _AxisFinder(trace, single_axis)
    if is_on_device:
        _device_activity(trace.events, window, activity, axis_of)
    else:
        _host_activity(events, activity, axis_of, window)
    parts, taken = _parts_of_work(activity, window)
    busy = list(taken)
    waiting = _waiting(activity.calls)
    overlapped: dict[Axis, int] = {}
    for axis, part in _PART_OF_AXIS.items():
        mine = union(cut(((c.start, c.end) for c in activity.calls if c.axis is axis), window))
        overlapped[axis] = length(common(mine, busy))
        if axis is Axis.PP:
            mine = minus(mine, union(cut(waiting, window)))
        exposed = minus(mine, taken)
        parts[part], taken = length(exposed), union([*taken, *exposed])
    bubble = minus(union(cut(waiting, window)), taken)
    parts[Part.BUBBLE], taken = length(bubble), union([*taken, *bubble])
    gaps = minus([window] if window[0] < window[1] else [], taken)
    for_host = _host_bound(gaps, trace.events) if is_on_device else gaps
    parts[Part.HOST_BOUND] = length(for_host)
    parts[Part.IDLE] = length(minus(gaps, for_host))
    durations = [one.nanoseconds for one in activity.kernels]
    return Split(
        window=window[1] - window[0],
        num_steps=trace.num_steps,
        parts={part: parts[part] for part in Part},
        overlapped=overlapped,
        unknown=sorted(activity.unknown.items(), key=lambda one: -one[1])[:NAMED_UNKNOWN],
        num_kernels=len(durations),
        median_kernel=round(statistics.median(durations)) if durations else None,
        is_on_device=is_on_device,
        host=_host_nanoseconds(events, window) if is_on_device else None,
        attention=_attention(events),
        is_compiled=any(kernel_names.is_compiled(one.name) for one in events),
    )


def _parts_of_work(activity: _Activity, window: Interval) -> tuple[dict[Part, int], list[Interval]]:
    """Where two kernels run at once, the moment belongs to the first kind."""
    parts: dict[Part, int] = {}
    taken: list[Interval] = []
    for work, part in _PART_OF_WORK.items():
        mine = minus(union(cut(activity.work[work], window)), taken)
        parts[part], taken = length(mine), union([*taken, *mine])
    return parts, taken


# -- a device ------------------------------------------------------------------------------------


def _device_activity(
    events: Sequence[TraceEvent], window: Interval, activity: _Activity, axis_of: _AxisFinder
) -> None:
    ranges = _optimizer_ranges(events)
    launched = {i: one.start for one in events if one.is_launch if (i := _correlation(one))}
    for one in (event for event in events if event.is_on_device):
        if one.start >= window[1] or one.end <= window[0]:
            continue
        if kernel_names.is_communication(one.name):
            activity.calls.append(_call(one, axis_of.of_event(one)))
            continue
        activity.kernels.append(one)
        work = kernel_names.work_of_kernel(one.name)
        at = launched.get(_correlation(one))
        if at is not None and _holds(ranges, at):
            work = Work.OPTIMIZER
        if work is Work.UNKNOWN:
            activity.unknown[one.name] += one.nanoseconds
        activity.work[work].append((one.start, one.end))


def _correlation(event: TraceEvent) -> object:
    return event.arguments.get("correlation")


def _optimizer_ranges(events: Iterable[TraceEvent]) -> list[Interval]:
    """Return the intervals in which the host was in an optimizer's step."""
    return union((one.start, one.end) for one in events if _is_optimizer(one))


def _is_optimizer(event: TraceEvent) -> bool:
    name = event.name
    return event.is_annotation and (
        name.startswith(_OPTIMIZER_RANGE) or name == OPTIMIZER_ANNOTATION
    )


def _holds(ranges: Intervals, at: int) -> bool:
    return any(start <= at < end for start, end in ranges)


def _host_bound(gaps: Intervals, events: Sequence[TraceEvent]) -> list[Interval]:
    """Return the parts of the device's gaps in which the host had not launched what came next.

    After its launch a kernel may wait for other streams, or for the device to take it up.
    """
    launches = {i: one.end for one in events if one.is_launch if (i := _correlation(one))}
    started = sorted((one for one in events if one.is_on_device), key=lambda one: one.start)
    starts = [(one.start, launches.get(_correlation(one))) for one in started]
    found, at = [], 0
    for start, end in gaps:
        while at < len(starts) and starts[at][0] < end:
            at += 1
        if at == len(starts):
            # No kernel follows: the host was at the end of the steps.
            found.append((start, end))
            continue
        launched = starts[at][1]
        if launched is not None and launched > start:
            found.append((start, min(end, launched)))
    return found


def _host_nanoseconds(events: Sequence[TraceEvent], window: Interval) -> int:
    """Return the time of the window in which the host did not wait for the device."""
    launches = [one for one in events if one.is_launch]
    ordinary = [one.nanoseconds for one in launches if "Launch" in one.name]
    usual = statistics.median(ordinary) if ordinary else 0.0
    waits = []
    for one in launches:
        if kernel_names.SYNCHRONISING.search(one.name):
            waits.append((one.start, one.end))
        elif one.nanoseconds > LAUNCH_WAITS * usual:
            waits.append((one.start + round(usual), one.end))
    return window[1] - window[0] - length(union(cut(waits, window)))


# -- a CPU ---------------------------------------------------------------------------------------


def _host_activity(
    events: Sequence[TraceEvent], activity: _Activity, axis_of: _AxisFinder, window: Interval
) -> None:
    threads: dict[str, list[TraceEvent]] = defaultdict(list)
    for one in events:
        if kernel_names.is_communication(one.name):
            activity.calls.append(_call(one, axis_of.of_event(one)))
        elif one.is_operation or _is_optimizer(one):
            threads[one.thread].append(one)
    for some in threads.values():
        _thread_activity(some, activity, window)
    # In an optimizer's step the optimizer works, or waits for what it communicates.
    talking = union((call.start, call.end) for call in activity.calls)
    activity.work[Work.OPTIMIZER] = minus(union(activity.work[Work.OPTIMIZER]), talking)


def _thread_activity(events: Sequence[TraceEvent], activity: _Activity, window: Interval) -> None:
    """Add one thread's operations: each moment has the kind of the outermost one that has a kind.

    What an operation calls belongs to it: the copy within a product is no kernel of its own. An
    operation of no known name has only the time that nothing within it has.
    """
    stack: list[tuple[TraceEvent, Work | None]] = []
    owned_until = at = window[0]

    def pass_time(until: int) -> None:
        nonlocal at
        one, work = stack[-1]
        end = min(until, one.end, window[1])
        if work is Work.UNKNOWN and at < end:
            activity.work[work].append((at, end))
            activity.unknown[one.name] += end - at
        at = max(at, end)

    for one in sorted(events, key=lambda event: (event.start, -event.end)):
        if one.start < owned_until:
            continue
        while stack and stack[-1][0].end <= one.start:
            pass_time(one.start)
            stack.pop()
        if stack:
            pass_time(one.start)
        at = max(at, one.start)
        work = Work.OPTIMIZER if one.is_annotation else kernel_names.work_of_operation(one.name)
        stack.append((one, work))
        if work is not None and work is not Work.UNKNOWN:
            owned_until = one.end
            activity.work[work].append((one.start, one.end))
            activity.kernels.append(one)
    while stack:
        pass_time(window[1])
        stack.pop()


# -- communication -------------------------------------------------------------------------------


class _AxisFinder:
    """Finds the axis of a communication event."""

    def __init__(self, trace: Trace, single_axis: Axis | None) -> None:
        self._trace, self._single = trace, single_axis
        self._by_thread = _axes_of_threads(trace)
        # Kernels of some versions lack the group that their call on the host names.
        self._calls = {
            one.arguments["External id"]: one
            for one in trace.events
            if one.is_operation and "External id" in one.arguments and _group(one) is not None
        }

    def of_event(self, event: TraceEvent) -> Axis:
        if self._single is not None:
            return self._single
        call = self._calls.get(event.arguments.get("External id"))
        for one in (event, call):
            name = _group(one) if one is not None else None
            if one is None or name is None:
                continue
            if name in self._trace.axes:
                return Axis(self._trace.axes[name])
            described = str(
                one.arguments.get("Process Group Description")
                or self._trace.descriptions.get(name, "")
            )
            axis = kernel_names.axis_of_group(described)
            if axis is not None:
                return axis
        if event.thread in self._by_thread and not kernel_names.is_point_to_point(event.name):
            return self._by_thread[event.thread]
        return Axis.PP if kernel_names.is_point_to_point(event.name) else Axis.OTHER


def _group(event: TraceEvent) -> str | None:
    name = event.arguments.get("Process Group Name")
    return None if name is None else str(name)


def _axes_of_threads(trace: Trace) -> dict[str, Axis]:
    """Gloo's events name no group, but each group has threads of its own.

    The program calls each group once before its steps, within an annotation of its axis.
    """
    found: dict[str, Axis] = {}
    for mark in trace.events:
        if not (mark.is_annotation and mark.name.startswith(AXIS_ANNOTATION)):
            continue
        axis = mark.name.removeprefix(AXIS_ANNOTATION)
        if axis not in set(Axis):
            continue
        for one in trace.events:
            inside = mark.start <= one.start and one.end <= mark.end
            if inside and one.name.startswith("gloo:") and one.thread != mark.thread:
                found[one.thread] = Axis(axis)
    return found


def _call(event: TraceEvent, axis: Axis) -> _CommunicationCall:
    size = event.arguments.get("In msg nelems")
    return _CommunicationCall(
        name=event.arguments.get("Collective name") or event.name.partition("(")[0],
        axis=axis,
        start=event.start,
        end=event.end,
        num_elements=size if isinstance(size, int) else None,
    )


def _waiting(calls: Iterable[_CommunicationCall]) -> list[Interval]:
    """Return when a stage waited for another: the time of messages beyond that of the fastest.

    A message is at least as fast as the fastest one of its kind that was as large: what takes
    longer began before its peer was there.
    """
    messages = [call for call in calls if call.axis is Axis.PP]
    by_name: dict[str, list[_CommunicationCall]] = defaultdict(list)
    for call in messages:
        by_name[call.name].append(call)
    found = []
    for some in by_name.values():
        # From the largest down: the least of all that are as large.
        ordered = sorted(some, key=lambda call: -(call.num_elements or 0))
        least = ordered[0].nanoseconds
        bounds: dict[int, int] = {}
        for call in ordered:
            least = min(least, call.nanoseconds)
            bounds[call.num_elements or 0] = least
        for call in some:
            found.append((call.start, call.end - bounds[call.num_elements or 0]))
    return found


def _attention(events: Iterable[TraceEvent]) -> AttentionKernel | None:
    names = {one.name for one in events if one.is_operation}
    if any(kernel_names.is_math_attention(name) for name in names):
        return AttentionKernel.MATH
    if any(kernel_names.is_fused_attention(name) for name in names):
        return AttentionKernel.FUSED
    return AttentionKernel.EAGER if {"aten::_softmax", "aten::bmm"} <= names else None
