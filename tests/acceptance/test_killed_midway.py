"""`kill -9` of the orchestrator at any moment, then the same command: nothing is lost, nothing is done twice, nothing is left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from db.store import Store
from orchestrator.core.lifecycle import TrialState
from tests.acceptance.command import Command, write_sweep

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(240)]

SLOW = {"name": "synthetic", "options": {"sleep": True, "time_scale": 15.0}}  # 0.1 to 1 s a trial


def measured(store: Store, sweep: str) -> dict[int, int]:
    """Trials that are measured, with the number of their attempts."""
    rows = store.sweeps()
    if not rows:
        return {}
    return {t.id: t.num_attempts for t in store.trials(store.sweep_named(sweep).id) if t.state is TrialState.MEASURED}


def test_killed_midway_and_run_again_nothing_is_lost_or_repeated(command_on: Command, tmp_path: Path) -> None:
    file = write_sweep(tmp_path, workload=SLOW, search={"confirm": {"repeats": 0}})  # what is launched again was lost
    with Store.open(command_on.store_url) as store:
        acknowledged: dict[int, int] = {}
        for kills in range(1, 3 if command_on.store_url.startswith("sqlite") else 2):
            running = command_on.start("run", file)
            wanted = len(acknowledged) + 3
            running.until(lambda wanted=wanted: len(measured(store, "t")) >= wanted)  # type: ignore[misc]
            acknowledged |= measured(store, "t")
            running.kill()
            assert running.survivors(seconds=10) == [], f"processes are left after kill {kills}"
        command_on.ok("run", file)
        trials = store.trials(store.sweep_named("t").id)
        assert {t.state for t in trials} == {TrialState.MEASURED}
        assert len(trials) == len({t.layout for t in trials}) == 16
        assert {t.id: t.num_attempts for t in trials if t.id in acknowledged} == acknowledged, "a finished trial was run again"
        assert sum(t.num_attempts - 1 for t in trials) <= 2, "more was repeated than was in flight"
    per_trial = command_on.sql("select count(*) from v_event where event = 'measured' group by trial_id")
    assert per_trial == [[1]] * 16


def test_a_finished_sweep_run_again_answers_from_the_store_without_ray(command: Command, tmp_path: Path) -> None:
    file = write_sweep(tmp_path)
    command.ok("run", file)
    again = command.ok("run", file)
    assert "nothing was left to do" in again.stderr
    assert "Ray" not in again.stderr
    assert again.stdout == command.ok("best", "t", "--top", "3").stdout
    assert command.sql("select count(*) from v_event where event = 'gang_placed'") == [[16]]
    assert "every layout is known" in command.ok("run", file, "search.max_trials=100").stderr
