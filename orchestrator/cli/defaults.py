"""Which store and which sweep a command is about, where its user leaves that out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.output import note
from orchestrator.core.errors import SweepError, UsageInvalid

if TYPE_CHECKING:
    from db.read.rows import SweepRow
    from db.store import Store


def complete_names(incomplete: str) -> list[str]:
    """Sweep names for the shell, from the store that the environment names. Silent when there is none: nobody asked."""
    from db.sql import readonly

    try:
        rows = readonly.own_query(
            None, "SELECT name FROM sweep ORDER BY id DESC", max_rows=200, timeout_seconds=2
        ).rows
    except SweepError:
        return []
    return [str(name) for (name,) in rows if str(name).startswith(incomplete)]


SweepArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="SWEEP",
        help="The sweep's name. Default: the newest that was measured.",
        show_default=False,
        autocompletion=complete_names,
    ),
]


@contextmanager
def existing_store(db: str | None, *, to_read: bool = True) -> Iterator[Store]:
    """The store to look at, or to change where `to_read` is False. Raises UsageInvalid where there is none yet: looking makes no file."""
    # SQLAlchemy takes 0.3 s to import.
    from db.connection import url
    from db.store import Store

    resolved = url.resolve(db)
    if resolved.drivername == "sqlite":
        from pathlib import Path

        if not Path(str(resolved.database)).is_file():
            raise UsageInvalid(
                f"there is no store at {url.display(resolved)}. Name one with SWEEP_DB or --db, or begin one: sweep run FILE"
            )
    with Store.open(db, to_read=to_read) as store:
        yield store


def chosen_sweep(store: Store, name: str | None) -> SweepRow:
    """The sweep of a name, else the newest that is not simulated, which is said on stderr where there are others.

    Of a name that only a simulation has, with its suffix, that is meant, and said. Raises UsageInvalid where there is none.
    """
    from orchestrator.core.pretend.synthetic import SIMULATED_SUFFIX  # pydantic, 0.05 s

    sweeps = store.sweeps()
    if name is not None:
        if not any(sweep.name == name for sweep in sweeps):
            simulation = next(
                (
                    sweep
                    for sweep in sweeps
                    if sweep.is_simulated and sweep.name == name + SIMULATED_SUFFIX
                ),
                None,
            )
            if simulation is not None:
                note(
                    f"there is no sweep {name}; this is {simulation.name}: simulated, nothing was measured"
                )
                return simulation
        return store.sweep_named(name)
    if not sweeps:
        raise UsageInvalid(f"{store.url} holds no sweep yet; begin one: sweep run FILE")
    chosen = next((sweep for sweep in sweeps if not sweep.is_simulated), sweeps[0])
    if len(sweeps) > 1:
        names = [sweep.name for sweep in sweeps if sweep is not chosen]
        others = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        which = (
            "simulated, the newest"
            if chosen.is_simulated
            else "the newest measured"
            if sweeps[0].is_simulated
            else "the newest"
        )
        note(f"sweep {chosen.name}, {which} of {len(sweeps)}; there are also {others}")
    elif chosen.is_simulated:
        note(f"sweep {chosen.name}: simulated, nothing was measured")
    return chosen
