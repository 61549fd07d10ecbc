"""The request for a profile to ranks, and a rank's report on it."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from orchestrator.core.trial.kernel_names import Axis
from orchestrator.core.trial.memory_timeline import MOST_MOMENTS, MemoryKind
from orchestrator.core.trial.message import Message
from orchestrator.core.trial.step_part import StepPart
from orchestrator.core.trial.trace_split import COMPUTATION, EXPOSED, AttentionKernel, Part, Split

PROFILED_STEPS = 3
NAME_LENGTH = 200

_Nanoseconds = Annotated[int, Field(ge=0, le=10**17)]
_Bytes = Annotated[int, Field(ge=0, le=1 << 50)]
_Text = Annotated[str, Field(max_length=NAME_LENGTH)]


class ProfilePlan(Message):
    """The plan of profiling a layout."""

    num_steps: Annotated[int, Field(ge=1, le=1000)] = PROFILED_STEPS
    # Also show the memory of the first steps.
    memory: bool = False
    # Whose traces are kept, in addition to those of rank 0 and of the slowest.
    ranks: tuple[int, ...] = ()


class MemoryMoment(Message):
    """The bytes of each kind at one moment of the first steps."""

    step: Annotated[int, Field(ge=1)]
    part: StepPart
    num_bytes: dict[MemoryKind, _Bytes]

    @property
    def total(self) -> int:
        return sum(self.num_bytes.values())


class RankProfile(Message):
    """The split of one rank's profiled steps. Nanoseconds are of all steps together."""

    num_steps: Annotated[int, Field(ge=1)]
    window_nanoseconds: _Nanoseconds
    parts: dict[Part, _Nanoseconds]
    overlapped: dict[Axis, _Nanoseconds]
    unknown: dict[_Text, _Nanoseconds] = Field(default={}, max_length=10)
    num_kernels: Annotated[int, Field(ge=0)]
    median_kernel_nanoseconds: _Nanoseconds | None
    is_on_device: bool
    host_nanoseconds: _Nanoseconds | None
    attention: AttentionKernel | None
    is_compiled: bool = False
    # One step of the same process without the profiler; None: it was not timed.
    plain_step_seconds: Annotated[float, Field(ge=0, le=1e7)] | None = None
    # It communicates least, so the others wait for it.
    is_slowest: bool = False
    trace_path: Annotated[str, Field(max_length=4000)] | None = None  # None: it is not kept
    memory: list[MemoryMoment] = Field(default=[], max_length=MOST_MOMENTS)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        total = sum(self.parts.values())
        if set(self.parts) != set(Part) or total != self.window_nanoseconds:
            raise ValueError(
                f"the parts add up to {total} ns, and the steps took {self.window_nanoseconds} ns"
            )
        return self

    @classmethod
    def of(cls, split: Split, **more: object) -> Self:
        """Return the report of a split."""
        return cls.model_validate(
            {
                "num_steps": split.num_steps,
                "window_nanoseconds": split.window,
                "parts": dict(split.parts),
                "overlapped": dict(split.overlapped),
                "unknown": {name[:NAME_LENGTH]: spent for name, spent in split.unknown},
                "num_kernels": split.num_kernels,
                "median_kernel_nanoseconds": split.median_kernel,
                "is_on_device": split.is_on_device,
                "host_nanoseconds": split.host,
                "attention": split.attention,
                "is_compiled": split.is_compiled,
                **more,
            }
        )

    @property
    def step_seconds(self) -> float:
        """The time of one step, under the profiler."""
        return self.window_nanoseconds / self.num_steps / 1e9

    @property
    def computing_nanoseconds(self) -> int:
        """The time in which a kernel ran."""
        return sum(self.parts[part] for part in COMPUTATION)

    @property
    def working_share(self) -> float:
        """The share of the step in which the rank neither communicated exposed nor waited."""
        return 1.0 - self.share(*EXPOSED, Part.BUBBLE)

    def share(self, *parts: Part) -> float:
        """Return the share of the step that these parts took, 0 to 1."""
        if not self.window_nanoseconds:
            return 0.0
        return sum(self.parts[part] for part in parts) / self.window_nanoseconds
