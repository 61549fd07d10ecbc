"""Judges whether a user's program kept its contract in one short attempt, point by point.

Each check states the observation, and what to do about it. It knows no process and no file.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.machines.check import Check, fail, ok, warn
from orchestrator.core.problem.layout import PARALLEL_AXES, Layout
from orchestrator.core.trial.failure_kinds import (
    HANG_KINDS,
    OUT_OF_MEMORY_KINDS,
    POLICIES,
    Failure,
    FailureKind,
)
from orchestrator.core.trial.line_count import RUN_AS_ASKED
from orchestrator.core.trial.line_groups import LineGroups
from orchestrator.core.trial.measurement import Measurement
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.plausibility import judge_groups, judge_pace, without_gpus
from orchestrator.core.trial.protocol import (
    STACKS_BEGIN,
    Device,
    DriverMemoryKind,
    RankResult,
)
from orchestrator.core.trial.unchecked import UNCHECKED_ADVICE, how_steps_arrived
from orchestrator.core.trial.unread_output import TELL_STEPS, why_unread

# An axis need not be passed if these are, from which it follows.
_FOLLOWS_FROM: Mapping[str, tuple[str, ...]] = {
    "grad_accum_steps": ("micro_batch_size", "global_batch_size"),
    "micro_batch_size": ("grad_accum_steps", "global_batch_size"),
}
MIB = 1 << 20
# A shorter attempt may end before its ranks are seen.
_SEEN_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Steps of rank 0 as they came: how many there were, at which seconds since the start."""

    num_steps: Sequence[int]
    at_seconds: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContractRun:
    """One short attempt of a program, as it was seen from outside and as it tells."""

    world_size: int
    layout: Layout
    device: Device
    report: NodeReport
    outcome: Measurement | Failure
    # From the start to the end of the last process.
    seconds: float
    steps: StepTimes
    num_steps_asked: int
    steps_per_line: int = 1
    ranks: Collection[int]  # whose programs were seen
    connected_ranks: Collection[int]  # that were connected to another
    # The result of another attempt with more steps: see `steps_for_pace`.
    longer: RankResult | None = None
    # The pattern of metrics.log, if the program's output is searched for step times.
    pattern: str | None = None

    @property
    def result(self) -> RankResult | None:
        return next((one.result for one in self.report.ranks if one.result is not None), None)

    @property
    def failure(self) -> Failure | None:
        return self.outcome if isinstance(self.outcome, Failure) else None


def layout_check(varying: Mapping[str, Sequence[str]], used: Collection[str]) -> Check:
    """Check that what varies reaches the program.

    `varying`: the axes of the sweep that have several values. `used`: the names that the command's
    templates have, or whose variable SWEEP_NAME the script reads.
    """
    missing = not_passed(varying, used)
    passed = f"passed: {', '.join(sorted(used)) or 'nothing'}"
    if not missing:
        return ok(
            "layout", passed if used or varying else "one layout, and nothing of it is passed"
        )
    named = ", ".join(f"{name} ({', '.join(varying[name][:4])})" for name in missing)
    return warn("layout", f"{passed}; nowhere: {named}", how_to_pass(missing))


def not_passed(varying: Collection[str], passed: Collection[str]) -> list[str]:
    """Return what varies and is not passed, but for what follows from that or from the ranks."""
    sizes = [name for name in PARALLEL_AXES if name in varying and name not in passed]
    # The number of ranks tells the size that is left.
    told = {"world_size", "data_parallel_size", *(sizes if len(sizes) == 1 else ())}
    return [
        name
        for name in varying
        if name not in passed
        and name not in told
        and not (name in _FOLLOWS_FROM and set(_FOLLOWS_FROM[name]) <= set(passed))
    ]


