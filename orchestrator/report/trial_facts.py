"""Everything known about a trial as short texts, for `sweep show` and its page in a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.core.trial.lifecycle import UNDER_WAY
from orchestrator.core.trial.machine_load import MachineLoad, disturbance_text
from orchestrator.report import quantities as show_as
from orchestrator.report.json_text import json_text
from orchestrator.report.sweep_status import INTERRUPTED, WHAT_INTERRUPTED_IS
from orchestrator.report.trial_line import memory_text

if TYPE_CHECKING:
    from db.read.rows import AttemptRow, TrialDetail, TrialRow
    from orchestrator.core.trial.failure_kinds import Failure
    from orchestrator.core.trial.measurement import Measurement
    from orchestrator.core.trial.node_report import GpuUsage

LOG_LINES_SHOWN = 50
EVENT_DETAIL_CHARACTERS = 160  # --json has all of it
SHORTEST_SHOWN_SECONDS = 0.1
# By the value of DriverMemoryKind.
_SEEN_MEMORY = {
    "nvml": "used on the device, as the driver saw it",
    "rss": "resident, as the kernel saw it",
}

# A name and its text; an empty name continues the one above, an empty text is not shown.
Fact = tuple[str, str | None]
COMPARED_COLUMNS = ("predicted", "measured", "predicted/measured")
EVENT_COLUMNS = ("at (UTC)", "event", "attempt", "state", "detail")


def title(trial: TrialRow, *, is_worked_on: bool) -> str:
    """`Trial 7: out of memory`. `is_worked_on`: its sweep has an orchestrator."""
    interrupted = f" ({INTERRUPTED})" if not is_worked_on and trial.state in UNDER_WAY else ""
    return f"Trial {trial.id}: {trial.state.replace('_', ' ')}{interrupted}"


def head_facts(detail: TrialDetail, *, is_worked_on: bool) -> list[Fact]:
    """Its sweep, cell and layout, why it was tried or pruned, and whether it was interrupted."""
    trial, layout = detail.trial, detail.trial.layout
    # A measured trial may have an attempt that repeats it.
    is_under_way = trial.state in UNDER_WAY or any(one.ended_at is None for one in detail.attempts)
    sizes = f"world size {layout.world_size}, global batch {layout.global_batch_size}"
    proof = None
    if trial.condemned_by is not None:
        proof = f"trial {trial.condemned_by}: this layout needs at least as much memory"
    return [
        ("sweep", detail.sweep_name),
        ("cell", detail.cell.cell.key),
        ("layout", layout.key),
        ("", f"{sizes}, {layout.short}"),
        ("why", trial.why),
        ("pruned because of", proof),
        (INTERRUPTED, WHAT_INTERRUPTED_IS if not is_worked_on and is_under_way else None),
    ]


def compared_rows(trial: TrialRow) -> list[list[str]]:
    """Predicted and measured values: a name, and COMPARED_COLUMNS.

    Predictions are of what the program allocates: another peak is shown, but not compared.
    """
    predicted_rate = trial.predicted_tokens_per_second_per_gpu
    measured_rate, peak = trial.tokens_per_second_per_gpu, trial.peak_memory_allocated_bytes
    name, predicted, _, ratio = _compared(
        "peak memory", trial.predicted_memory_bytes, peak, show_as.memory
    )
    return [
        _compared("tokens/s/GPU", predicted_rate, measured_rate, show_as.tokens_rate),
        [name, predicted, memory_text(trial), ratio],
    ]


def _compared(
    name: str,
    predicted: float | None,
    measured: float | None,
    text: Callable[[float | None], str],
) -> list[str]:
    ratio = f"{predicted / measured:.2f}" if predicted is not None and measured else show_as.UNKNOWN
    return [name, text(predicted), text(measured), ratio]


def attempt_title(attempt: AttemptRow, attempts: Sequence[AttemptRow]) -> str:
    """`Attempt 2: measured`, and which of several measured runs of its trial counts."""
    counting = _counting_text(attempt, attempts)
    return f"Attempt {attempt.number}: {attempt.state.replace('_', ' ')}{counting}"


def _counting_text(attempt: AttemptRow, attempts: Sequence[AttemptRow]) -> str:
    if not attempt.still_counts:
        counting = next((one for one in attempts if one.pooled and not one.superseded), None)
        if attempt.measurement is None or counting is None:
            return ", superseded: it does not count"
        if attempt.fingerprint != counting.fingerprint:
            return f"; attempt {counting.number} counts, with other code or software"
        return ", superseded: it does not count"
    num_runs = sum(one.pooled for one in attempts)
    if not attempt.pooled or num_runs < 2:
        return ""
    if not attempt.superseded:
        return f"; this one counts, the median of {num_runs} runs"
    median = next((one.number for one in attempts if one.pooled and not one.superseded), None)
    named = f"attempt {median}" if median is not None else "another one"
    return f"; {named} counts, the median of {num_runs} runs"


def attempt_facts(attempt: AttemptRow, num_gpus: int) -> list[Fact]:
    """Return when, where and with which software it ran, and its measurement or failure."""
    started = f"{show_as.at(attempt.started_at)} UTC"
    if attempt.ended_at is not None:
        seconds = show_as.age_seconds(attempt.started_at, attempt.ended_at)
        # Simulated and replayed attempts report phases that last longer than the attempt.
        if sum(attempt.phase_seconds.values()) < 2 * seconds + 1:
            started += f", took {show_as.duration(seconds)}"
    phases = [
        f"{phase.replace('_', ' ')} {show_as.duration(value)}"
        for phase, value in attempt.phase_seconds.items()
    ]
    in_all = f"; {show_as.duration(sum(attempt.phase_seconds.values()))} in all"
    killed = attempt.processes_killed
    facts = [
        ("made for", attempt.purpose),
        ("started", started),
        ("nodes", ", ".join(attempt.nodes or ())),
        ("shared nodes", "other trials ran on them too" if attempt.shared_nodes else None),
        ("machine load", _load_text(attempt.load)),
        ("phases", ", ".join(phases) + in_all if phases else None),
        ("", _compiling_text(attempt)),
        *_reserved_facts(attempt, num_gpus),
        ("", _more_than_reserved(attempt, num_gpus)),
        ("processes killed", f"{killed} in addition to the ranks" if killed else None),
        ("environment", _environment_text(attempt.environment or {})),
        ("fingerprint", _fingerprint_text(attempt)),
    ]
    if attempt.measurement is not None:
        facts += _measurement_facts(attempt.measurement, attempt)
    if attempt.failure is not None:
        facts += _failure_facts(attempt.failure)
    return facts


def log_lines(attempt: AttemptRow) -> list[str]:
    """The last lines of the rank that failed."""
    if attempt.failure is None or not attempt.failure.log_tail.strip():
        return []
    return attempt.failure.log_tail.rstrip().splitlines()[-LOG_LINES_SHOWN:]


def event_rows(detail: TrialDetail) -> list[list[str]]:
    """Its events, oldest first, by EVENT_COLUMNS."""
    return [
        [
            show_as.at(event.at),
            event.event,
            str(event.attempt) if event.attempt is not None else "",
            " -> ".join(state for state in (event.from_state, event.to_state) if state),
            json_text(event.detail)[:EVENT_DETAIL_CHARACTERS] if event.detail else "",
        ]
        for event in detail.events
    ]


def _reserved_facts(attempt: AttemptRow, num_gpus: int) -> list[Fact]:
    """Return what its GPUs were reserved for, and for how long before and after its phases."""
    seconds_of = attempt.reserved(num_gpus)
    if seconds_of is None or not seconds_of.reserved:
        return []
    seconds = seconds_of.reserved / num_gpus
    total = f"{show_as.duration(seconds)} of {show_as.counted(num_gpus, 'GPU')}"
    parts = seconds_of.parts
    if attempt.measurement is not None:
        # What was measured has not failed.
        parts["no_longer_counted"] = parts.pop("failed")
    hours = f"{show_as.gpu_hours(seconds_of.reserved)}: {show_as.shares(parts)}"
    outside, text = seconds - sum(attempt.phase_seconds.values()), None
    if seconds_of.startup and outside >= SHORTEST_SHOWN_SECONDS:
        text = (
            "start-up is the time without steps: part of it is in the phases, and"
            f" {show_as.duration(outside)} of it before and after them (agents, launcher, clean-up)"
        )
    return [("GPU-hours", f"{hours} ({total})"), ("", text)]


def _compiling_text(attempt: AttemptRow) -> str | None:
    """Say how much of the phases was compiling, most of it of the first step."""
    if attempt.measurement is None or not attempt.measurement.compile_seconds:
        return None
    return f"of these, compiling {show_as.duration(attempt.measurement.compile_seconds)}"


def _more_than_reserved(attempt: AttemptRow, num_gpus: int) -> str | None:
    """Say that the reported steps take longer than the attempt did: all its time is "useful"."""
    if attempt.measurement is None or attempt.gpu_seconds is None or attempt.timed_seconds is None:
        return None
    steps, reserved = sum(attempt.measurement.step_seconds), attempt.gpu_seconds / num_gpus
    if steps <= reserved or attempt.timed_seconds < reserved:
        return None
    return (
        f"the program reported {show_as.duration(steps)} of steps, but its GPUs were reserved for"
        f" {show_as.duration(reserved)}: it did not run them in real time"
    )


def _load_text(load: MachineLoad) -> str | None:
    """The use of cores by others, and the GPUs' clocks; first what disturbed the result."""
    if not load.is_known:
        return None
    texts = [disturbed] if (disturbed := disturbance_text(load)) is not None else []
    if load.cpu_cores is not None and load.others_cpu_cores is not None:
        shares = {
            "its own": load.own_cpu_cores,
            "its sweep's": load.sweep_cpu_cores,
            "others'": load.others_cpu_cores,
        }
        used = [f"{name} {cores:.1f}" for name, cores in shares.items() if cores is not None]
        texts.append(f"of {load.cpu_cores:g} cores: {', '.join(used)}")
    if load.gpu_clock_ratio is not None:
        clock = f"GPUs at {load.gpu_clock_ratio:.0%} of their clock"
        if load.gpu_temperature_celsius is not None:
            clock += f", {load.gpu_temperature_celsius:.0f} °C"
        if load.gpu_throttle_reasons:
            reasons = [reason.replace("_", " ") for reason in load.gpu_throttle_reasons]
            clock += f", limited by {', '.join(reasons)}"
        texts.append(clock)
    return "; ".join(texts)


