"""The store and the sweep that a command works on when its user names none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.terminal.output import note
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.pretend.simulated_name import SIMULATED_SUFFIX

if TYPE_CHECKING:
    from db.read.rows import SweepRow
    from db.store import Store
    from db.store_reads import StoreReads


@contextmanager
def existing_store(db: str | None) -> Iterator[StoreReads]:
    """Open a store that exists, to read it. Creates no file.

    Raises UsageInvalid if there is none yet.
    """
    # SQLAlchemy takes 0.1 s to import. A command that only reads needs no modules that write.
    from db.store_reads import StoreReads

    _refuse_missing(db)
    with StoreReads.open(db, to_read=True) as store:
        yield store


@contextmanager
def writable_store(db: str | None) -> Iterator[Store]:
    """Open a store that exists, to change it. Raises UsageInvalid if there is none yet."""
    from db.store import Store  # SQLAlchemy

    _refuse_missing(db)
    with Store.open(db) as store:
        yield store


def _refuse_missing(db: str | None) -> None:
    from db.connection import url  # SQLAlchemy

    resolved = url.resolve(db)
    if resolved.drivername == "sqlite" and not Path(str(resolved.database)).is_file():
        raise UsageInvalid(
            f"there is no store at {url.display(resolved)}. Name one with SWEEP_DB or --db, or"
            " create one: sweep run FILE"
        )


def select_sweep(store: StoreReads, name: str | None) -> SweepRow:
    """The sweep with a name, or the newest that is not simulated.

    Says on stderr which one it took if there are several. If only a simulation of that name
    exists, takes the simulation and says so. Raises UsageInvalid if there is none.
    """
    sweeps = store.sweeps()
    if name is not None:
        by_name = {sweep.name: sweep for sweep in sweeps}
        simulation = by_name.get(name + SIMULATED_SUFFIX)
        if name in by_name or simulation is None or not simulation.is_simulated:
            return store.sweep_named(name)
        note(
            f"there is no sweep {name}; this is {simulation.name}: simulated, nothing was measured"
        )
        return simulation
    if not sweeps:
        raise UsageInvalid(f"{store.url} holds no sweep yet; start one: sweep run FILE")
    newest = next((sweep for sweep in sweeps if not sweep.is_simulated), sweeps[0])
    others = [sweep.name for sweep in sweeps if sweep is not newest]
    if others:
        kind = "the newest" if newest is sweeps[0] else "the newest measured"
        if newest.is_simulated:
            kind = "simulated, the newest"
        names = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        note(f"sweep {newest.name}, {kind} of {len(sweeps)}; there are also {names}")
    elif newest.is_simulated:
        note(f"sweep {newest.name}: simulated, nothing was measured")
    return newest