def how_to_pass(names: Sequence[str]) -> str:
    """Return why it matters that these names are not passed, and how to pass them."""
    ways = [" ".join(f"{{{name}}}" for name in names)]
    for name in names:
        others = _FOLLOWS_FROM.get(name, ())
        if others and not set(others) & set(names):
            ways.append(
                f"{' and '.join(f'{{{one}}}' for one in others)}, from which {name} follows"
            )
    variables = ", ".join(f"SWEEP_{name.upper()}" for name in names)
    varies, them, plural = (
        ("it varies", "it", "") if len(names) == 1 else ("they vary", "them", "s")
    )
    return (
        f"{varies}, and neither argv, env, files nor the script names {them}. Layouts may not be"
        f" trained as their trials say: add {', or '.join(ways)}; or read {variables}. If another"
        f" file of the program reads {them}, name the variable{plural} in a comment of the script"
    )


# Steps that take this long together show their pace, if their lines come one by one.
_PACE_SECONDS = 1.5
# The most seconds and steps of another attempt that is to show the pace.
_LONGER_SECONDS, _MOST_STEPS = 60.0, 1000


def steps_for_pace(run: ContractRun) -> int | None:
    """Return the number of steps of another attempt that should show the pace of short steps.

    None: the pace is known, cannot be known, or would take too long.
    """
    result = run.result
    if result is None or run.failure is not None or run.steps_per_line > 1:
        return None
    steps = [*result.warmup_seconds, *result.step_seconds]
    is_known = judge_pace(result, layout=run.layout) is not None
    if is_known or sum(result.step_seconds) > _SEEN_SECONDS:
        return None
    if (
        len(result.seen.reads if result.seen is not None else ()) > 1
        and LineGroups.of(result) is None
    ):
        return None
    wanted = _PACE_SECONDS / statistics.median(steps)
    possible = len(steps) * _LONGER_SECONDS / max(run.seconds, _SEEN_SECONDS)
    num = int(min(wanted, possible, _MOST_STEPS))
    return num if num > len(steps) else None


def judge_contract(run: ContractRun) -> list[Check]:
    """Return the points of the contract, in the order in which a program reaches them."""
    checks = [_ranks(run)]
    if run.steps.num_steps or _may_have_told_no_step(run):
        checks.append(_steps(run))
    if run.report.failure is None:
        pace = _pace(run)
        checks += [pace, _numbers(run, pace)]
    if run.failure is None:
        checks += [_memory(run), _mfu(run)]
    return [*checks, _end(run), _left_over(run)]


def _ranks(run: ContractRun) -> Check:
    num, seen = run.world_size, len(run.ranks)
    if num == 1:
        return ok("ranks", "1 rank; it has no other to connect to")
    if seen == 0:
        return ok("ranks", f"{num} ranks were started; which of them met is not known")
    if seen < num and run.seconds > _SEEN_SECONDS:
        return fail(
            "ranks",
            f"{seen} of {num} ranks were seen",
            "each rank's program gets its RANK; one that starts ranks itself has to give them one",
        )
    alone = sorted(set(run.ranks) - set(run.connected_ranks))
    if not alone:
        return ok("ranks", f"{num} ranks met")
    if run.seconds < _SEEN_SECONDS:
        return ok("ranks", f"{num} ranks, too short to see whether they met")
    who = "no rank" if len(alone) == seen else f"rank {', '.join(map(str, alone))} not"
    return warn(
        "ranks",
        f"{num} ranks, {who} connected to another",
        "does each train alone? init_process_group() takes RANK, WORLD_SIZE, MASTER_ADDR and"
        " MASTER_PORT from the environment; ranks that meet by a file are not seen here",
    )


# Without a step, a program that failed in another way need not tell its steps better.
_WITHOUT_STEPS = HANG_KINDS | {FailureKind.BAD_RESULT}


def _may_have_told_no_step(run: ContractRun) -> bool:
    """Return whether a program came so far that it should have told a step."""
    failure = run.report.failure
    return failure is None or failure.kind in _WITHOUT_STEPS


