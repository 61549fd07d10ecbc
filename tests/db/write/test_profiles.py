"""Profiles are stored with their parts, add up in SQL, and change no trial."""

from __future__ import annotations

from typing import Any

import pytest

from db.sql import readonly
from db.write.writes import ProfileEnd
from orchestrator.core.errors import LeaseLost
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.kernel_names import Axis
from orchestrator.core.trial.memory_timeline import MemoryKind
from orchestrator.core.trial.rank_profile import MemoryMoment
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.core.trial.step_part import StepPart
from orchestrator.core.trial.trace_split import Part
from tests.core.trial.rank_profiles import rank_profile
from tests.db.builders import Bench

MOMENT = MemoryMoment(step=1, part=StepPart.FORWARD, num_bytes={MemoryKind.PARAMETERS: 64})
FIRST = rank_profile(
    {Part.EXPOSED_DP: 250_000, Part.IDLE: 125_000},
    num_steps=2,
    overlapped={**dict.fromkeys(Axis, 0), Axis.DP: 40_000},
    unknown={"mystery": 5},
    plain_step_seconds=0.25,
    memory=[MOMENT],
    trace_path="/runs/trace-0.json.gz",
)
SLOWEST = rank_profile(is_slowest=True, host_nanoseconds=None, is_on_device=False)


def ended(trial_id: int, number: int, **changes: Any) -> ProfileEnd:
    values: dict[str, Any] = {
        "nodes": ("node-a",),
        "gpu_seconds": 12.0,
        "ranks": {0: FIRST, 5: SLOWEST},
        "advice": ("compile",),
        "failure": None,
    }
    return ProfileEnd(trial_id=trial_id, number=number, **(values | changes))


def ask(url: str, sql: str) -> list[dict[str, Any]]:
    result = readonly.query(url, sql)
    return [dict(zip(result.columns, row, strict=True)) for row in result.rows]


def test_a_profile_is_read_back_as_it_was_written(bench: Bench) -> None:
    trial_id = bench.measure()
    before = bench.store.trial(trial_id)
    number = bench.store.begin_profile(trial_id)
    assert [one.state for one in bench.store.trial(trial_id).profiles] == ["running"]
    bench.store.end_profile(ended(trial_id, number))
    after = bench.store.trial(trial_id)
    (found,) = after.profiles
    # The memory is that of rank 0, once for the whole profile.
    assert found.ranks == {0: FIRST.model_copy(update={"memory": []}), 5: SLOWEST}
    assert (found.number, found.state, found.epoch, found.nodes) == (1, "done", None, ("node-a",))
    assert (found.gpu_seconds, found.advice, found.memory) == (12.0, ("compile",), (MOMENT,))
    # Nothing of it counts as a measurement.
    assert (after.trial, after.attempts, after.events) == (
        before.trial,
        before.attempts,
        before.events,
    )


def test_the_parts_of_v_profile_add_up_to_the_step(bench: Bench, store_url: str) -> None:
    trial_id = bench.measure()
    bench.store.end_profile(ended(trial_id, bench.store.begin_profile(trial_id)))
    rows = ask(store_url, "SELECT * FROM v_profile WHERE rank = 0")
    own = {row["part"]: row for row in rows}
    assert own["exposed_dp"]["fraction"] == 0.25
    assert own["exposed_dp"]["part_seconds"] == pytest.approx(125e-6)
    assert own["overlapped_dp"]["is_hidden"]
    total = ask(
        store_url,
        "SELECT rank, sum(nanoseconds) AS spent FROM profile_part WHERE NOT is_hidden"
        " GROUP BY rank ORDER BY rank",
    )
    assert [(row["rank"], int(row["spent"])) for row in total] == [(0, 1_000_000), (5, 1_000_000)]
    visible = [row for row in rows if not row["is_hidden"]]
    assert sum(row["part_seconds"] for row in visible) == pytest.approx(
        rows[0]["profiled_step_seconds"]
    )
    assert all(row["profiled_step_seconds"] == pytest.approx(500e-6) for row in rows)


def test_a_profile_that_failed_has_its_reason_and_no_parts(bench: Bench) -> None:
    trial_id = bench.measure()
    number = bench.store.begin_profile(trial_id)
    failure = Failure(kind=FailureKind.OOM_GPU, message="out of memory")
    bench.store.end_profile(ended(trial_id, number, ranks={}, advice=(), failure=failure))
    (found,) = bench.store.trial(trial_id).profiles
    assert (found.state, found.failure_kind, found.failure_message) == (
        "failed",
        FailureKind.OOM_GPU,
        "out of memory",
    )
    assert found.ranks == {}
    assert bench.store.profiled_trials(bench.sweep_id) == {trial_id}


def test_profiles_of_a_trial_are_numbered_and_an_unfinished_one_is_lost(bench: Bench) -> None:
    trial_id, other = bench.measure(1), bench.measure(2)
    numbers = [bench.store.begin_profile(trial_id) for _ in range(2)]
    assert numbers == [1, 2]
    assert bench.store.begin_profile(other) == 1
    assert [one.state for one in bench.store.trial(trial_id).profiles] == ["lost", "running"]
    assert bench.store.profiled_trials(bench.sweep_id) == set()


def test_only_the_owner_of_a_sweep_begins_a_profile_with_its_epoch(bench: Bench) -> None:
    trial_id = bench.measure()
    with pytest.raises(LeaseLost):
        bench.store.begin_profile(trial_id, epoch=bench.epoch + 1)
    assert bench.store.trial(trial_id).profiles == ()


def test_profiles_are_a_part_of_their_own_of_reserved_gpu_time(bench: Bench) -> None:
    store, nothing = bench.store, Leased(reserved=0.0, idle=0.0, capacity=0.0)
    store.begin_session(
        bench.sweep_id, bench.epoch, num_gpus=8, price_per_gpu_hour=None, leased=nothing
    )
    trial_id = bench.measure()
    before = store.reserved(bench.sweep_id).total
    store.end_profile(ended(trial_id, store.begin_profile(trial_id, epoch=bench.epoch)))
    # What the session holds includes the profile, which therefore is not under way.
    held = before.reserved + 12.0
    store.renew(bench.sweep_id, bench.epoch, leased=Leased(reserved=held, idle=0.0, capacity=100.0))
    after = store.reserved(bench.sweep_id)
    assert after.total.profile == 12.0
    assert after.total.under_way == 0.0
    assert after.total.reserved == pytest.approx(held)
