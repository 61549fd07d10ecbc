"""Measures how fast collectives are, gang after gang of the spans that layouts use.

It places gangs through the scheduler as a sweep does, and knows nothing of Ray.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from db.store import Store
from orchestrator.cluster.contract import Finished, Scheduler
from orchestrator.core.machines.packing import Shape
from orchestrator.core.physics.link_sample import Collective, LinkSample, Span
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest

logger = logging.getLogger(__name__)

SMALLEST_BYTES = 1 << 10
LARGEST_BYTES: Mapping[Device, int] = {Device.CUDA: 256 << 20, Device.CPU: 16 << 20}
# Duration of the calls of each collective and size.
SECONDS: Mapping[Device, float] = {Device.CUDA: 0.25, Device.CPU: 0.1}
POLL_SECONDS = 0.5
# How long to wait for nodes that were lost or do not answer.
PATIENCE_SECONDS = 60.0
LIMITS = PhaseLimits(
    start=120.0,
    rendezvous=120.0,
    first_step=120.0,
    steady=60.0,
    teardown=20.0,
    total=900.0,
    in_file=False,
)


@dataclass(frozen=True, kw_only=True)
class SpanResult:
    """The measurements of one gang, or its failure."""

    span: Span
    nodes: tuple[str, ...]
    samples: Sequence[LinkSample]
    failure: Failure | None


def sizes(largest_bytes: int) -> list[int]:
    """Return sizes from 1 KiB on, each four times the one before."""
    found = [SMALLEST_BYTES]
    while found[-1] * 4 <= largest_bytes:
        found.append(found[-1] * 4)
    return found


def shapes(slots_of: Mapping[str, int]) -> list[Shape]:
    """Return the gangs that show the links inside nodes and between them.

    On one node: 2, 4, ... of its slots. Over 2, 4, ... nodes: one rank each, and all slots.
    """
    most, least, num_nodes = (
        max(slots_of.values(), default=0),
        min(slots_of.values(), default=0),
        len(slots_of),
    )
    inside = [Shape(num_nodes=1, slots_per_node=slots) for slots in _doubling(most)]
    across = [
        Shape(num_nodes=nodes, slots_per_node=slots)
        for nodes in _doubling(num_nodes)
        for slots in sorted({1, least})
    ]
    return inside + across


def _doubling(most: int) -> list[int]:
    found = []
    count = 2
    while count < most:
        found.append(count)
        count *= 2
    return [*found, most] if most >= 2 else []


def measure_links(
    scheduler: Scheduler,
    store: Store,
    *,
    run_token: str,
    largest_bytes: int | None = None,
    collectives: Sequence[Collective] = tuple(Collective),
    patience_seconds: float = PATIENCE_SECONDS,
) -> Iterator[SpanResult]:
    """Measure span after span, one at a time, since two at once would share links.

    Each is in the store when it is yielded. The spans are those of the nodes that are there at
    first; one fails if too few of them are left and come back.
    """
    slots = scheduler.slots
    options = {
        "collectives": [collective.value for collective in collectives],
        "sizes": sizes(largest_bytes or LARGEST_BYTES[slots.device]),
        "seconds": SECONDS[slots.device],
    }
    lost: set[str] = set()
    for number, shape in enumerate(shapes(slots.nodes), 1):
        nodes = _nodes_for(scheduler, shape, lost, patience_seconds)
        if len(nodes) < shape.num_nodes:
            yield _not_enough_left(shape, nodes)
            continue
        scheduler.start(_request(run_token, number, shape, slots.device, options), shape, nodes)
        end = _until_finished(scheduler)
        if (
            end.failure is not None
            and end.failure.kind is FailureKind.NODE_LOST
            and end.failure.node is not None
        ):
            lost.add(end.failure.node)
        yield _record(store, run_token, shape, nodes, end, slots.device)


def _nodes_for(
    scheduler: Scheduler, shape: Shape, lost: Collection[str], patience_seconds: float
) -> tuple[str, ...]:
    """Return nodes for a gang, last those that lost one; fewer if they do not come back in time."""
    until = time.monotonic() + patience_seconds
    while True:
        large_enough = [
            node for node, count in scheduler.slots.nodes.items() if count >= shape.slots_per_node
        ]
        if len(large_enough) >= shape.num_nodes or time.monotonic() >= until:
            return tuple(
                sorted(
                    sorted(large_enough, key=lambda node: (node in lost, node))[: shape.num_nodes]
                )
            )
        scheduler.poll(POLL_SECONDS)


def _not_enough_left(shape: Shape, nodes: tuple[str, ...]) -> SpanResult:
    left = (
        f"{len(nodes)} of its {shape.num_nodes} nodes"
        if shape.num_nodes > 1
        else f"no node of {shape.slots_per_node} slots"
    )
    failure = Failure(
        kind=FailureKind.NODE_LOST, message=f"{left} left: nodes went while others were measured"
    )
    return SpanResult(span=_span_of(shape), nodes=nodes, samples=(), failure=failure)


def _span_of(shape: Shape) -> Span:
    return Span(num_ranks=shape.num_slots, num_nodes=shape.num_nodes)


def _request(
    run_token: str, number: int, shape: Shape, device: Device, options: Mapping[str, object]
) -> TrialRequest:
    """Return a trial of no layout: only the number of ranks counts."""
    return TrialRequest(
        sweep=f"netbench-{run_token}",
        trial_id=number,
        attempt=1,
        workload="netbench",
        options=options,
        model=PRESETS["llama-tiny"],
        sequence_length=64,
        layout=Layout(data_parallel_size=shape.num_slots, micro_batch_size=1),
        device=device,
        measurement=MeasurementPlan(
            warmup_steps=1, min_steps=2, max_steps=2, relative_confidence=0.5
        ),
        limits=LIMITS,
        seed=0,
    )


def _until_finished(scheduler: Scheduler) -> Finished:
    while True:
        for event in scheduler.poll(POLL_SECONDS):
            if isinstance(event, Finished):
                return event


def _record(
    store: Store,
    run_token: str,
    shape: Shape,
    nodes: tuple[str, ...],
    end: Finished,
    device: Device,
) -> SpanResult:
    span = _span_of(shape)
    first = next((result for result in end.results if result.collectives), None)
    if end.failure is not None or first is None:
        return SpanResult(span=span, nodes=nodes, samples=(), failure=end.failure)
    samples = [
        (
            LinkSample(
                collective=Collective(one.collective),
                span=span,
                message_bytes=one.message_bytes,
                seconds=one.seconds,
            ),
            one.num_calls,
        )
        for one in first.collectives
    ]
    backend = "nccl" if device is Device.CUDA else "gloo"
    store.record_links(run_token, samples, backend=backend, stack=first.stack, nodes=nodes)
    return SpanResult(
        span=span, nodes=nodes, samples=[sample for sample, _ in samples], failure=None
    )