def _environment_text(environment: Mapping[str, Any]) -> str:
    """`NAME=value, ...`; if nodes differ, `NAME=value on NODE / value on NODE`."""

    def text(value: str | Mapping[str, str | None]) -> str:
        if isinstance(value, str):
            return value
        return " / ".join(f"{one or 'not set'} on {node}" for node, one in value.items())

    return ", ".join(f"{name}={text(value)}" for name, value in environment.items())


def _fingerprint_text(attempt: AttemptRow) -> str | None:
    fingerprint = attempt.fingerprint
    if fingerprint is None:
        return None
    parts = [fingerprint.digest, f"layout-sweep {fingerprint.orchestrator_version}"]
    if fingerprint.git_sha:
        parts.append(f"git {fingerprint.git_sha[:12]}")
        if fingerprint.dirty_diff_digest:
            parts.append(f"uncommitted changes {fingerprint.dirty_diff_digest[:8]}")
    elif fingerprint.dirty_diff_digest:
        parts.append(f"program {fingerprint.dirty_diff_digest}")
    stack = fingerprint.stack.model_dump().items()
    parts += [f"{name} {value}" for name, value in stack if value is not None]
    return ", ".join([*parts, *(f"{name}={value}" for name, value in fingerprint.settings)])


def _measurement_facts(measurement: Measurement, attempt: AttemptRow) -> list[Fact]:
    rate, all_gpus = measurement.tokens_per_second_per_gpu, measurement.tokens_per_second
    speed = f"{show_as.tokens_rate(rate)}, all GPUs {show_as.tokens_rate(all_gpus)}"
    mfu = None
    if measurement.mfu is not None:
        mfu = f"{show_as.percent(measurement.mfu)}, {show_as.percent(measurement.hfu)}"
    peak = None
    if measurement.peak_flops is not None:
        source = measurement.peak_flops_source or "unknown source"
        peak = f"{measurement.peak_flops / 1e12:,.3g} TFLOP/s per device ({source})"
    seen = None
    if measurement.peak_memory_driver_bytes is not None:
        kind = str(measurement.peak_memory_driver_kind)
        seen = f"{show_as.memory(measurement.peak_memory_driver_bytes)} {_SEEN_MEMORY[kind]}"
    parts = (attempt.memory_by_part or {}).items()
    retries = None
    if measurement.allocator_retries:
        edge = ": thrashing at the memory edge" if measurement.thrashing else ""
        retries = f"{measurement.allocator_retries}{edge}"
    if measurement.allocator_ooms:
        retries = f"{retries or 0}, and {measurement.allocator_ooms} out-of-memory errors"
    loss = None
    if measurement.loss_first is not None and measurement.loss_last is not None:
        loss = f"{measurement.loss_first:.4f} first, {measurement.loss_last:.4f} last"
    return [
        ("tokens/s/GPU", speed),
        ("step", _step_text(measurement)),
        ("", f"not fully checked: {measurement.unchecked}" if measurement.unchecked else None),
        ("MFU, HFU", mfu),
        ("", f"formula {measurement.mfu_formula}"),
        ("peak", peak),
        ("memory", _memory_text(measurement)),
        ("", seen),
        ("", ", ".join(f"{part} {show_as.memory(size)}" for part, size in parts)),
        ("allocator retries", retries),
        ("attention", measurement.attention_kernel),
        ("loss", loss),
        ("extra", json_text(dict(measurement.extra)) if measurement.extra else None),
        *_gpu_facts(attempt.gpu, rate),
    ]


