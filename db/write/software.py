"""Completes fingerprints with unknown software by others of the same sweep.

So two attempts that differ only in what was found of their software are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read import sweeps
from orchestrator.core.trial.fingerprint import Fingerprint, completes

_attempt, _cell, _trial = schema.attempt, schema.cell, schema.trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """The fingerprints of some ends as they are stored, and stored ones that they complete."""

    stored: Mapping[Fingerprint, Fingerprint]
    # By digest, of one sweep: the whole fingerprint that its attempts have from now on.
    replaced: Mapping[str, str]

    def digest_of(self, digest: str | None) -> str | None:
        """Return the digest that a stored one becomes."""
        return self.replaced.get(digest, digest) if digest is not None else None


def complete(
    connection: Connection,
    sweep_id: int,
    ended: Collection[Fingerprint],
    *,
    current: Set[str | None],
) -> Completed:
    """Complete the fingerprints of ends. `current`: digests that their cells have now.

    Of several whole ones that fit, the current one counts, else the newest.
    """
    if {one.digest for one in ended} <= current:
        return Completed(stored={one: one for one in ended}, replaced={})
    known = sweeps.fingerprints(connection, sweep_id)
    wholes = [*known, *ended]
    return Completed(
        stored={one: _whole(one, wholes, current) or one for one in ended},
        replaced={
            part.digest: whole.digest
            for part in known
            if (whole := _whole(part, ended, current)) is not None
        },
    )


def _whole(
    part: Fingerprint, wholes: Iterable[Fingerprint], current: Set[str | None]
) -> Fingerprint | None:
    fitting = [one for one in wholes if completes(one, part)]
    of_cell = [one for one in fitting if one.digest in current]
    return next(reversed(of_cell or fitting), None)


def write(connection: Connection, sweep_id: int, replaced: Mapping[str, str]) -> None:
    """Give attempts and cells of a sweep their whole fingerprints, which are stored."""
    if not replaced:
        # As nearly always. Building the statement below costs as much as running two.
        return
    of_sweep = sa.select(_trial.c.id).where(_trial.c.sweep_id == sweep_id)
    for before, after in replaced.items():
        connection.execute(
            sa.update(_attempt)
            .where(_attempt.c.fingerprint_digest == before, _attempt.c.trial_id.in_(of_sweep))
            .values(fingerprint_digest=after)
        )
        connection.execute(
            sa.update(_cell)
            .where(_cell.c.fingerprint_digest == before, _cell.c.sweep_id == sweep_id)
            .values(fingerprint_digest=after)
        )