def _steps(run: ContractRun) -> Check:
    result, times = run.result, run.steps
    if times.num_steps:
        num, first, last = times.num_steps[-1], times.at_seconds[0], times.at_seconds[-1]
        asked = f"of {run.num_steps_asked} steps"
        if run.steps_per_line > 1:
            asked = (
                f"lines of {run.steps_per_line} steps each, {run.num_steps_asked} were asked for"
            )
        found = f"{num} {asked}, the first after {first:.1f} s"
        found = f"{found}, the last after {last:.1f} s" if num > 1 else found
        return (
            warn("steps", found, _TOO_FEW) if _may_cover_several(run, num) else ok("steps", found)
        )
    if result is not None:
        return ok(
            "steps",
            f"{len(result.step_seconds)} steps in a document at the end",
            "with a line per step a hang is noticed sooner, and a divergence at once",
        )
    failure = run.report.failure
    is_told = failure is not None and failure.kind is FailureKind.BAD_RESULT
    return fail(
        "steps",
        "no step came; `end` says what did" if is_told else "no step came",
        _advice_on_steps(run),
    )


def _advice_on_steps(run: ContractRun) -> str:
    if run.pattern is not None:
        return _pattern_advice(run, run.pattern)
    return why_unread(_printed_lines(run)) or (
        f"after each optimizer step have rank 0 {TELL_STEPS}; flush each line"
    )


# Characters of a line that a pattern was tried on.
_MOST_QUOTED = 120


def _printed_lines(run: ContractRun) -> list[str]:
    """Return the last lines that the program printed, without the rank's own error.

    That is the last line of its log, and the end of the message, which may be cut.
    """
    failure = run.report.failure
    log, message = (failure.log_tail, failure.message) if failure is not None else ("", "")
    own = message.partition(": ")[2].strip()
    printed = [line.strip() for line in log.partition(STACKS_BEGIN)[0].splitlines()]
    return [line for line in printed if line and not (own and line.startswith(own))]


def _pattern_advice(run: ContractRun, pattern: str) -> str:
    """Quote the pattern, and a line that it should have found a number in: the last with a digit.

    The last line of all often says only that the program is done.
    """
    lines = _printed_lines(run)
    lines = [line for line in lines if re.search(r"\d", line)] or lines
    if not lines:
        return (
            f"metrics.log is '{pattern}', and the program printed no line: have rank 0 print"
            " one after each optimizer step and flush it"
        )
    return (
        f"metrics.log is '{pattern}', and it was tried on lines such as"
        f" '{lines[-1][:_MOST_QUOTED]}': correct the pattern, which takes the number in its"
        " ( )"
    )


_TOO_FEW = (
    "it ended by itself before all came. If a line covers several steps, write one for each, or"
    ' give each a field "step": a sweep may end the program before this shows. If it ran no more,'
    f" {RUN_AS_ASKED}"
)


def _may_cover_several(run: ContractRun, num_lines: int) -> bool:
    """Return whether a program ended with fewer lines than steps were asked for, and says no more.

    A trial marks this only if the number fits exactly, since a mark costs a layout.
    """
    seen = run.result.seen if run.result is not None else None
    return (
        seen is not None
        and seen.ended_itself
        and seen.knows_num_steps
        and seen.steps_per_line is None
        and num_lines * run.steps_per_line < run.num_steps_asked
    )


def _pace(run: ContractRun) -> Check:
    """Compare the time between lines with the times that they report, as for every trial."""
    result = run.longer or run.result
    judged = judge_pace(result, layout=run.layout) if result is not None else None
    if result is not None and (reason := judge_groups(result)) is not None:
        return fail("pace", _for_device(reason, run.device))
    if result is not None and (how := how_steps_arrived(result)) is not None:
        return warn("pace", f"not comparable: {how}", UNCHECKED_ADVICE)
    if judged is None:
        return ok("pace", "not comparable: too few steps arrived one by one")
    if judged.reason is not None:
        return fail("pace", _for_device(judged.reason, run.device))
    return ok(
        "pace",
        f"{judged.num_steps} steps report {judged.told_seconds:.2f} s, and came within"
        f" {judged.passed_seconds:.2f} s",
    )