def _step_text(measurement: Measurement) -> str:
    from orchestrator.core.trial.measurement import why_unsure  # pydantic, 0.05 s

    steps = measurement.step_time
    relative = steps.relative_confidence
    median = show_as.with_confidence(show_as.step_time(steps.median), relative)
    if relative is not None and not show_as.is_too_wide(relative):
        median += " (95 %)"
    text = f"median {median}, IQR {show_as.step_time(steps.iqr)}, {steps.num_steps} steps"
    why = why_unsure(
        confident=measurement.confident,
        num_steps=steps.num_steps,
        relative_confidence=steps.relative_confidence,
        implausible=measurement.implausible,
        unsteady=measurement.unsteady,
        step_seconds_bound=measurement.step_seconds_bound,
    )
    return text if why is None else f"{text}; less sure than asked for: {why}"


def _memory_text(measurement: Measurement) -> str:
    """Return the peaks that the program reported, the first one with the device's limit."""
    limit = measurement.device_memory_bytes
    more = {
        "active": measurement.peak_memory_active_bytes,
        "reserved": measurement.peak_memory_reserved_bytes,
        "in pieces": measurement.inactive_split_bytes,
        "device used": measurement.device_used_bytes,
    }
    return (
        f"allocated {show_as.memory_of(measurement.peak_memory_allocated_bytes, limit)}"
        + "".join(
            f", {what} {show_as.memory(size)}" for what, size in more.items() if size is not None
        )
    )


