"""Any program as a workload, with its layout as arguments or variables: one per rank, as torchrun
starts it, or one per node, which starts its ranks itself.

Its numbers come from rank 0: one small JSON file (SWEEP_RESULT_FILE: the fields of a result, only
step_seconds required), or JSON lines while it runs (SWEEP_METRICS_FILE: {"step_seconds": 0.52,
"loss": 9.1} per optimizer step, warm-up included; a loss that is not finite ends it at once). When
they are enough, the program is asked to end, and then ended. The rank itself is this module: it
waits for the program, ends with the same exit code or signal, and the program dies with it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.metrics_section import LinePatterns
from orchestrator.core.trial.protocol import Phase
from orchestrator.core.trial.redaction import Secrets
from workloads.command.handover import Handover, hand_over_memory
from workloads.command.metrics import Metrics
from workloads.command.nesting import NestingWatch
from workloads.command.polling import LONGEST_SECONDS, exit_code_within, poll_seconds
from workloads.command.printed import PrintedMetrics
from workloads.command.program import CannotStart, Program, ProgramPlace, reporting_rank, start
from workloads.command.stop import FinalDocument, ask_to_end, wait_for_end
from workloads.command.traces import follow_profiled
from workloads.options import parse_options
from workloads.rank import ConfigRejected, Rank, context, write_stacks_if_asked

_LAST_LINE_SECONDS = 0.3


def main() -> int:
    write_stacks_if_asked()
    rank = context()
    try:
        options = parse_options(CommandOptions, rank.request.options)
        secrets = Secrets({name: os.environ.get(name, "") for name in options.env_from})
        printed = _printed(options, rank, secrets)
        program = start(options, rank, output=printed.writer if printed is not None else None)
    except (ConfigRejected, ValueError) as exc:  # ValueError: a template
        return _reject(rank, exc)
    except CannotStart as exc:
        # In the form of an exception, whose text becomes the message of the failure.
        sys.stderr.write(f"workloads.command.StartError: {exc}\n")
        return 127
    if rank.request.profile is not None:
        if printed is not None:
            printed.start()
        code = follow_profiled(program, rank)
        if printed is not None:
            printed.close()
        return _end_as(code)
    if printed is not None:
        printed.start()
    metrics = Metrics(
        program.place.of_first_rank.metrics_file,
        rank,
        printed=printed,
        steps_per_line=options.metrics.every if options.metrics is not None else 1,
        names_num_steps=program.names_num_steps,
        began=program.began,
    )
    rank.heartbeat(Phase.FIRST_STEP)
    try:
        code = _wait(program, rank, metrics, options, secrets)
    except ConfigRejected as exc:
        code = _reject(rank, exc)
    except FileNotFoundError:
        if rank.run_dir.exists():
            raise
        gone = f"the program removed its run directory {rank.run_dir}"
        sys.stderr.write(f"{gone}, through which its numbers are handed over\n")
        code = 1
    if printed is not None:
        printed.close()
    return _end_as(code)


def _printed(options: CommandOptions, rank: Rank, secrets: Secrets) -> PrintedMetrics | None:
    """The reader of the program's output; None: nothing is read from it."""
    if options.metrics is None:
        return None
    request = rank.request
    patterns = LinePatterns(
        options.metrics,
        tokens_per_step=request.layout.global_batch_size * request.sequence_length,
        world_size=request.layout.world_size,
    )
    first = rank.rank - rank.local_rank
    on_node = range(first, first + (1 if request.one_rank_per_node else rank.local_world_size))
    return PrintedMetrics(
        patterns,
        rank=rank.rank,
        others=[other for other in on_node if other != rank.rank],
        metrics_file=ProgramPlace.of(rank).of_first_rank.metrics_file,
        secrets=secrets,
        several_ranks=request.one_rank_per_node and rank.local_world_size > 1,
    )


def _wait(
    program: Program, rank: Rank, metrics: Metrics, options: CommandOptions, secrets: Secrets
) -> int:
    """Wait for the program, and hand over what it told. Returns the exit code."""
    place = program.place
    if rank.rank != reporting_rank(rank):
        code = _follow(program, rank, metrics)
        if code == 0:
            hand_over_memory(
                rank,
                program.process.pid,
                document=place.result_file,
                lines=place.metrics_file,
                secrets=secrets,
            )
        return code
    handover = Handover(
        rank=rank,
        program=program.process.pid,
        document=place.result_file,
        metrics=metrics,
        secrets=secrets,
    )
    nesting = NestingWatch(program, rank, processes=options.processes)
    return _lead(program, metrics, handover, nesting)


