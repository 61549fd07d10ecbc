"""Finds trials that could be measured again, by a person's condition over v_trial.

The condition runs read-only, as a statement of a person. What happens to the trials is not known
here.
"""

from __future__ import annotations

from db.sql import readonly, sql_text
from db.sql.bounded_answer import Answer
from orchestrator.core.trial.lifecycle import INVALIDATABLE, TrialState

MOST_TRIALS = 10_000_000


def trials_by_sweep(url: str, where: str, sweep_id: int | None) -> dict[int, list[int]]:
    """Return the ids of the trials that match, by the id of their sweep.

    `sweep_id`: that of the only sweep to look in; None: all. Raises UsageInvalid for a bad
    condition.
    """
    by_sweep: dict[int, list[int]] = {}
    found = _answer(url, where, sweep_id, "SELECT sweep_id, trial_id FROM matching")
    for sweep, trial in found.rows:
        by_sweep.setdefault(int(sweep), []).append(int(trial))
    return by_sweep


def num_by_state(url: str, where: str, sweep_id: int | None) -> dict[TrialState, int]:
    """Return how many trials match, or are condemned by one that does, by state.

    Takes and raises what `trials_by_sweep` does.
    """
    found = _answer(url, where, sweep_id, _count_by("state"))
    return {TrialState(state): int(count) for state, count in found.rows}


def num_by_sweep(url: str, where: str) -> dict[int, int]:
    """Return how many trials match, or are condemned by one that does, by the id of their sweep.

    Raises what `trials_by_sweep` does.
    """
    found = _answer(url, where, None, _count_by("sweep_id"))
    return {int(sweep_id): int(count) for sweep_id, count in found.rows}


def _count_by(column: str) -> str:
    ids = "(SELECT trial_id FROM matching)"
    return (
        f"SELECT {column}, count(*) FROM trial WHERE id IN {ids}"
        f" OR (state = 'pruned' AND condemned_by IN {ids}) GROUP BY {column}"
    )


def _answer(url: str, where: str, sweep_id: int | None, statement: str) -> Answer:
    """Answer a statement about `matching`, the rows of v_trial that match and may be repeated."""
    sql_text.refuse_loose_ends(where)
    states = ", ".join(f"'{state}'" for state in sorted(INVALIDATABLE))
    matching = f"SELECT sweep_id, trial_id FROM v_trial WHERE (\n{where}\n) AND state IN ({states})"
    if sweep_id is not None:
        matching += f" AND sweep_id = {sweep_id}"
    return readonly.query(url, f"WITH matching AS ({matching}) {statement}", max_rows=MOST_TRIALS)