def _for_device(reason: str, device: Device) -> str:
    return without_gpus(reason) if device is Device.CPU else reason


def _numbers(run: ContractRun, pace: Check) -> Check:
    measured = run.outcome
    if isinstance(measured, Failure):
        return fail("numbers", measured.message, "nothing of this attempt would be measured")
    if measured.implausible is not None:
        reason = _for_device(measured.implausible, run.device)
        what = f"they cannot be true: {'see pace' if reason == pace.found else reason}"
        return fail("numbers", what, "they would be stored with this reason, and never win")
    found = (
        f"{measured.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, a step of"
        f" {_milliseconds(measured.step_time.median)}"
    )
    return ok("numbers", found)


def _milliseconds(seconds: float) -> str:
    number = seconds * 1e3
    return f"{number:,.0f} ms" if number >= 1e3 else f"{number:.4g} ms"


def _memory(run: ContractRun) -> Check:
    measured = run.outcome
    assert isinstance(measured, Measurement)
    peak, seen = measured.peak_memory_allocated_bytes, measured.peak_memory_driver_bytes
    if peak is not None:
        return ok("memory", f"{peak / MIB:,.0f} MiB at the peak, by the program")
    advice = "have each rank report peak_memory_allocated_bytes: torch.cuda.max_memory_allocated()"
    if run.device is Device.CPU:
        # The kernel knows the memory of a process on cores as well as the process itself.
        advice = "" if seen is not None else "have each rank report peak_memory_resident_bytes"
    if seen is not None:
        by = "driver" if measured.peak_memory_driver_kind is DriverMemoryKind.NVML else "kernel"
        return ok("memory", f"{seen / MIB:,.0f} MiB at the peak, as the {by} saw it", advice)
    return warn("memory", "neither reported nor seen", advice)


def _mfu(run: ContractRun) -> Check:
    measured = run.outcome
    assert isinstance(measured, Measurement)
    if measured.mfu is not None:
        peak = measured.peak_flops_source or "the reported peak"
        return ok("MFU", f"{measured.mfu:.1%} of {peak}")
    if run.device is Device.CPU:
        return ok("MFU", "none: a core has no data sheet")
    return warn("MFU", "none: the device's peak is unknown", "add peak_flops to the result")


def _end(run: ContractRun) -> Check:
    failure = run.report.failure
    if failure is None:
        how = "it ended by itself, with exit code 0"
        if run.report.has_enough:
            how = "it was ended, since its numbers were enough"
        return ok("end", f"{how}, after {run.seconds:.1f} s")
    return fail("end", f"{failure.kind}: {failure.message}", _fix(failure.kind))


def _fix(kind: FailureKind) -> str:
    """Return what to do after a failure outside a sweep: no trial exists, and the log follows."""
    if kind in OUT_OF_MEMORY_KINDS:
        return (
            "this layout does not fit, which a sweep finds out by itself: check another, as in"
            " axes.micro_batch_size=1"
        )
    if kind is FailureKind.USER_ERROR:
        return "fix what the last lines of its log show"
    if kind is FailureKind.CONFIG_REJECTED:
        return (
            "do what the message says; if only this layout is refused, check another, as in"
            " axes.micro_batch_size=1"
        )
    return POLICIES[kind].fix


def _left_over(run: ContractRun) -> Check:
    num = run.report.processes_killed
    processes = "1 process" if num == 1 else f"{num} processes"
    if run.report.has_enough and num:
        return ok("left over", f"nothing; {processes} that it had started ended with it")
    if num == 0:
        return ok("left over", "nothing")
    if any(rank.exit_code is None and rank.signal is None for rank in run.report.ranks):
        # Ranks that hung, or waited for one that had failed: no rank has left these.
        return ok("left over", f"not judged: ranks were ended by us, and {processes} with them")
    return warn(
        "left over",
        f"{processes}, ended after the ranks",
        "harmless here; a program that ends its helpers (data loaders, loggers) itself ends sooner",
    )