def _lead(program: Program, metrics: Metrics, handover: Handover, nesting: NestingWatch) -> int:
    """Wait for the program of the rank that reports, and hand over its numbers.

    Returns the exit code.

    The limit of the first step holds for a program that writes nothing until its end.
    """
    document = FinalDocument(handover)
    while (code := exit_code_within(program.process, poll_seconds(metrics.step_seconds))) is None:
        metrics.read()
        if metrics.diverged is not None:
            return handover.report_diverged()
        if metrics.bad_step is not None:
            break
        nesting.check(metrics.num_steps_told, metrics.step_seconds)
        if (metrics.has_enough and not metrics.awaits_more) or document.is_written():
            return _end(program, metrics, handover, nesting)
    if metrics.printed is not None and code == 0:
        metrics.printed.finish()
        metrics.printed.await_others()
    metrics.read_to_the_end()
    if metrics.bad_step is not None and not code:
        handover.refuse(metrics.bad_step)
        return 0
    assert code is not None, "the program has ended"
    # A program that exits may have noticed the divergence itself; a signal counts more than that.
    has_exited = 0 <= code < 128
    if has_exited and metrics.ends_diverged(well=code == 0):
        return handover.report_diverged()
    nesting.check_number(metrics.num_steps_told, metrics.num_steps_asked)
    if code != 0 and metrics.has_enough:
        return _end(program, metrics, handover, nesting)
    if code == 0:
        handover.hand_over(enough=metrics.has_enough)
    if metrics.has_enough:
        ask_to_end(program.place.stop_file)  # the other ranks
    return code


def _end(program: Program, metrics: Metrics, handover: Handover, nesting: NestingWatch) -> int:
    """Hand over numbers that are enough, and end the program. Returns the exit code."""
    if metrics.has_enough:
        handover.hand_over_enough()
    elif not handover.complete():
        return 1
    if metrics.printed is not None:
        metrics.printed.search_no_more()
    # From here on other ranks may fail because this one ends.
    ask_to_end(program.place.stop_file)
    # Lines that still come count no more, and show the pace of a program with short steps.
    if wait_for_end(program.process, metrics.step_seconds, meanwhile=metrics.read_later):
        metrics.read_to_the_end()
        nesting.check_number(metrics.num_steps_told, metrics.num_steps_asked)
    return 0 if handover.complete() else 1


def _follow(program: Program, rank: Rank, metrics: Metrics) -> int:
    """Wait for the program of a rank that does not report the steps. Returns the exit code.

    On the node of the rank that does, each new line of metrics is a step of every rank. On other
    nodes nothing shows its progress: there only the total limit holds, and that rank's launcher
    detects a hang.
    """
    sees_steps = rank.rank - rank.local_rank == reporting_rank(rank)
    stop_file = program.place.stop_file
    while (code := exit_code_within(program.process, poll_seconds(metrics.step_seconds))) is None:
        if not sees_steps:
            rank.heartbeat(Phase.STEADY)
            if metrics.printed is not None:
                metrics.printed.read()
            continue
        metrics.read()
        if stop_file.exists():
            rank.heartbeat(Phase.TEARDOWN, rank.step)
            if metrics.printed is not None:
                metrics.printed.search_no_more()
            wait_for_end(program.process, metrics.step_seconds, meanwhile=metrics.read)
            return 0
    if metrics.printed is not None:
        metrics.printed.finish()
    if code != 0 and not (sees_steps and _has_enough_soon(metrics, stop_file)):
        return code
    rank.heartbeat(Phase.TEARDOWN, rank.step)  # the numbers are another rank's
    return 0


def _has_enough_soon(metrics: Metrics, stop_file: Path) -> bool:
    """Return whether a program failed after the last step that is needed.

    Rank 0 may write that step a moment after another rank has failed in what follows it.
    """
    until = time.monotonic() + _LAST_LINE_SECONDS
    while not stop_file.exists():
        metrics.read()
        if metrics.has_enough:
            break
        if not metrics.times_steps or time.monotonic() > until:
            return False
        time.sleep(LONGEST_SECONDS)
    return True


def _reject(rank: Rank, exc: Exception) -> int:
    sys.stderr.write(f"workloads.rank.ConfigRejected: {exc}\n")
    rejected = ConfigRejected(str(exc))
    if rank.finished:
        rank.withdraw(rejected)
    else:
        rank.refuse(rejected)
    return 2


def _end_as(code: int) -> int:
    """End as the program ended, so that the launcher judges the program and not this wrapper."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code