def _gpu_facts(gpu: GpuUsage | None, tokens_per_second_per_gpu: float) -> list[tuple[str, Any]]:
    """Return what is known about the devices while steps were timed."""
    if gpu is None:
        return []
    power = clock = None
    if (watts := gpu.power_watts) is not None:
        power = f"{watts:.0f} W, {watts / tokens_per_second_per_gpu:.3g} J per token"
    if gpu.clock_mhz is not None and gpu.lowest_clock_mhz is not None:
        clock = f"median {gpu.clock_mhz:.0f} MHz, lowest {gpu.lowest_clock_mhz:.0f} MHz"
    active = {
        "multiprocessors": gpu.sm_activity,
        "tensor cores": gpu.tensor_activity,
        "memory bandwidth": gpu.dram_activity,
    }
    known = [f"{what} {show_as.percent(share)}" for what, share in active.items() if share]
    busy = f"{show_as.percent(gpu.busy)} of the time a kernel ran" if gpu.busy is not None else None
    return [
        ("GPU busy", busy),
        ("GPU active", ", ".join(known) or None),
        ("GPU power", power),
        ("SM clock", clock),
    ]


def _failure_facts(failure: Failure) -> list[Fact]:
    where = {
        "rank": failure.rank,
        "node": failure.node or None,
        "phase": failure.phase or None,
        "step": failure.step,
        "signal": failure.signal,
        "exit code": failure.exit_code if failure.signal is None else None,
    }
    return [
        ("failure", failure.kind),
        ("", failure.message),
        ("where", ", ".join(f"{k} {v}" for k, v in where.items() if v is not None)),
        ("out of memory in", _out_of_memory_in(failure)),
        ("evidence", failure.evidence),
        ("log", failure.log_path),
    ]


_STEP_PARTS = {
    "init": "building the model, before the first step",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
}


def _out_of_memory_in(failure: Failure) -> str | None:
    part = failure.memory.step_part if failure.memory is not None else None
    if part is None:
        return None
    text = _STEP_PARTS[part]
    # Ranks count steps from 0, people from 1.
    return text if part == "init" or failure.step is None else f"{text} of step {failure.step + 1}"
