"""The commands about whole sweeps: list, rename, rm."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import Db, FormatOption, Json, Yes, complete_names
from orchestrator.cli.store.defaults import existing_store, writable_store
from orchestrator.cli.store.sweep_folders import (
    Removal,
    finish_removal,
    folder_bytes,
    link_folder,
    note_removal,
    noted_removals,
)
from orchestrator.cli.terminal.output import (
    Column,
    Format,
    note,
    numbers,
    output_format,
    write_json,
    write_line,
    write_rows,
    write_table,
)
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.pretend.simulated_name import SIMULATED_SUFFIX
from orchestrator.report import quantities as show
from orchestrator.report.quantities import UNKNOWN, counted
from orchestrator.report.ranked_cells import rank_summaries

if TYPE_CHECKING:
    from db.read.rows import SweepRow, SweepSummary
    from db.store import Store

_COLUMNS = (
    "sweep", "state", "cells", "trials", "measured", "slowest_best_tokens_per_second_per_gpu",
    "fastest_best_tokens_per_second_per_gpu", "created_at", "changed_at", "folder_bytes",
)  # fmt: skip
_Sweep = Annotated[
    str,
    typer.Argument(metavar="SWEEP", help="The sweep's name.", autocompletion=complete_names),
]


def rename(
    old: Annotated[
        str,
        typer.Argument(metavar="OLD", help="The sweep's name.", autocompletion=complete_names),
    ],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Give a sweep another name.

    Its results, logs and events stay. Write the new name into its file, too: a file with the old
    name begins a sweep anew.

    Examples:
      sweep rename mine llama-8b-h100
    """
    from orchestrator.core.sweepfile.spec_values import checked_name  # pydantic

    try:
        checked_name(new)
    except ValueError as exc:
        raise UsageInvalid(str(exc)) from None
    with writable_store(db) as store:
        from db.read.rows import run_folder  # needs SQLAlchemy

        row = store.sweep_named(old)
        _refuse_misleading_name(row, new)
        # Link the folder first: an extra link does no harm if the store then refuses.
        link_folder(row.run_folder, run_folder(new, row.run_token))
        store.rename(row.id, new)
    if as_json:
        write_json("rename", {"sweep": new, "was": old})
        return
    write_line(f"Sweep {old} is now {new}. Write `name: {new}` into its file to continue it.")


