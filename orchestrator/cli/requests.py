"""The commands by which a person adds to a sweep: enqueue a layout, retry trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import CellOption, Db, Json, SweepOption
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.terminal.output import write_json, write_line
from orchestrator.core.errors import SweepInUse, UsageInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from db.read.rows import CellRow, SweepRow
    from db.store import Store
    from orchestrator.core.problem.layout import Layout


def enqueue(
    layout: Annotated[
        list[str],
        typer.Argument(
            metavar="LAYOUT...",
            help="A layout as tables print it. Or some of its fields, dp=8 mbs=2 recompute=full:"
            " then the layout predicted fastest with them.",
        ),
    ],
    sweep: SweepOption = None,
    cell: CellOption = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Have a layout measured next.

    A running `sweep run` of the sweep reads the request within 5 s; otherwise the next call does.
    The layout is measured before the search's own choice, and counts in the budgets.

    Examples:
      sweep enqueue mbs=4 recompute=full
      sweep enqueue dp8_tp1_pp1_cp1_mbs2_ga64_full_z1_bf16 --sweep 8b --cell 8gpu
    """
    done = enqueue_layout(db, sweep, layout, cell)
    if as_json:
        fields = {
            "sweep": done.sweep,
            "cell": done.cell,
            "layout": done.layout.key,
            "trial_id": done.trial_id,
            "state": done.state,
            "accepted": done.is_accepted,
        }
        write_json("enqueue", fields)
    else:
        write_line(done.text)


def retry(
    trials: Annotated[
        list[int], typer.Argument(metavar="TRIAL...", help="The trials, by number.", min=1)
    ],
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Have trials measured again.

    Their numbers so far no longer count, and layouts that they ruled out wait again too. A running
    `sweep run` of the sweep reads the request within 5 s; otherwise the next call does. A trial
    that has not ended is left as it is, and the exit code is 2.

    Examples:
      sweep retry 17
      sweep retry 17 18 19
    """
    done = [retry_trial(db, trial_id) for trial_id in dict.fromkeys(trials)]
    if as_json:
        write_json("retry", {"trials": [{"trial_id": i, "accepted": ok} for i, ok, _ in done]})
    else:
        for _, _, text in done:
            write_line(text)
    if not all(is_accepted for _, is_accepted, _ in done):
        raise typer.Exit(2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Enqueued:
    """A layout that a person asked for, and what to tell the person."""

    sweep: str
    cell: str
    layout: Layout
    trial_id: int
    state: str
    is_accepted: bool
    text: str


def enqueue_layout(
    db: str | None, sweep: str | None, words: Sequence[str], cell: str | None
) -> Enqueued:
    """Ask for a layout. Raises UsageInvalid if it is not legal, or names no cell."""
    with existing_store(db, to_read=False) as store:
        row = select_sweep(store, sweep)
        of_cell, layout = _meant(store, row, words, cell)
        trial_id, state, is_accepted = store.enqueue(of_cell.id, layout)
    where = f"trial {trial_id}, {layout.short} in {of_cell.cell.key}"
    text = f"{where[0].upper()}{where[1:]}, is {state.replace('_', ' ')} already."
    if is_accepted:
        text = f"Asked for {where}. {_when(row)}"
    elif state not in ("launching", "running", "queued"):
        text += f" To measure it again: sweep retry {trial_id}"
    return Enqueued(
        sweep=row.name,
        cell=of_cell.cell.key,
        layout=layout,
        trial_id=trial_id,
        state=state,
        is_accepted=is_accepted,
        text=text,
    )


def retry_trial(db: str | None, trial_id: int) -> tuple[int, bool, str]:
    """Ask for a trial to be measured again; return its number, whether it will be, and a text."""
    with existing_store(db, to_read=False) as store:
        row = store.sweep_named(store.trial(trial_id).sweep_name)
        try:
            is_accepted = store.invalidate(f"trial_id = {trial_id}", sweep=row.name) > 0
        except SweepInUse:
            is_accepted = store.ask_to_retry(row.id, trial_id)
    if not is_accepted:
        return trial_id, False, f"Trial {trial_id} has not ended: nothing was changed."
    return trial_id, True, f"Trial {trial_id} will be measured again. {_when(row)}"


def _when(row: SweepRow) -> str:
    if row.holder is None:
        return "The next `sweep run` with its file does it."
    return f"The `sweep run` on host {row.holder.host} reads the request within 5 s."


def _meant(
    store: Store, row: SweepRow, words: Sequence[str], cell: str | None
) -> tuple[CellRow, Layout]:
    """The cell and the legal layout that a person means."""
    from orchestrator.cli.explain import select_cell, wish_of
    from orchestrator.cli.sweep_file import planning, stored_spec
    from orchestrator.core.search.layout_wish import complete

    known = planning(stored_spec(row), store)
    wish = wish_of(known, words)
    selected = select_cell(known.spec, wish, cell)
    planned = known.plan(selected)
    layout = complete(wish, planned.candidates, selected)
    if (reason := planned.space.reason(layout)) is not None:
        raise UsageInvalid(f"{layout.short} is not legal in {selected.key}: {reason}")
    of_cell = next((one for one in store.cells(row.id) if one.cell == selected), None)
    if of_cell is None:
        raise UsageInvalid(
            f"no `sweep run` has begun cell {selected.key} yet, so nothing can wait there"
        )
    return of_cell, layout
