"""The judge: what it calls lost, doubled, stuck or broken, in a store to which that was done."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from db import schema
from db.types import now
from orchestrator.core.trial.lifecycle import TrialState
from tests.faults import small_sweep
from tests.faults.fresh_stores import fresh_sqlite
from tests.faults.history import Entry, Log, Seen, judge
from tests.faults.witness import WitnessedStore

trial, attempt, measurement, event = schema.trial, schema.attempt, schema.measurement, schema.event
node_check, session = schema.node_check, schema.session


@pytest.fixture
def swept(tmp_path: Path) -> WitnessedStore:
    store = WitnessedStore.seen_by(Log(tmp_path / "seen.jsonl"), fresh_sqlite(tmp_path)(0))
    small_sweep.run(store)
    return store


def test_a_sweep_that_nothing_happened_to_is_blameless(swept: WitnessedStore) -> None:
    verdict = judge(swept, "small", swept.log.entries(), num_trials=small_sweep.NUM_TRIALS)
    assert verdict.complaints == []
    # Up to two were pruned, never launched.
    assert verdict.acknowledged >= small_sweep.NUM_TRIALS - 2


FIRST_MEASURED = (
    sa.select(sa.func.min(trial.c.id)).where(trial.c.state == TrialState.MEASURED).scalar_subquery()
)
OF_ATTEMPT = sa.select(attempt.c.id).where(attempt.c.trial_id == FIRST_MEASURED)
WRONGS: dict[str, tuple[Callable[[], sa.Executable], str]] = {
    "a result is gone": (
        lambda: sa.delete(measurement).where(measurement.c.attempt_id.in_(OF_ATTEMPT)),
        "lost: .* says None",
    ),
    "a result is another": (
        lambda: sa.update(measurement).values(tokens_per_second_per_gpu=1.0),
        "lost: .* says 1.0",
    ),
    "a result of a healthy node is taken out": (
        lambda: (
            sa.update(attempt)
            .where(attempt.c.trial_id == FIRST_MEASURED)
            .values(superseded=True, pooled=False)
        ),
        "lost: .* was measured, and is measured",
    ),
    "a result waits again": (
        lambda: sa.update(trial).where(trial.c.id == FIRST_MEASURED).values(state="queued"),
        "lost: .* that is queued",
    ),
    "a trial runs for ever": (
        lambda: sa.update(trial).where(trial.c.id == FIRST_MEASURED).values(state="running"),
        "stuck: .* is running",
    ),
    "an attempt runs for ever": (
        lambda: sa.update(attempt).values(state="running"),
        "stuck: .* attempt 1 runs",
    ),
    "an event is missing": (
        lambda: sa.delete(event).where(event.c.event == "first_step"),
        "broken: .* when it was launching",
    ),
    "an attempt is missing": (
        lambda: sa.update(trial).values(num_attempts=7),
        "broken: .* after 7",
    ),
    "a stale owner wrote": (
        lambda: sa.update(event).where(event.c.id == 1).values(epoch=2),
        "broken: .* was written after epoch 2",
    ),
    "a stale owner looked at a node": (
        lambda: sa.insert(node_check).values(
            [
                {"sweep_id": 1, "epoch": epoch, "at": now(), "node": "a", "is_fit": True}
                for epoch in (2, 1)
            ]
        ),
        "broken: node a: a look of epoch 1 was written after epoch 2",
    ),
    "a stale owner's session went on": (
        lambda: sa.insert(session).from_select(
            ["sweep_id", "epoch", "host", "pid", "started_at", "seen_at", "num_gpus"],
            sa.select(
                session.c.sweep_id,
                sa.literal(2),
                session.c.host,
                session.c.pid,
                session.c.started_at,
                session.c.seen_at,
                sa.literal(1),
            ),
        ),
        "broken: the session of epoch 1 was written after epoch 2",
    ),
}


@pytest.mark.parametrize(("wrong", "says"), WRONGS.values(), ids=WRONGS)
def test_what_is_wrong_in_the_store_is_named(
    swept: WitnessedStore, wrong: Callable[[], sa.Executable], says: str
) -> None:
    with swept._database.engine.connect() as connection:
        connection.execute(wrong())
        connection.commit()
    complaints = "\n".join(
        judge(swept, "small", swept.log.entries(), num_trials=small_sweep.NUM_TRIALS).complaints
    )
    assert re.search(says, complaints), complaints


def test_a_trial_that_was_never_reached_is_named(swept: WitnessedStore) -> None:
    assert judge(swept, "small", [], num_trials=small_sweep.NUM_TRIALS + 1).stuck == [
        "there are 12 trials, of 13"
    ]


def test_a_launch_that_happened_twice_or_was_never_written_down_is_named(
    swept: WitnessedStore,
) -> None:
    twice = [*swept.log.entries(), *swept.log.entries()[:1]]
    assert any("was launched 2 times" in text for text in judge(swept, "small", twice).duplicated)
    unwritten = [*swept.log.entries(), Entry(seen=Seen.LAUNCHED, trial_id=1, attempt=9)]
    assert any("nobody wrote it down" in text for text in judge(swept, "small", unwritten).broken)
