"""The events of one rank's trace, read from Chrome's trace JSON as torch.profiler writes it.

Other programs write the same format. Times become whole nanoseconds, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Annotation around the steps of a profile: its interval is what is split.
STEPS_ANNOTATION = "sweep::steps"
# Annotations around collectives over the group of one axis, whose threads are learned so:
# "sweep::axis::tp".
AXIS_ANNOTATION = "sweep::axis::"
# Key of the trace document: the axis of each process group, by the group's name.
AXES_KEY = "sweep_axes"
# By torch.profiler: one annotation for each step.
_STEP = "ProfilerStep#"

_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver"})


class BadTrace(ValueError):
    """A document is no trace that can be split. The message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """Something that took time on a thread of the host, or on a stream of a device."""

    name: str
    category: str
    start: int  # nanoseconds
    end: int
    # Process and thread, or device and stream.
    thread: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nanoseconds(self) -> int:
        return self.end - self.start

    @property
    def is_on_device(self) -> bool:
        return self.category in _DEVICE_CATEGORIES

    @property
    def is_launch(self) -> bool:
        """True for a call of the device's runtime, such as cudaLaunchKernel."""
        return self.category in _LAUNCH_CATEGORIES

    @property
    def is_operation(self) -> bool:
        return self.category == "cpu_op"

    @property
    def is_annotation(self) -> bool:
        return self.category == "user_annotation"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The events of one rank, and what is known of its process groups."""

    events: Sequence[TraceEvent]
    window: tuple[int, int]  # the profiled steps
    num_steps: int
    # Name of a process group -> description, as torch gives it: "mesh_tp".
    descriptions: Mapping[str, str] = field(default_factory=dict)
    # Name of a process group -> axis, as the program says.
    axes: Mapping[str, str] = field(default_factory=dict)


def read_trace(document: Any, *, num_steps: int | None = None) -> Trace:
    """Read a trace document. Raises BadTrace.

    The window is the annotation of this project, else all steps that torch.profiler has marked.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("traceEvents"), list):
        raise BadTrace("it has no list traceEvents")
    events = list(_events(document["traceEvents"]))
    marks = [one for one in events if one.is_annotation and one.name.startswith(_STEP)]
    own = [one for one in events if one.is_annotation and one.name == STEPS_ANNOTATION]
    marked = own[:1] or marks
    if not marked:
        raise BadTrace(
            f"it has no annotation {STEPS_ANNOTATION} and no {_STEP}N: call step() of the profiler"
            " after each optimizer step"
        )
    return Trace(
        events=events,
        window=(min(one.start for one in marked), max(one.end for one in marked)),
        num_steps=num_steps or max(len({one.name for one in marks}), 1),
        descriptions=_descriptions(document),
        axes=_texts(document.get(AXES_KEY)),
    )


def _events(rows: Sequence[Any]) -> Iterator[TraceEvent]:
    for row in rows:
        if not isinstance(row, Mapping) or row.get("ph") != "X":
            continue
        begin, duration = _nanoseconds(row.get("ts")), _nanoseconds(row.get("dur"))
        if begin is None or duration is None or duration < 0:
            name, start, lasted = str(row.get("name"))[:100], row.get("ts"), row.get("dur")
            raise BadTrace(f"event {name!r} has ts {start} and dur {lasted}")
        arguments = row.get("args")
        yield TraceEvent(
            name=str(row.get("name", "")),
            category=str(row.get("cat", "")).lower(),
            start=begin,
            end=begin + duration,
            thread=f"{row.get('pid')}/{row.get('tid')}",
            arguments=arguments if isinstance(arguments, Mapping) else {},
        )


def _nanoseconds(microseconds: Any) -> int | None:
    if not isinstance(microseconds, int | float) or not abs(microseconds) < 1e17:
        return None
    return round(microseconds * 1000)


def _descriptions(document: Mapping[str, Any]) -> dict[str, str]:
    info = document.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, Mapping) else None
    return {
        str(group["pg_name"]): str(group.get("pg_desc", ""))
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, Mapping) and "pg_name" in group
    }


def _texts(value: Any) -> dict[str, str]:
    pairs = value.items() if isinstance(value, Mapping) else ()
    return {str(name): str(text) for name, text in pairs}
