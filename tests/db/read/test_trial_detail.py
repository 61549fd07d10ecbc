"""All trials of a sweep at once are what each is alone, on SQLite and PostgreSQL."""

from __future__ import annotations

from pathlib import Path

from db.store import Store
from db.write.writes import ProfileEnd
from tests.cli.cli_store import fill
from tests.core.trial.rank_profiles import rank_profile
from tests.db.builders import Bench


def test_the_trials_of_a_sweep_are_those_that_are_read_one_by_one(
    store: Store, tmp_path: Path
) -> None:
    filled = fill(store, tmp_path)
    other = Bench.on(store, "other")
    other.measure()
    for trial_id in (filled.measured, filled.slower):
        for _ in range(2):
            number = store.begin_profile(trial_id)
            store.end_profile(
                ProfileEnd(
                    trial_id=trial_id,
                    number=number,
                    nodes=("n",),
                    gpu_seconds=1.0,
                    ranks={0: rank_profile(), 3: rank_profile(is_slowest=True)},
                    advice=(),
                    failure=None,
                )
            )
    sweep_id = store.sweep_named("tiny").id
    found = store.trial_details(sweep_id)
    assert [one.trial.id for one in found] == [one.id for one in store.trials(sweep_id)]
    assert found == [store.trial(one.trial.id) for one in found]
    assert sum(len(one.profiles) for one in found) == 4
    assert [len(one.attempts) for one in store.trial_details(other.sweep_id)] == [1]
