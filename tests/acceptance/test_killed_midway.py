"""`kill -9` of the orchestrator at any moment, then the same command.

Nothing is lost, done twice, left over or reserved without being counted. A finished sweep is
reported again without Ray.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.sweep.lease import RENEW_SECONDS
from orchestrator.sweep.loop import POLL_SECONDS
from tests.acceptance.accounts import reserved, sessions
from tests.acceptance.command import Command, measured, write_sweep
from tests.both_databases import POSTGRESQL_IS_LONG

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

SLOW = {"name": "synthetic", "options": {"sleep": True, "time_scale": 30.0}}  # 0.2 to 2 s a trial
# Between two renewals: what a kill leaves uncounted.
UNSEEN_SECONDS = RENEW_SECONDS + POLL_SECONDS + 0.5
# Idle time between trials since the last renewal, which a kill loses: some 30 ms a trial.
BETWEEN_SECONDS = 1.0


@POSTGRESQL_IS_LONG
def test_killed_midway_and_run_again_nothing_is_lost_repeated_or_uncounted(
    command_on: Command, tmp_path: Path
) -> None:
    is_sqlite = command_on.store_url.startswith("sqlite")
    file = write_sweep(
        tmp_path, workload=SLOW, search={"confirm": {"repeats": 0}}
    )  # what is launched again was lost
    with Store.open(command_on.store_url) as store:
        running = command_on.start("run", file)
        running.until(lambda: len(measured(store, "t")) >= 6)
        acknowledged = measured(store, "t")
        running.kill()
        killed_at = datetime.now(tz=UTC)
        assert running.survivors(seconds=10) == []
        useful = reserved(command_on).useful
        ended = command_on.ok("run", file)
        _nothing_is_lost_or_repeated(command_on, store, acknowledged)
    _every_second_is_accounted_for(command_on, killed_at, useful)
    if is_sqlite:
        _the_end_is_told_again_without_ray(command_on, file, ended.stdout)


def _nothing_is_lost_or_repeated(
    command: Command, store: Store, acknowledged: dict[int, int]
) -> None:
    trials = store.trials(store.sweep_named("t").id)
    assert {t.state for t in trials} == {TrialState.MEASURED}
    assert len(trials) == len({t.layout for t in trials}) == 16
    assert {t.id: t.num_attempts for t in trials if t.id in acknowledged} == acknowledged, (
        "a finished trial was run again"
    )
    assert sum(t.num_attempts - 1 for t in trials) <= 2, "more was repeated than was under way"
    assert (
        command.sql("select count(*) from v_event where event = 'measured' group by trial_id")
        == [[1]] * 16
    )


def _every_second_is_accounted_for(
    command: Command, killed_at: datetime, useful_before: float
) -> None:
    killed, ended = sessions(command)
    assert 0 <= (killed_at - killed.ended_at).total_seconds() <= UNSEEN_SECONDS
    assert killed.reserved > 0, "six of its trials were measured"
    least = killed.least_reserved(killed.ended_at, apart=BETWEEN_SECONDS)
    most = killed.most_reserved(killed_at)
    parts = reserved(command)
    assert (
        least + ended.least_reserved(ended.last_attempt_ended_at)
        <= parts.reserved
        <= most + ended.most_reserved(ended.ended_at)
    )
    assert parts.under_way == 0.0
    assert parts.useful > useful_before > 0
    assert parts.reserved == pytest.approx(killed.reserved + ended.reserved + parts.idle)
    assert parts.reserved <= killed.capacity + ended.capacity
    assert "GPU-hours reserved: useful" in command.here.ok("status", "t").stdout


def _the_end_is_told_again_without_ray(command: Command, file: Path, told: str) -> None:
    launched = command.sql("select count(*) from v_event where event = 'gang_placed'")
    again = command.here.ok("run", file)
    assert "nothing was left to do" in again.stderr
    assert "Ray" not in again.stderr
    assert again.stdout == told == command.here.ok("best", "t", "--top", "3").stdout
    assert command.sql("select count(*) from v_event where event = 'gang_placed'") == launched
    assert "every layout is known" in command.here.ok("run", file, "search.max_trials=100").stderr
