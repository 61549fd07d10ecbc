"""Which store and which sweep a command is about, where its user leaves that out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.output import note
from orchestrator.core.errors import SweepError, UsageInvalid

if TYPE_CHECKING:
    from db.rows import SweepRow
    from db.store import Store


def complete_names(incomplete: str) -> list[str]:
    """Sweep names for the shell, from the store that the environment names. Silent when there is none: nobody asked."""
    from db import readonly

    try:
        rows = readonly.own_query(None, "SELECT name FROM sweep ORDER BY id DESC", max_rows=200, timeout_seconds=2).rows
    except SweepError:
        return []
    return [str(name) for (name,) in rows if str(name).startswith(incomplete)]


SweepArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="SWEEP",
        help="The sweep's name. Default: the newest.",
        show_default=False,
        autocompletion=complete_names,
    ),
]


@contextmanager
def existing_store(db: str | None, *, to_read: bool = True) -> Iterator[Store]:
    """The store to look at, or to change where `to_read` is False. Raises UsageInvalid where there is none yet: looking makes no file."""
    # SQLAlchemy takes 0.3 s to import.
    from db import url
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
    """The sweep of a name, else the newest, which is said on stderr where there are others. Raises UsageInvalid where there is none."""
    if name is not None:
        return store.sweep_named(name)
    sweeps = store.sweeps()
    if not sweeps:
        raise UsageInvalid(f"{store.url} holds no sweep yet; begin one: sweep run FILE")
    if len(sweeps) > 1:
        others = ", ".join(sweep.name for sweep in sweeps[1:6]) + (", ..." if len(sweeps) > 6 else "")
        note(f"sweep {sweeps[0].name}, the newest of {len(sweeps)}; there are also {others}")
    return sweeps[0]
