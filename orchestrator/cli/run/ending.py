"""Prints the end of `sweep run`, and chooses its exit code."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.store import home
from orchestrator.cli.terminal.output import note
from orchestrator.core.errors import ClusterUnavailable
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report.quantities import counted
from orchestrator.report.remarks import implausible_text
from orchestrator.report.software_change import invalidate_command

if TYPE_CHECKING:
    from orchestrator.core.problem.cell import Cell
    from orchestrator.core.sweepfile.spec import SweepSpec
    from orchestrator.report.software_change import SoftwareChange
    from orchestrator.sweep.progress import SweepResult

_MEASURED, _FAILED = "state = 'measured'", "state = 'failed'"
_WITH_NODES = "The same command continues when enough nodes are back."
EXIT_SOME_FAILED = 3
EXIT_NOTHING_FEASIBLE = 4


def exit_code(result: SweepResult, received: int | None, *, strict: bool) -> int:
    """The exit code; `received` is the signal that interrupted the sweep."""
    from orchestrator.sweep.progress import StopReason

    if result.interrupted or received is not None:
        return 128 + (received or signal.SIGINT)
    if StopReason.NODES in result.stopped.values():
        # The same command continues when enough nodes are back.
        return ClusterUnavailable.exit_code
    if result.nothing_feasible:
        return EXIT_NOTHING_FEASIBLE
    return EXIT_SOME_FAILED if strict and result.counts.get(TrialState.FAILED, 0) else 0


def print_ending(
    spec: SweepSpec,
    result: SweepResult,
    where: str,
    received: int | None,
    *,
    strict: bool = False,
    changes: Sequence[SoftwareChange] = (),
    cells: Collection[str] = (),
) -> None:
    """Say on stderr why the sweep ended and what is missing.

    `received`: the signal that did it; `changes`: of code or software, since the first numbers;
    `cells`: the keys of the file's cells, if the sweep has others.
    """
    count = result.counts.get
    parts = [f"{n} {state.replace('_', ' ')}" for state in TrialState if (n := count(state, 0))]
    parts += [f"{num} never tried"] if (num := sum(result.untried.values())) else []
    if result.interrupted:
        how = f"by {signal.Signals(received or signal.SIGINT).name}"
        if received in (None, signal.SIGINT):
            how = "on request"
        note(f"Stopped {how}. The same command continues: {', '.join(parts)}.")
    else:
        reasons = "; ".join(sorted({str(reason) for reason in result.stopped.values()}))
        note(f"Sweep {spec.name} ended ({reasons}): {', '.join(parts)}. Results: {where}")
        if received is not None:
            name = signal.Signals(received).name
            note(f"{name} came after that (exit code {128 + received}): nothing is lost.")
    num_failed = count(TrialState.FAILED, 0)
    if num_failed and not result.interrupted:
        is_code = exit_code(result, received, strict=strict) == EXIT_SOME_FAILED
        note(
            _failed_text(
                spec,
                num_failed,
                f" (exit code {EXIT_SOME_FAILED})" * is_code,
                cells=cells,
                changed=_program_changed_since(spec, result),
            )
        )
    for text in (
        *_trial_notes(spec, result),
        *_change_notes(spec, changes, cells, code_has_changed=result.code_has_changed),
        *_cell_notes(spec, result),
    ):
        note(text)


def _trial_notes(spec: SweepSpec, result: SweepResult) -> Iterator[str]:
    """Say which trials were not launched, and why."""
    from orchestrator.core.sweepfile.search_section import Strategy

    num = result.counts.get(TrialState.PRUNED, 0)
    if num and spec.search.strategy is Strategy.EXHAUSTIVE:
        yield (
            f"{num} of the layouts were not launched: others ran out of memory, and these need at"
            f" least as much (search.dominance is {spec.dominance}; search.dominance=off launches"
            " them too)"
        )


def _change_notes(
    spec: SweepSpec,
    changes: Sequence[SoftwareChange],
    cells: Collection[str],
    *,
    code_has_changed: bool,
) -> Iterator[str]:
    """Say which numbers have other code or software than others, or than a call would have now."""
    if code_has_changed and not any(change.is_apart or change.is_undone for change in changes):
        yield (
            "The code has changed since these numbers were measured, and nothing was measured"
            f" again.{_last_written_text(spec)} To measure them again, run this and then the same"
            f" `sweep run`: {invalidate_command(spec.name, _MEASURED, cells=cells)}"
        )
        return
    for change in changes:
        yield change.sentences(_last_written_text(spec) if change.is_of_code else "")


def _cell_notes(spec: SweepSpec, result: SweepResult) -> Iterator[str]:
    """Say of each cell without a confirmed best layout why it has none."""
    from orchestrator.sweep.progress import StopReason

    for cell, evidence in result.nothing_fits.items():
        yield (
            f"Nothing fits in {cell.key}: {evidence}. More GPUs, a higher ZeRO stage or full"
            " recomputation may help; `sweep plan` shows what is predicted to fit."
        )
    failed = [cell for cell, reason in result.stopped.items() if reason is StopReason.FAULTS]
    for cell in failed:
        yield (
            f"{cell.key} was stopped: its attempts failed again and again. `sweep trials"
            f" {spec.name}` shows how; the same command tries it again."
        )
    for cell in result.nothing_feasible:
        if cell not in result.nothing_fits and cell not in failed:
            yield _why_nothing(spec, result, cell)
    for cell, reason in result.stopped.items():
        if reason is StopReason.NODES and cell not in result.nothing_feasible:
            yield f"{cell.key} is not finished: {reason}. {_WITH_NODES}"
    for cell in result.unconfirmed:
        yield (
            f"The best layout of {cell.key} was measured only once: {result.stopped[cell]}, before"
            " it could be confirmed."
        )


def _last_written_text(spec: SweepSpec) -> str:
    """Name the files that may have made a user's program other code, as a sentence of its own."""
    from orchestrator.core.sweepfile.command_options import CommandOptions
    from orchestrator.sweep.provenance import last_written

    options = spec.workload.options
    if not isinstance(options, CommandOptions):
        return ""
    files = last_written(
        [*options.argv, *options.env.values()],
        cwd=Path(options.cwd) if options.cwd is not None else None,
        skip=[home.sweep_home()],
    )
    if not files:
        return ""
    return (
        " Of the files that count as its code, the last written are"
        f" {', '.join(map(str, files))}; keep a script that is no part of the program outside its"
        " folder or repository."
    )


