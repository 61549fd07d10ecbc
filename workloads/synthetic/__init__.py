"""A workload that trains nothing: it follows a model of memory and time, with seeded noise and
faults on request. Needs no torch.

By default it does not even sleep: it reports the seconds of its model, and a trial takes
milliseconds.
"""

from __future__ import annotations

import platform
import time

from orchestrator.core.pretend.synthetic import MemoryByPhase, memory, noisy_steps, strikes
from orchestrator.core.problem.hardware import DEVICES, Hardware
from orchestrator.core.sweepfile.synthetic_options import SyntheticFault, SyntheticOptions
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.protocol import Phase, RankResult
from orchestrator.core.trial.stopping import Timing, advance_timing, begin
from workloads import rank as ranks
from workloads.options import parse_options
from workloads.rank import ConfigRejected, Rank
from workloads.synthetic.faults import inject, out_of_memory
from workloads.warm_up import run_once


def main() -> int:
    return ranks.run(pretend_to_train)


def warm_up() -> None:
    run_once(pretend_to_train, "synthetic")


def pretend_to_train(rank: Rank) -> RankResult:
    request = rank.request
    options = parse_options(SyntheticOptions, request.options)
    hardware = DEVICES[options.device_name]
    if request.layout.precision not in hardware.peak_flops:
        known = ", ".join(sorted(hardware.peak_flops))
        raise ConfigRejected(
            f"precision {request.layout.precision} is none that {hardware.name} (device_name) has; "
            f"it has {known}"
        )
    capacity = options.device_memory_bytes or hardware.memory_bytes
    faults = [fault for fault in options.faults if strikes(fault, request, rank.rank)]
    needs = memory(request.model, request.layout, request.sequence_length)

    rank.heartbeat(Phase.RENDEZVOUS)
    _inject(faults, "init", rank)
    _allocate(rank, needs.init, capacity)

    rank.heartbeat(Phase.FIRST_STEP)
    _inject(faults, "forward", rank)
    _allocate(rank, needs.forward, capacity)
    _inject(faults, "step_1", rank)

    samples, timing = _run_steps(rank, options, hardware, faults, needs, capacity)
    result = RankResult(
        step_seconds=samples[timing.num_warmup :],
        warmup_seconds=samples[: timing.num_warmup],
        step_seconds_bound=timing.bound,
        phase_seconds=rank.phase_seconds(),
        peak_memory_allocated_bytes=needs.step_2,
        peak_memory_reserved_bytes=min(capacity, int(1.05 * needs.step_2)),
        device_memory_bytes=capacity,
        allocator_retries=0,
        peak_flops=hardware.peak_flops[request.layout.precision],
        peak_flops_source=f"table: {hardware.name}",
        stack=Stack(python=platform.python_version(), device_name=f"synthetic {hardware.name}"),
    )
    rank.finish(result)
    _inject(faults, "teardown", rank)
    return result


def _run_steps(
    rank: Rank,
    options: SyntheticOptions,
    hardware: Hardware,
    faults: list[SyntheticFault],
    needs: MemoryByPhase,
    capacity: int,
) -> tuple[list[float], Timing]:
    """The seconds of all steps, and which of them are timed."""
    request, plan = rank.request, rank.request.measurement
    samples: list[float] = []
    timing = begin(plan)
    for step, seconds in enumerate(noisy_steps(request, options, hardware), 1):
        if step > 1:
            rank.heartbeat(Phase.STEADY, step, timed=timing.is_timed)
            _inject(faults, f"step_{step}", rank)
            _allocate(rank, needs.step_2, capacity)
        if options.sleep:
            time.sleep(seconds)
        samples.append(seconds)
        timing = advance_timing(timing, samples, plan)
        if timing.is_enough:
            break
    return samples, timing


def _inject(faults: list[SyntheticFault], at: str, rank: Rank) -> None:
    for fault in faults:
        if fault.at == at:
            inject(fault, rank)


def _allocate(rank: Rank, wanted_bytes: int, capacity_bytes: int) -> None:
    if wanted_bytes > capacity_bytes:
        raise out_of_memory(
            rank,
            wanted_bytes=wanted_bytes - capacity_bytes,
            used_bytes=capacity_bytes,
            capacity_bytes=capacity_bytes,
        )