def rm(
    sweep: _Sweep,
    yes: Yes = False,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Remove a sweep and its files on this machine.

    It first says what other sweeps take from it. A sweep that runs is not removed.

    Examples:
      sweep rm old-sweep
      sweep rm old-sweep --yes
    """
    from db.read.holder import holder_is_gone, is_worked_on  # needs SQLAlchemy

    with writable_store(db) as store:
        # An earlier `sweep rm` may have been killed.
        finished = _finish_removals(store)
        if sweep in finished and all(row.name != sweep for row in store.sweeps()):
            _report_removed(sweep, (), as_json=as_json)
            return
        row = store.sweep_named(sweep)
        summary = next(one for one in store.summaries() if one.sweep.id == row.id)
        others = _elsewhere(store, row)
        # The store refuses to remove a sweep that runs, so there is nothing to ask.
        is_confirmed = yes or not is_worked_on(row)
        if is_confirmed:
            _confirm(store, summary, is_sure=yes, as_json=as_json)
        removal = Removal(name=row.name, run_token=row.run_token, store=_address(store))
        note_removal(removal)
        try:
            # Without a question, an orchestrator that ends only now still counts as alive.
            store.remove(row.id, holder_is_dead=holder_is_gone if is_confirmed else None)
        finally:
            finish_removal(removal, {each.run_token for each in store.sweeps()})
    _report_removed(sweep, others, as_json=as_json)


def list(format: FormatOption = None, db: Db = None, as_json: Json = False) -> None:
    """List the sweeps of the store, the newest first.

    `best` is the speed of the layout that `sweep best` names; of several cells the smallest and
    the largest. `size` are its files on this machine.

    Examples:
      sweep list
      sweep list --format csv
    """
    format = output_format(format, as_json=as_json)
    with existing_store(db) as store:
        summaries = rank_summaries(store, store.summaries())
        where = store.url
    rows = [_row(summary) for summary in summaries]
    match format:
        case Format.JSON:
            write_json("list", {"sweeps": [dict(zip(_COLUMNS, row, strict=True)) for row in rows]})
        case Format.TABLE:
            if not rows:
                note(f"{where} holds no sweep yet; start one: sweep run FILE")
                return
            columns = [Column("sweep"), Column("state"), *numbers("cells", "trials", "measured")]
            columns += [*numbers("best tokens/s/GPU"), Column("changed"), *numbers("size")]
            write_table(columns, [_line(row) for row in rows])
        case _:
            write_rows(format, _COLUMNS, rows)


def _row(summary: SweepSummary) -> tuple[object, ...]:
    from db.read.holder import is_worked_on  # needs SQLAlchemy
    from orchestrator.core.trial.lifecycle import TrialState

    row = summary.sweep
    # A sweep whose orchestrator died is still `running` in the store.
    state = "interrupted" if row.state == "running" and not is_worked_on(row) else str(row.state)
    return (
        row.name,
        state,
        summary.num_cells,
        sum(summary.num_trials.values()),
        summary.num_trials.get(TrialState.MEASURED, 0),
        summary.slowest_best,
        summary.fastest_best,
        row.created_at,
        summary.changed_at,
        folder_bytes(row.run_folder),
    )


def _line(row: Sequence[object]) -> Sequence[str]:
    name, state, cells, trials, measured, slowest, fastest, _, changed_at, size = row
    speeds = dict.fromkeys(
        show.tokens_rate(each) for each in (slowest, fastest) if isinstance(each, float)
    )
    return [
        str(name),
        str(state),
        f"{cells:,}",
        f"{trials:,}",
        f"{measured:,}",
        " to ".join(speeds) or UNKNOWN,
        show.at(changed_at if isinstance(changed_at, datetime) else None),
        show.memory(size if isinstance(size, int) else None),
    ]


def _refuse_misleading_name(row: SweepRow, new: str) -> None:
    """Raise UsageInvalid for a name that hides that a sweep is simulated, or that says so."""
    if row.is_simulated and not new.endswith(SIMULATED_SUFFIX):
        raise UsageInvalid(
            f"sweep {row.name} is simulated, and its name has to say so: {new}{SIMULATED_SUFFIX}"
        )
    if not row.is_simulated and new.endswith(SIMULATED_SUFFIX):
        raise UsageInvalid(
            f"{new!r} ends like the name of a simulation, and sweep {row.name} was measured; take"
            f" another: {new.removesuffix(SIMULATED_SUFFIX)}"
        )


def _finish_removals(store: Store) -> set[str]:
    """Finish what earlier calls could not; return the names of the sweeps that are gone now."""
    there = {row.run_token for row in store.sweeps()}
    return {
        removal.name
        for removal in noted_removals(_address(store))
        if finish_removal(removal, there)
    }


def _address(store: Store) -> str:
    return store.url if store.path is None else str(store.path.resolve())


def _confirm(store: Store, summary: SweepSummary, *, is_sure: bool, as_json: bool) -> None:
    """Say what is lost, and ask for confirmation. Raises UsageInvalid without a terminal."""
    row, size = summary.sweep, folder_bytes(summary.sweep.run_folder)
    trials = counted(sum(summary.num_trials.values()), "trial")
    files = "no files on this machine" if size is None else f"{show.memory(size)} of files"
    if not as_json:
        note(f"sweep {row.name}: {trials} in {counted(summary.num_cells, 'cell')}, {files}")
        for line in _losses_of_others(store, summary):
            note(line)
    if is_sure:
        return
    if as_json or not sys.stdin.isatty():
        raise UsageInvalid(
            f"sweep {row.name} with {trials} would be removed for good: add --yes to confirm"
        )
    if not typer.confirm(f"Remove sweep {row.name} for good?", err=True):
        raise typer.Exit(1)


def _losses_of_others(store: Store, summary: SweepSummary) -> Sequence[str]:
    """Return a line for each thing that other sweeps of the store lose with a sweep."""
    from orchestrator.core.trial.lifecycle import TrialState

    row, lines = summary.sweep, []
    measured = summary.num_trials.get(TrialState.MEASURED, 0)
    ran_out = summary.num_trials.get(TrialState.OUT_OF_MEMORY, 0)
    relatives = [other.name for other in store.sweeps() if _are_related(store, row, other)]
    if relatives and measured + ran_out:
        lines.append(
            f"its {counted(measured, 'measured trial')}, and {ran_out} that ran out of memory, also"
            f" calibrate the predictions of {', '.join(relatives)} (same workload and device)"
        )
    for name, number in store.reusers(row.id).items():
        lines.append(
            f"sweep {name} reuses {counted(number, 'trial')} of it: they stay there, and count as"
            " its own from then on"
        )
    return lines


def _are_related(store: Store, row: SweepRow, other: SweepRow) -> bool:
    """Return whether predictions of one sweep use measurements of the other."""
    if row.id == other.id or row.conditions.get("workload") != other.conditions.get("workload"):
        return False
    devices = [
        {fingerprint.stack.device_name for fingerprint in store.fingerprints(each.id)}
        for each in (row, other)
    ]
    return bool(devices[0] & devices[1])


def _elsewhere(store: Store, row: SweepRow) -> Sequence[str]:
    """The other nodes on which the sweep ran: their folders stay."""
    if row.is_simulated:
        return ()
    nodes = {node for run in store.node_runs(row.id) for node in run.nodes}
    return sorted(nodes - {socket.gethostname()})


def _report_removed(name: str, others: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        write_json("rm", {"sweep": name, "nodes_with_files": [*others]})
        return
    write_line(f"Sweep {name} is removed.")
    if others:
        note(f"on {', '.join(others)} its files stay: remove runs/{name}-* under SWEEP_HOME there")