def _program_changed_since(spec: SweepSpec, result: SweepResult) -> Path | None:
    """Return a file of the program that changed after the trials of a cell had failed.

    None: no file did, or every cell has a measurement.
    """
    from orchestrator.core.sweepfile.command_options import CommandOptions
    from orchestrator.sweep.provenance import changed_since

    options = spec.workload.options
    if not isinstance(options, CommandOptions) or not result.failed:
        return None
    return changed_since(
        [*options.argv, *options.env.values()],
        cwd=Path(options.cwd) if options.cwd is not None else None,
        moment=max(one.last_at.timestamp() for one in result.failed.values()),
    )


def _failed_text(
    spec: SweepSpec,
    num: int,
    exit_code_text: str,
    *,
    cells: Collection[str],
    changed: Path | None,
) -> str:
    shows = (
        f"{counted(num, 'trial')} failed{exit_code_text}: `sweep trials {spec.name} --state failed`"
        " shows how."
    )
    if spec.workload.name == "replay":
        return f"{shows} The replayed table has these failures, so they would fail again."
    again = invalidate_command(spec.name, _FAILED, cells=cells)
    if changed is not None:
        return (
            f"{shows} {changed} was changed after they failed, and `sweep run` does not try them"
            f" again by itself. To try them with the changed program, run this and then the same"
            f" `sweep run`: {again}"
        )
    return f"{shows} To try them again once the cause is fixed: {again}"


def _why_nothing(spec: SweepSpec, result: SweepResult, cell: Cell) -> str:
    from orchestrator.sweep.progress import BUDGETS, StopReason

    reason, num_launched = result.stopped[cell], result.launched.get(cell, 0)
    failed = result.failed.get(cell)
    if reason is StopReason.NODES:
        return f"Nothing was measured for {cell.key}: {reason}. {_WITH_NODES}"
    implausible = result.implausible.get(cell)
    if implausible:
        also = f", {failed.num:,} failed" if failed is not None else ""
        return (
            f"No layout of {cell.key} can be ranked: {len(implausible):,} measured{also}."
            f" {implausible_text(implausible)}. See `sweep show {next(iter(implausible))}`."
        )
    if reason not in BUDGETS and failed is not None:
        return (
            f"Nothing could be measured for {cell.key}: {counted(failed.num, 'trial')} failed,"
            f" the last with {failed.last}. See `sweep show {failed.last_id}`."
        )
    if reason not in BUDGETS and num_launched:
        return (
            f"No layout of {cell.key} can be ranked: {counted(num_launched, 'trial')} ran, and none"
            f" has numbers that count. `sweep trials {spec.name}` shows why."
        )
    if reason not in BUDGETS:
        return (
            f"Nothing could be measured for {cell.key}: see `sweep trials {spec.name}`, and"
            " `sweep plan` for the layouts that are not legal and why."
        )
    if num_launched:
        tried = counted(num_launched, "trial")
        return (
            f"Nothing was measured for {cell.key}: {reason} after {tried}; see"
            f" `sweep trials {spec.name}`."
        )
    return (
        f"Nothing was measured for {cell.key}: {reason} before its first trial. Raise the budget to"
        " continue with it."
    )
