"""The loop, with a scripted scheduler and a real SQLite store."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from db.types import AttemptState, SweepState
from orchestrator.cluster.contract import Finished, Progressed, SchedulerEvent
from orchestrator.core.errors import (
    ClusterUnavailable,
    ResourcesInsufficient,
    StoreUnavailable,
    SweepChanged,
    SweepInUse,
    UsageInvalid,
)
from orchestrator.core.machines.packing import Shape
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import RecomputeMode
from orchestrator.core.search import space
from orchestrator.core.search.outcome import Failed, Measured
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import POLICIES, FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint, Software, Stack
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import Device, Phase, TrialRequest
from orchestrator.search.proposal import DoubtfulResult, Proposal
from orchestrator.search.searcher import Searcher
from orchestrator.sweep import snapshots
from orchestrator.sweep.cell_search import PlannedSearch
from orchestrator.sweep.cell_searches import CellSearches
from orchestrator.sweep.measured_code import ALWAYS_CHECKED_SECONDS
from orchestrator.sweep.progress import Snapshot, Stop, StopReason, SweepResult
from orchestrator.sweep.run import run_sweep
from tests.sweep.fake_scheduler import FakeScheduler, Script

CODE = Fingerprint(orchestrator_version="test")


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


def spec(*, repeats: int = 0, **changes: Any) -> SweepSpec:
    """A sweep of two cells. `repeats` confirm what it finds, if a test is about that."""
    changes["search"] = {"confirm": {"repeats": repeats}} | changes.get("search", {})
    return SweepSpec.model_validate(
        {
            "name": "t",
            "model": "llama-tiny",
            "sequence_length": 64,
            "global_batch_size": 8,
            "precision": "fp32",
            "gpus": [1, 2],
            "axes": {"micro_batch_size": [1, 2, 4], "recompute": ["none", "full"]},
        }
        | changes
    )


def run(
    store: Store, script: Script, *, scheduler: FakeScheduler | None = None, **kwargs: Any
) -> tuple[SweepResult, FakeScheduler]:
    chosen = scheduler or FakeScheduler(script)
    kwargs.setdefault("spec", spec())
    # Time stands still, so that what is asked for never depends on how busy the machine is.
    kwargs.setdefault("clock", lambda: 0.0)
    result = run_sweep(
        kwargs.pop("spec"),
        store=store,
        open_scheduler=lambda: chosen,
        code=kwargs.pop("code", CODE),
        hardware=lambda _: None,
        **kwargs,
    )
    return result, chosen


def fast(request: TrialRequest) -> float:
    return 1.0 / request.layout.micro_batch_size


def out_of_memory_above(micro_batch_size: int) -> Script:
    def script(request: TrialRequest) -> float | FailureKind:
        too_large = (
            request.layout.micro_batch_size > micro_batch_size
            and request.layout.recompute.mode is RecomputeMode.NONE
        )
        return FailureKind.OOM_GPU if too_large else fast(request)

    return script


def states(store: Store) -> Counter[TrialState]:
    return Counter(t.state for t in store.trials(store.sweep_named("t").id))


def test_every_layout_is_measured_and_the_best_is_known_per_cell(store: Store) -> None:
    result, scheduler = run(store, fast)
    assert states(store) == {TrialState.MEASURED: 12}
    assert result.counts[TrialState.MEASURED] == 12
    assert set(result.stopped.values()) == {StopReason.EXHAUSTED}
    assert result.finished
    assert scheduler.closed
    best = store.best(store.sweep_named("t").id)
    assert len(best) == 2
    assert all(rows[0].layout.micro_batch_size == 4 for rows in best.values())


def test_trials_on_a_machine_without_gpus_run_one_after_another(store: Store) -> None:
    _, scheduler = run(store, fast)
    assert scheduler.most_at_once == 1


def test_gangs_share_gpus_while_some_are_free(store: Store) -> None:
    _, scheduler = run(store, fast, scheduler=FakeScheduler(fast, slots=4, device=Device.CUDA))
    assert scheduler.most_at_once > 1


def test_the_same_call_again_launches_nothing(store: Store) -> None:
    run(store, fast)
    result, scheduler = run(store, fast)
    assert scheduler.started == []
    assert result.counts[TrialState.MEASURED] == 12


def test_a_wider_axis_adds_only_what_is_new(store: Store) -> None:
    run(store, fast)
    _, scheduler = run(
        store,
        fast,
        spec=spec(axes={"micro_batch_size": [1, 2, 4, 8], "recompute": ["none", "full"]}),
    )
    assert {layout.micro_batch_size for layout, _ in scheduler.started} == {8}


def test_a_changed_condition_is_refused_with_the_difference(store: Store) -> None:
    run(store, fast)
    with pytest.raises(SweepChanged, match="synthetic"):
        run(store, fast, spec=spec(workload="synthetic"))


def test_a_condition_may_change_until_something_was_measured(store: Store) -> None:
    """As a mistyped argv is corrected: what failed is launched again, and its failures stay."""
    with pytest.raises(UsageInvalid, match="give the same `sweep run`"):
        run(store, lambda _: FailureKind.USER_ERROR)
    failed = {trial.id for trial in store.trials(store.sweep_named("t").id)}
    assert len(failed) == 5
    result, scheduler = run(store, fast, spec=spec(workload="synthetic"))
    assert result.counts[TrialState.MEASURED] == len(scheduler.started) == 12
    for trial in store.trials(result.sweep_id):
        *earlier, last = store.trial(trial.id).attempts
        assert [attempt.state for attempt in earlier] == [AttemptState.FAILED] * (
            trial.id in failed
        )
        assert all(attempt.superseded for attempt in earlier) and not last.superseded
    with pytest.raises(SweepChanged):
        run(store, fast)


def test_a_sweep_that_was_stored_with_limits_in_numbers_goes_on_as_the_same(store: Store) -> None:
    """As an earlier program wrote its defaults."""
    numbers = {
        "start": 120.0,
        "rendezvous": 120.0,
        "first_step": 300.0,
        "steady": 60.0,
        "teardown": 20.0,
        "total": 1800.0,
    }
    before = spec(measurement={"limits": numbers}, search={"max_trials": 2})
    run(store, fast, spec=before)
    stored = SweepSpec.model_validate_json(store.sweep_named("t").spec_json)
    assert stored.measurement.limits.steady == 60.0
    result, scheduler = run(store, fast)
    assert len(scheduler.started) == 12 - 4
    assert result.finished


def test_an_out_of_memory_condemns_what_needs_more_without_a_launch(store: Store) -> None:
    _, scheduler = run(
        store, out_of_memory_above(1), spec=spec(gpus=1, search={"strategy": "random", "seed": 5})
    )
    rows = store.trials(store.sweep_named("t").id)
    oom = [t for t in rows if t.state is TrialState.OUT_OF_MEMORY]
    pruned = [t for t in rows if t.state is TrialState.PRUNED]
    assert oom
    assert pruned
    assert all(
        t.condemned_by in {o.id for o in oom} and "ran out of it" in (t.why or "") for t in pruned
    )
    assert not {t.layout for t in pruned} & {layout for layout, _ in scheduler.started}
    assert len(rows) == 6


def test_a_crash_of_the_code_costs_one_trial_and_is_not_retried(store: Store) -> None:
    def script(request: TrialRequest) -> float | FailureKind:
        return FailureKind.USER_ERROR if request.layout.micro_batch_size == 2 else fast(request)

    result, scheduler = run(store, script)
    assert states(store) == {TrialState.MEASURED: 8, TrialState.FAILED: 4}
    assert result.counts[TrialState.FAILED] == 4
    assert all(attempt == 1 for _, attempt in scheduler.started)


def test_the_machines_fault_is_retried_within_its_budget_and_then_given_up(store: Store) -> None:
    def script(request: TrialRequest) -> float | FailureKind:
        return FailureKind.NODE_LOST if request.layout.micro_batch_size == 4 else fast(request)

    run(store, script, spec=spec(gpus=1))
    failed = [t for t in store.trials(store.sweep_named("t").id) if t.state is TrialState.FAILED]
    assert len(failed) == 2
    # The first, and one retry: a trial that takes nodes down is stopped after two.
    assert all(t.num_attempts == 2 for t in failed)


def test_a_node_lost_once_is_measured_at_the_second_attempt(store: Store) -> None:
    lost: set[int] = set()

    def script(request: TrialRequest) -> float | FailureKind:
        if request.trial_id in lost or request.layout.micro_batch_size != 2:
            return fast(request)
        lost.add(request.trial_id)
        return FailureKind.NODE_LOST

    run(store, script)
    assert states(store) == {TrialState.MEASURED: 12}
    attempts = {
        (t.layout.micro_batch_size, t.num_attempts) for t in store.trials(store.sweep_named("t").id)
    }
    assert attempts == {(1, 1), (2, 2), (4, 1)}


def test_nothing_feasible_is_said_of_the_cell(store: Store) -> None:
    result, _ = run(store, lambda _: FailureKind.OOM_GPU)
    assert len(result.nothing_feasible) == 2
    assert TrialState.MEASURED not in states(store)


@pytest.mark.parametrize(
    ("search", "reason", "launched"),
    [
        ({"max_trials": 4}, StopReason.TRIALS, 8),  # per cell
        (
            {"max_gpu_hours": 3 / 3600},
            StopReason.GPU_HOURS,
            3,
            # A scripted attempt holds 1 GPU-second per GPU.
        ),
        ({"strategy": "auto", "plateau": {"trials": 2, "gain": 0.01}}, StopReason.PLATEAU, 6),
    ],
)
def test_a_spent_budget_stops_the_sweep(
    store: Store, search: dict[str, Any], reason: StopReason, launched: int
) -> None:
    gpus = [1] if reason is StopReason.GPU_HOURS else [1, 2]
    result, scheduler = run(store, fast, spec=spec(search=search, gpus=gpus))
    assert set(result.stopped.values()) == {reason}
    assert len(scheduler.started) == launched


def test_a_larger_budget_goes_on_where_the_smaller_stopped(store: Store) -> None:
    _, first = run(store, fast, spec=spec(search={"max_trials": 2}))
    _, second = run(store, fast, spec=spec(search={"max_trials": 5}))
    assert len(first.started) == 4
    assert len(second.started) == 6
    assert not {layout for layout, _ in first.started} & {layout for layout, _ in second.started}


def after(count: int, level: Stop) -> Callable[[], Stop]:
    asked = iter(range(10_000))
    return lambda: level if next(asked) >= count else Stop.GO_ON


def test_draining_finishes_what_runs_and_starts_nothing_new(store: Store) -> None:
    result, scheduler = run(store, fast, stop=after(6, Stop.DRAIN))
    assert result.interrupted
    assert not result.finished
    assert 0 < len(scheduler.started) < 12
    assert states(store) == {TrialState.MEASURED: len(scheduler.started)}


def test_a_request_to_stop_after_the_last_trial_interrupts_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the last snapshot is shown.
    monkeypatch.setattr(snapshots, "SHOW_SECONDS", inf)
    shown: list[Snapshot] = []

    def stop() -> Stop:
        return Stop.DRAIN if shown else Stop.GO_ON

    result, _ = run(store, fast, spec=spec(gpus=1), stop=stop, observe=shown.append)
    assert len(shown) == 1
    assert not result.interrupted and result.finished


def test_cancelling_leaves_the_running_trials_waiting_for_the_next_call(store: Store) -> None:
    result, scheduler = run(
        store,
        fast,
        scheduler=FakeScheduler(fast, slots=4, device=Device.CUDA),
        stop=after(3, Stop.CANCEL),
    )
    assert result.interrupted
    waiting = states(store)[TrialState.QUEUED]
    assert waiting > 0
    assert states(store)[TrialState.MEASURED] + waiting == len(scheduler.started)
    run(store, fast)
    assert states(store) == {TrialState.MEASURED: 12}


def test_a_signal_while_the_sweep_is_acquired_leaves_no_lease_and_no_empty_sweep(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = Store.acquire

    def interrupted(*args: Any, **kwargs: Any) -> int:
        acquire(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "acquire", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(store, fast)
    assert store.sweeps() == []
    monkeypatch.undo()
    run(store, fast)
    before = store.sweep_named("t")
    monkeypatch.setattr(Store, "acquire", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(store, fast)
    assert replace(store.sweep_named("t"), owner_epoch=before.owner_epoch) == before


def test_a_second_orchestrator_starts_nothing_and_names_the_first(
    store: Store, sqlite_url: str
) -> None:
    def nested(_: TrialRequest) -> float:
        with Store.open(sqlite_url) as other, pytest.raises(SweepInUse, match="pid"):
            run_sweep(
                spec(),
                store=other,
                open_scheduler=pytest.fail,
                code=CODE,
                hardware=lambda _: None,
                clock=time.monotonic,
            )
        return 1.0

    run(store, nested, spec=spec(gpus=1))
    assert states(store)[TrialState.MEASURED] == 6


def test_a_gang_that_no_cluster_can_hold_is_refused_at_once(store: Store) -> None:
    with pytest.raises(ResourcesInsufficient, match="gpus: 64"):
        run(store, fast, spec=spec(gpus=64, global_batch_size=64))


def test_a_drain_asked_for_through_the_store_is_obeyed(store: Store) -> None:
    from db.types import StopRequest
    from orchestrator.sweep import lease

    def script(request: TrialRequest) -> float:
        store.request_stop(store.sweep_named("t").id, StopRequest.DRAIN)
        return fast(request)

    before, lease.RENEW_SECONDS = lease.RENEW_SECONDS, -1.0
    try:
        result, scheduler = run(store, script)
    finally:
        lease.RENEW_SECONDS = before
    assert result.interrupted
    assert len(scheduler.started) < 12


@pytest.mark.parametrize("copied", [False, True])
def test_a_store_that_is_taken_away_ends_the_sweep_and_keeps_the_end_of_what_ran(
    store: Store, sqlite_url: str, tmp_path: Path, copied: bool
) -> None:
    file = store.path
    assert file is not None
    gone = file.with_name("gone")

    def script(request: TrialRequest) -> float:
        if request.trial_id == 2:
            if copied:  # as of before this trial
                with sqlite3.connect(file) as source, sqlite3.connect(tmp_path / "copy") as target:
                    source.backup(target)
                target.close()
            file.rename(gone)
            if copied:
                (tmp_path / "copy").rename(file)
        return fast(request)

    scheduler = FakeScheduler(script)
    with pytest.raises(
        StoreUnavailable, match="was replaced by another file" if copied else "was deleted"
    ):
        run(store, script, scheduler=scheduler, run_root=lambda folder: tmp_path / folder)
    assert len(scheduler.started) == 2
    assert [path.name for path in tmp_path.rglob("spool/*")] == ["trial-2-attempt-1.json"]
    gone.rename(file)  # put back
    with Store.open(sqlite_url) as again:
        _, second = run(again, fast, run_root=lambda folder: tmp_path / folder, takeover=True)
        assert states(again) == {TrialState.MEASURED: 12}
    assert len(second.started) == 10
    assert not list(tmp_path.rglob("spool/*"))


def test_snapshots_count_every_trial_once(store: Store) -> None:
    seen: list[Snapshot] = []
    run(store, out_of_memory_above(2), observe=seen.append)
    assert sum(seen[-1].counts.values()) == 12
    assert all(count >= 0 for snapshot in seen for count in snapshot.counts.values())
    assert seen[-1].running == []
    assert seen[-1].gpu_seconds > 0


def test_what_a_rank_made_up_beyond_physics_is_a_failure_not_a_result(store: Store) -> None:
    from orchestrator.core.trial.protocol import RankResult

    class Boasting(FakeScheduler):
        def poll(self, timeout_seconds: float) -> list[Any]:
            events = super().poll(timeout_seconds)
            for event in events:
                for report in getattr(event, "reports", []):
                    for i, outcome in enumerate(report.ranks):
                        boast = RankResult(step_seconds=[1e-6] * 6, peak_flops=1e9)
                        report.ranks[i] = type(outcome)(
                            rank=outcome.rank, exit_code=0, result=boast
                        )
            return events

    with pytest.raises(UsageInvalid, match=r"failed in the same way.* more than the device can do"):
        run(store, fast, scheduler=Boasting(fast), spec=spec(gpus=1))
    rows = store.trials(store.sweep_named("t").id)
    assert {t.failure_kind for t in rows} == {FailureKind.BAD_RESULT}


def test_a_machine_that_fails_everybody_ends_the_call_before_any_trial_is_used_up(
    store: Store,
) -> None:
    with pytest.raises(
        ClusterUnavailable, match="5 attempts one after the other failed by the machine's fault"
    ):
        run(store, lambda _: FailureKind.LAUNCH_FAILED)
    assert TrialState.FAILED not in states(store)
    assert store.sweep_named("t").holder is None
    run(store, fast)
    assert states(store) == {TrialState.MEASURED: 12}


def test_a_node_that_is_lost_with_eight_gangs_costs_each_an_attempt_and_ends_no_sweep(
    store: Store,
) -> None:
    wide = spec(
        gpus=1,
        global_batch_size=64,
        axes={
            "micro_batch_size": [1, 2, 4, 8, 16, 32, 64],
            "recompute": ["none", "full", "selective_ops"],
        },
    )

    def script(request: TrialRequest) -> float | FailureKind:
        is_on_the_lost_node = request.trial_id <= 16 and scheduler.nodes_of[request.trial_id] == (
            "a",
        )
        return (
            FailureKind.NODE_LOST if is_on_the_lost_node and request.attempt == 1 else fast(request)
        )

    scheduler = FakeScheduler(script, device=Device.CUDA, nodes={"a": 8, "b": 8})
    run(store, script, spec=wide, scheduler=scheduler, clock=time.monotonic)
    assert states(store) == {TrialState.MEASURED: 21}
    assert Counter(trial.num_attempts for trial in store.trials(1)) == {2: 8, 1: 13}


def test_one_mistake_in_the_program_is_told_once_not_once_per_layout(store: Store) -> None:
    with pytest.raises(UsageInvalid, match="the first 5 attempts failed in the same way"):
        run(store, lambda _: FailureKind.USER_ERROR)
    assert states(store)[TrialState.FAILED] == 5


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (lambda _: FailureKind.USER_ERROR, "the first 5 attempts failed"),
        (lambda _: FailureKind.NODE_LOST, "5 attempts one after the other failed"),
    ],
)
def test_every_failure_that_a_message_counts_was_shown_before(
    store: Store, script: Script, said: str
) -> None:
    seen: list[Snapshot] = []
    with pytest.raises((UsageInvalid, ClusterUnavailable), match=said):
        run(store, script, observe=seen.append)
    assert sum(len(snapshot.ended) for snapshot in seen) == 5


def test_a_trial_that_the_machine_failed_lets_another_go_first(store: Store) -> None:
    lost: list[int] = []

    def script(request: TrialRequest) -> float | FailureKind:
        if not lost:
            lost.append(request.trial_id)
            return FailureKind.NODE_LOST
        return fast(request)

    _, scheduler = run(store, script, spec=spec(gpus=1))
    first, second, third = scheduler.started[:3]
    assert (first[0] == second[0], third[0] == first[0], third[1]) == (False, True, 2)


def test_a_machines_fault_is_not_told_to_the_search(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    from orchestrator.search.searcher import Searcher

    tell = Searcher.tell
    monkeypatch.setattr(
        Searcher,
        "tell",
        lambda self, layout, outcome, **k: told.append(outcome) or tell(self, layout, outcome, **k),
    )
    run(
        store,
        lambda r: FailureKind.NODE_LOST if r.layout.micro_batch_size == 4 else fast(r),
        spec=spec(gpus=1),
    )
    assert len(told) == 4
    assert all(isinstance(outcome, Measured) for outcome in told)


def test_what_may_not_reach_the_program_is_said_of_every_measurement(store: Store) -> None:
    run(store, fast, spec=spec(gpus=1), not_passed="mbs may not reach the program")
    trials = store.trials(store.sweep_named("t").id)
    measured = [trial for trial in trials if trial.state is TrialState.MEASURED]
    assert measured
    assert {trial.unchecked for trial in measured} == {"mbs may not reach the program"}


def test_a_cell_without_a_legal_layout_is_not_feasible(store: Store) -> None:
    result, scheduler = run(store, fast, spec=spec(axes={"micro_batch_size": [3]}))
    assert len(result.nothing_feasible) == 2
    assert scheduler.started == []


def test_numbers_of_another_fingerprint_are_neither_the_live_best_nor_told_to_the_search(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    run(store, lambda _: 0.001, spec=spec(search={"max_trials": 2}, gpus=1))
    seen: list[Snapshot] = []
    chosen = FakeScheduler(lambda _: 1.0)
    other = Fingerprint(orchestrator_version="other")
    run_sweep(
        spec(gpus=1),
        store=store,
        open_scheduler=lambda: chosen,
        code=other,
        hardware=lambda _: None,
        clock=time.monotonic,
        observe=seen.append,
    )
    (best,) = seen[-1].best.values()
    assert best[1] == pytest.approx(64 * 8 / 1.0)
    assert len(chosen.started) == 4
    (warning,) = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert "(version of layout-sweep test -> other)" in warning


@pytest.mark.parametrize(("git_sha", "has_changed"), [("other", True), (None, False)])
def test_a_call_that_measures_nothing_tells_whether_its_code_is_that_of_the_numbers(
    store: Store, git_sha: str | None, has_changed: bool
) -> None:
    first, _ = run(store, fast, spec=spec(gpus=1))
    again = FakeScheduler(fast)
    result = run_sweep(
        spec(gpus=1),
        store=store,
        open_scheduler=lambda: again,
        code=CODE.model_copy(update={"git_sha": git_sha}),
        hardware=lambda _: None,
        clock=time.monotonic,
    )
    assert again.started == []
    assert (first.code_has_changed, result.code_has_changed) == (False, has_changed)


def test_what_was_reserved_before_counts_against_the_budget(store: Store) -> None:
    run(store, fast, spec=spec(search={"max_trials": 3}, gpus=1))  # 3 GPU-seconds
    result, scheduler = run(store, fast, spec=spec(search={"max_gpu_hours": 3 / 3600}, gpus=1))
    assert scheduler.started == []
    assert set(result.stopped.values()) == {StopReason.GPU_HOURS}


def test_wall_time_ends_a_call_and_the_next_goes_on(store: Store) -> None:
    now = iter(range(0, 100_000, 10))
    result, scheduler = run(
        store, fast, spec=spec(search={"max_wall_time": 60}, gpus=1), clock=lambda: float(next(now))
    )
    assert set(result.stopped.values()) == {StopReason.WALL_TIME}
    assert not result.finished
    assert len(scheduler.started) < 6


def test_what_a_fallen_proof_frees_is_chosen_again_like_any_other_layout(store: Store) -> None:
    chosen = spec(gpus=1, search={"strategy": "random", "seed": 5})
    run(store, out_of_memory_above(1), spec=chosen)
    assert states(store)[TrialState.PRUNED] == 1
    freed = store.invalidate("state = 'out_of_memory'")
    assert freed == 2
    result, scheduler = run(store, fast, spec=chosen)
    assert states(store) == {TrialState.MEASURED: 6}
    assert result.counts[TrialState.QUEUED] == 0
    assert len(scheduler.started) == 2


class Thinking:
    """A clock for a search that takes a second to think and trials that take so many; notes how
    many ran while it thought.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, script: Script, *, trial_seconds: float
    ) -> None:
        self.now, self.script, self.trial_seconds = 0.0, script, trial_seconds
        self.running_meanwhile: list[int] = []
        self.scheduler = FakeScheduler(self.run, device=Device.CUDA, slots=1)
        ask = Searcher.ask

        def slow_ask(searcher: Searcher) -> Proposal | None:
            self.now += 1.0
            self.running_meanwhile.append(self.scheduler.num_running)
            return ask(searcher)

        monkeypatch.setattr(Searcher, "ask", slow_ask)

    def run(self, request: TrialRequest) -> float | FailureKind:
        self.now += self.trial_seconds
        return self.script(request)


def test_a_search_that_thinks_long_beside_a_trial_does_so_while_one_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinking = Thinking(monkeypatch, fast, trial_seconds=5.0)
    run(
        store,
        thinking.run,
        scheduler=thinking.scheduler,
        clock=lambda: thinking.now,
        spec=spec(gpus=1),
    )
    # Nothing runs yet, and nobody knows how long a trial takes.
    assert thinking.running_meanwhile[:2] == [
        0,
        0,
    ]
    assert set(thinking.running_meanwhile[2:-1]) == {1}


def test_a_search_that_is_quick_beside_a_trial_waits_for_its_result(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinking = Thinking(monkeypatch, fast, trial_seconds=50.0)
    run(
        store,
        thinking.run,
        scheduler=thinking.scheduler,
        clock=lambda: thinking.now,
        spec=spec(gpus=1),
    )
    assert set(thinking.running_meanwhile) == {0}


@pytest.mark.parametrize("seed", range(6))
def test_what_was_chosen_ahead_is_not_launched_when_a_proof_rules_it_out(
    store: Store, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    thinking = Thinking(monkeypatch, out_of_memory_above(1), trial_seconds=5.0)
    axes = {"micro_batch_size": [1, 2, 4, 8, 16, 32], "recompute": ["none", "full"]}
    wide = spec(
        gpus=1, global_batch_size=64, axes=axes, search={"strategy": "random", "seed": seed}
    )
    run(store, thinking.run, scheduler=thinking.scheduler, clock=lambda: thinking.now, spec=wide)
    assert len(store.trials(store.sweep_named("t").id)) == 12
    order = [layout for layout, _ in thinking.scheduler.started]
    proofs = [
        layout
        for layout in order
        if layout.micro_batch_size > 1 and layout.recompute.mode is RecomputeMode.NONE
    ]
    assert proofs
    assert all(
        later.micro_batch_size < first.micro_batch_size for first, later in pairwise(proofs)
    )  # else it was ruled out


def test_an_attempt_that_is_lost_has_its_nodes(store: Store) -> None:
    class Dying(FakeScheduler):
        def poll(self, timeout_seconds: float) -> list[Any]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, fast, scheduler=Dying(fast), spec=spec(gpus=1))
    run(store, fast, spec=spec(gpus=1))
    attempts = [
        attempt
        for trial in store.trials(store.sweep_named("t").id)
        for attempt in store.trial(trial.id).attempts
    ]
    assert [attempt.nodes for attempt in attempts if attempt.state is AttemptState.LOST] == [
        ("here",)
    ]


def test_the_first_step_of_a_long_trial_is_in_the_store_while_it_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    seen: list[tuple[float, set[TrialState]]] = []

    class Long(FakeScheduler):
        """One trial, of which the first poll says that it steps; each poll takes 2 s."""

        def poll(self, timeout_seconds: float) -> list[Any]:
            seen.append((now[0], set(states(store))))
            now[0] += 2.0
            trial_id = next(iter(self._running))
            return (
                [Progressed(trial_id=trial_id, phase=Phase.STEADY, step=1)]
                if now[0] < 12.0
                else super().poll(timeout_seconds)
            )

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run(store, fast, scheduler=Long(fast), spec=spec(gpus=1, search={"max_trials": 1}))
    # Noted when the lease is renewed: every 5 s.
    assert [state for _, state in seen] == [{TrialState.LAUNCHING}] * 3 + [{TrialState.RUNNING}] * 3
    assert [e.event for e in store.trial(1).events] == [
        "added",
        "gang_placed",
        "first_step",
        "measured",
    ]


class Together(FakeScheduler):
    """All that runs ends by one poll."""

    def poll(self, timeout_seconds: float) -> list[Any]:
        events: list[Any] = []
        while self.num_running:
            events += super().poll(timeout_seconds)
        return events


def test_what_ends_by_one_poll_is_one_commit_and_counted_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: set[int] = set()

    def script(request: TrialRequest) -> float | FailureKind:
        if request.layout.micro_batch_size == 2 and request.trial_id not in lost:
            lost.add(request.trial_id)
            return FailureKind.NODE_LOST
        if (
            request.layout.micro_batch_size == 1
            and request.layout.recompute.mode is not RecomputeMode.NONE
        ):
            return FailureKind.USER_ERROR
        return out_of_memory_above(2)(request)

    batches: list[int] = []
    record_ends = Store.record_ends
    monkeypatch.setattr(
        Store,
        "record_ends",
        lambda self, ends, **k: batches.append(len(ends)) or record_ends(self, ends, **k),
    )
    monkeypatch.setattr(
        Store,
        "note_first_steps",
        lambda *a, **k: pytest.fail("a commit of its own for a first step told with the end"),
    )
    monkeypatch.setattr(
        Store,
        "note_first_steps",
        lambda self, attempts, **k: pytest.fail("a commit for it") if attempts else None,
    )
    seen: list[Snapshot] = []
    _, scheduler = run(
        store, script, scheduler=Together(script, slots=18, device=Device.CUDA), observe=seen.append
    )
    assert max(batches) >= 10
    assert sum(batches) == len(scheduler.started)
    assert states(store)[TrialState.MEASURED] == 8
    assert {state: count for state, count in seen[-1].counts.items() if count} == states(store)
    assert sum(len(snapshot.ended) for snapshot in seen) == len(scheduler.started)
    trials = [store.trial(row.id) for row in store.trials(store.sweep_named("t").id)]
    assert all(
        "first_step" in [e.event for e in t.events]
        for t in trials
        if t.trial.state is TrialState.MEASURED
    )


def test_an_end_that_the_store_refuses_is_a_bad_result_of_its_trial_alone(store: Store) -> None:
    class Boundless(Together):
        """Says of each that crashed that it did in a step that no column holds."""

        def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
            events = super().poll(timeout_seconds)
            failed = {
                e.trial_id: e.failure
                for e in events
                if isinstance(e, Finished) and e.failure is not None
            }
            return [
                replace(e, failure=replace(failed[e.trial_id], step=2**70))
                if isinstance(e, Finished) and e.trial_id in failed
                else e
                for e in events
            ]

    def script(request: TrialRequest) -> float | FailureKind:
        return FailureKind.USER_ERROR if request.layout.micro_batch_size == 2 else fast(request)

    seen: list[Snapshot] = []
    result, _ = run(
        store,
        script,
        scheduler=Boundless(script, slots=18, device=Device.CUDA),
        observe=seen.append,
    )
    rows = store.trials(result.sweep_id)
    assert Counter(row.failure_kind for row in rows) == {None: 8, FailureKind.BAD_RESULT: 4}
    assert all(
        "the database refuses how it ended" in (row.failure_message or "")
        for row in rows
        if row.failure_kind is not None
    )
    assert {state: count for state, count in seen[-1].counts.items() if count} == states(store)
    assert result.finished


@pytest.mark.parametrize(
    ("ask_seconds", "sizes"),
    [(0.0, [6]), (1.0, [1] * 6)],
    ids=["at once", "each after a second of thought"],
)
def test_what_starts_together_is_one_commit_unless_the_search_thinks_long(
    store: Store, monkeypatch: pytest.MonkeyPatch, ask_seconds: float, sizes: list[int]
) -> None:
    now = [0.0]
    begun: list[int] = []
    ask, begin_trials = Searcher.ask, Store.begin_trials

    def thoughtful(searcher: Searcher) -> Proposal | None:
        now[0] += ask_seconds
        return ask(searcher)

    def counted(self: Store, new: Sequence[Any], *, epoch: int) -> list[tuple[int, int]]:
        begun.extend([len(new)] if new else [])
        return begin_trials(self, new, epoch=epoch)

    monkeypatch.setattr(Searcher, "ask", thoughtful)
    monkeypatch.setattr(Store, "begin_trials", counted)
    _, scheduler = run(
        store,
        fast,
        scheduler=Together(fast, slots=6, device=Device.CUDA),
        spec=spec(gpus=1),
        clock=lambda: now[0],
    )
    assert begun == sizes
    assert scheduler.most_at_once == 6


def test_of_what_ends_by_one_poll_only_the_newest_software_is_compared(store: Store) -> None:
    class Upgraded(Together):
        """The last of the first poll runs on other software than those before it, and so does all
        that follows.
        """

        def poll(self, timeout_seconds: float) -> list[Any]:
            events = super().poll(timeout_seconds)
            ended = [event for event in events if isinstance(event, Finished)]
            for event in ended[-1:] if len(self.started) == 6 else ended:
                for report in event.reports:
                    for i, outcome in enumerate(report.ranks):
                        assert outcome.result is not None
                        newer = outcome.result.model_copy(update={"stack": Stack(torch="9.9")})
                        report.ranks[i] = replace(outcome, result=newer)
            return events

    seen: list[Snapshot] = []
    scheduler = Upgraded(lambda _: 1.0, slots=6, device=Device.CUDA)
    result, _ = run(
        store, fast, scheduler=scheduler, spec=spec(gpus=1, repeats=1), observe=seen.append
    )
    last, _ = scheduler.started[5]
    ((best, value),) = seen[-1].best.values()
    assert (best, value) == (last, 64 * 8 / 1.0)
    assert len(store.fingerprints(result.sweep_id)) == 2
    (current,) = [t for t in store.trials(store.sweep_named("t").id) if t.is_current_fingerprint]
    assert current.layout == last
    assert states(store) == {TrialState.MEASURED: 6}


def test_what_starts_after_an_edit_of_the_program_is_kept_apart(store: Store) -> None:
    edited = edited_code()
    # Asked at the start of each attempt and at its first step.
    edits = [*[None] * 4, edited]
    result, scheduler = run(
        store, fast, spec=spec(gpus=1), edited=lambda: edits.pop(0) if edits else None
    )
    assert len(store.fingerprints(result.sweep_id)) == 2
    rows = {t.layout: t.is_current_fingerprint for t in store.trials(result.sweep_id)}
    assert [rows[layout] for layout, _ in scheduler.started] == [False] * 2 + [True] * 4
    assert not result.code_has_changed


def edited_code(digest: str = "files:b") -> Fingerprint:
    return CODE.model_copy(update={"dirty_diff_digest": digest})


def test_an_attempt_that_starts_while_its_program_is_edited_runs_again(store: Store) -> None:
    edited = edited_code()
    # Asked at the start of an attempt, and at its first step: that of the third comes too late.
    edits = [None, None, None, None, None, edited]
    result, scheduler = run(
        store, fast, spec=spec(gpus=1), edited=lambda: edits.pop(0) if edits else None
    )
    third = scheduler.started[2][0]
    assert [attempt for layout, attempt in scheduler.started if layout == third] == [1, 2]
    assert states(store) == {TrialState.MEASURED: 6}
    trials = {t.layout: t for t in store.trials(result.sweep_id)}
    assert trials[third].is_current_fingerprint
    first, second = store.trial(trials[third].id).attempts
    assert first.failure is not None and first.failure.kind is FailureKind.EDITED
    assert "edited after its start, and before the check" in first.failure.message
    assert second.state is AttemptState.MEASURED
    # It measured nothing, so its code is none that the sweep was measured with.
    assert [one.dirty_diff_digest for one in store.fingerprints(result.sweep_id)] == [
        CODE.dirty_diff_digest,
        "files:b",
    ]


def test_one_edit_while_all_first_attempts_start_ends_no_call(store: Store) -> None:
    scheduler = FakeScheduler(fast, device=Device.CUDA, nodes={"n0": 6}, first_among=6)
    edits, ticks = [edited_code()], count()
    run(
        store,
        fast,
        scheduler=scheduler,
        spec=spec(gpus=1, gpus_per_node=6),
        edited=lambda: edits.pop() if edits and len(scheduler.started) == 6 else None,
        clock=lambda: float(next(ticks)),
    )
    assert states(store) == {TrialState.MEASURED: 6}
    assert Counter(attempt for _, attempt in scheduler.started) == {1: 6, 2: 6}


def test_an_edit_in_a_later_attempt_runs_again_as_in_the_first(store: Store) -> None:
    def script(request: TrialRequest) -> float | FailureKind:
        is_lost = request.layout.micro_batch_size == 4 and request.attempt == 1
        return FailureKind.NODE_LOST if is_lost else fast(request)

    scheduler = FakeScheduler(script)
    edits = [edited_code()]

    def edited() -> Fingerprint | None:
        starts_again = any(attempt == 2 for _, attempt in scheduler.started)
        return edits.pop() if edits and starts_again else None

    result, _ = run(store, script, scheduler=scheduler, spec=spec(gpus=1), edited=edited)
    (trial,) = [t for t in store.trials(result.sweep_id) if t.num_attempts == 3]
    assert (trial.state, trial.implausible) == (TrialState.MEASURED, None)
    kinds = [one.failure and one.failure.kind for one in store.trial(trial.id).attempts]
    assert kinds == [FailureKind.NODE_LOST, FailureKind.EDITED, None]


def test_an_edit_is_found_also_if_checks_take_long(store: Store) -> None:
    class Edited(FakeScheduler):
        """The program is edited while the second attempt starts."""

        on_disk = CODE

        def poll(self, timeout_seconds: float) -> list[Any]:
            if len(self.started) == 2:
                self.on_disk = edited_code()
            return super().poll(timeout_seconds)

    scheduler, known = Edited(fast), [CODE]

    def edited() -> Fingerprint | None:
        time.sleep(2 * ALWAYS_CHECKED_SECONDS)
        if scheduler.on_disk == known[-1]:
            return None
        known.append(scheduler.on_disk)
        return scheduler.on_disk

    result, _ = run(store, fast, scheduler=scheduler, spec=spec(gpus=1), edited=edited)
    first, second, *_ = store.trials(result.sweep_id)
    assert (first.num_attempts, second.num_attempts) == (1, 2)
    assert not first.is_current_fingerprint and second.is_current_fingerprint


def test_one_check_for_edits_serves_all_that_end_in_one_poll(store: Store) -> None:
    class Together(FakeScheduler):
        def poll(self, timeout_seconds: float) -> list[Any]:
            ended = []
            while self._running:
                ended += super().poll(timeout_seconds)
            return ended

    scheduler = Together(fast, device=Device.CUDA, nodes={"n0": 6})
    num_running: list[int] = []
    run(
        store,
        fast,
        scheduler=scheduler,
        spec=spec(gpus=1, gpus_per_node=6),
        edited=lambda: num_running.append(scheduler.num_running),
    )
    # One before each start, and one after all ends.
    assert num_running == [0, 1, 2, 3, 4, 5, 0]


def test_an_edit_is_kept_with_an_end_that_the_store_did_not_get(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits = [None, edited_code()]

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "record_ends", away)
        with pytest.raises(StoreUnavailable):
            run(
                store,
                fast,
                spec=spec(gpus=1),
                edited=lambda: edits.pop(0) if edits else None,
                run_root=lambda _: tmp_path,
            )
    result, _ = run(store, fast, spec=spec(gpus=1), run_root=lambda _: tmp_path)
    (again,) = [t for t in store.trials(result.sweep_id) if t.num_attempts == 2]
    kinds = [one.failure and one.failure.kind for one in store.trial(again.id).attempts]
    assert kinds == [FailureKind.EDITED, None]


def test_repeats_of_a_program_that_writes_its_own_sources_end(store: Store) -> None:
    run(store, fast, spec=spec(gpus=1))
    codes = iter(range(1000))
    result, scheduler = run(
        store,
        fast,
        spec=spec(gpus=1, repeats=2),
        edited=lambda: edited_code(f"files:{next(codes)}"),
    )
    repeats = Counter(layout for layout, _ in scheduler.started)
    assert repeats and max(repeats.values()) == 1 + POLICIES[FailureKind.EDITED].max_retries
    failed = store.failed_repeats([trial.id for trial in store.trials(result.sweep_id)])
    assert {one.failure_kind for one in failed} == {FailureKind.EDITED}
    assert states(store) == {TrialState.MEASURED: 6}


def test_hangs_of_a_program_that_was_edited_are_not_the_nodes_fault(store: Store) -> None:
    class Edited(FakeScheduler):
        """The program is edited while it starts on n1, where it then hangs."""

        on_disk, stepped = CODE, False

        def poll(self, timeout_seconds: float) -> list[Any]:
            if self.stepped or len(self._running) < 4:
                self.on_disk = edited_code() if self.stepped else CODE
                ended = []
                while self._running:
                    ended += super().poll(timeout_seconds)
                return ended
            self.stepped = True
            return [
                Progressed(trial_id=trial_id, phase=Phase.STEADY, step=1)
                for trial_id, nodes in self.nodes_of.items()
                if list(nodes) == ["n0"]
            ]

    def script(request: TrialRequest) -> float | FailureKind:
        hangs = request.trial_id in (3, 4) and request.attempt == 1
        return FailureKind.HUNG if hangs else fast(request)

    scheduler = Edited(script, device=Device.CUDA, nodes={"n0": 2, "n1": 2})
    known = [CODE]

    def edited() -> Fingerprint | None:
        if scheduler.on_disk == known[-1]:
            return None
        known.append(scheduler.on_disk)
        return scheduler.on_disk

    result, _ = run(
        store, script, scheduler=scheduler, spec=spec(gpus=1, gpus_per_node=2), edited=edited
    )
    for trial_id in (3, 4):
        first, second = store.trial(trial_id).attempts
        assert first.failure is not None and first.failure.kind is FailureKind.EDITED
        assert first.nodes == ("n1",) and second.state is AttemptState.MEASURED
    assert store.benches(result.sweep_id) == []


def test_a_program_that_writes_its_own_sources_ends_the_call(store: Store) -> None:
    codes = iter(range(100))
    with pytest.raises(UsageInvalid, match="edited after its start, and before the check"):
        run(store, fast, spec=spec(gpus=1), edited=lambda: edited_code(f"files:{next(codes)}"))
    first, *_ = store.trials(store.sweep_named("t").id)
    assert (first.state, first.failure_kind) == (TrialState.FAILED, FailureKind.EDITED)
    assert first.num_attempts == 1 + POLICIES[FailureKind.EDITED].max_retries


def test_an_edit_while_the_winner_is_confirmed_ends_that_and_is_said(store: Store) -> None:
    edited = CODE.model_copy(update={"dirty_diff_digest": "files:b"})
    # Asked at the start of each attempt and at its first step.
    edits = [*[None] * 12, edited]
    seen: list[Snapshot] = []
    result, scheduler = run(
        store,
        fast,
        spec=spec(gpus=1, repeats=2),
        edited=lambda: edits.pop(0) if edits else None,
        observe=seen.append,
    )
    assert [attempt for _, attempt in scheduler.started] == [1] * 6 + [2]
    # No trial has the new code.
    assert result.code_has_changed
    assert any("its trial: kept apart" in str(one) for one in seen)
    (counts,) = store.fingerprint_counts(result.sweep_id)
    assert (counts.num_current, counts.num_earlier, counts.num_apart) == (6, 0, 1)


def test_after_an_edit_was_taken_back_the_winner_is_confirmed(store: Store) -> None:
    edited = CODE.model_copy(update={"dirty_diff_digest": "files:b"})
    measured, _ = run(store, fast, spec=spec(gpus=1))
    started = []
    for code in (edited, edited, CODE):
        _, scheduler = run(store, fast, spec=spec(gpus=1, repeats=1), code=code)
        started.append(len(scheduler.started))
        (counts,) = store.fingerprint_counts(measured.sweep_id)
        assert (counts.num_current, counts.num_apart) == (6, 0 if code is CODE else 1)
    # The best two are tied, and each is repeated.
    assert started == [1, 0, 2]


def test_packages_that_are_found_later_begin_no_cell_anew(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    class FoundLater(FakeScheduler):
        """The packages of a program are found in every attempt but the first."""

        def poll(self, timeout_seconds: float) -> list[Any]:
            events = super().poll(timeout_seconds)
            if len(self.started) == 1:
                return events
            found = Software(packages=(("numpy", "2.1"),))
            return [
                replace(event, reports=[replace(one, software=found) for one in event.reports])
                if isinstance(event, Finished)
                else event
                for event in events
            ]

    result, _ = run(store, fast, scheduler=FoundLater(fast), spec=spec(gpus=1))
    rows = store.trials(result.sweep_id)
    assert len({row.fingerprint_digest for row in rows}) == 1 and len(rows) > 2
    assert all(row.is_current_fingerprint for row in rows)
    assert [one for one in caplog.messages if "kept apart" in one] == []


def test_what_ran_the_node_out_of_memory_is_tried_once_more_alone(store: Store) -> None:
    beside: dict[tuple[int, int], int] = {}

    class Watching(FakeScheduler):
        def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
            super().start(request, shape, nodes)
            for trial_id, (other, _) in self._running.items():
                beside[trial_id, other.attempt] = max(
                    beside.get((trial_id, other.attempt), 0), len(self._running) - 1
                )

    def script(request: TrialRequest) -> float | FailureKind:
        return (
            FailureKind.OOM_HOST
            if request.layout.micro_batch_size == 2 and request.attempt == 1
            else fast(request)
        )

    _, scheduler = run(store, script, scheduler=Watching(script, slots=4, device=Device.CUDA))
    assert scheduler.most_at_once > 1
    assert states(store) == {TrialState.MEASURED: 12}
    again = {trial_id: others for (trial_id, attempt), others in beside.items() if attempt == 2}
    assert len(again) == 4
    assert set(again.values()) == {0}


def test_what_has_to_be_alone_is_alone_in_the_next_call_too(store: Store) -> None:
    alone: list[bool] = []

    class Watching(FakeScheduler):
        def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
            super().start(request, shape, nodes)
            if request.attempt > 1:
                alone.append(len(self._running) == 1)

        def poll(self, timeout_seconds: float) -> list[Any]:
            if any(request.attempt > 1 for request, _ in self._running.values()):
                assert len(self._running) == 1
            return super().poll(timeout_seconds)

    def script(request: TrialRequest) -> float | FailureKind:
        return FailureKind.OOM_HOST if request.attempt == 1 else fast(request)

    run(
        store,
        script,
        spec=spec(gpus=1),
        scheduler=FakeScheduler(script, slots=4, device=Device.CUDA),
        stop=after(2, Stop.DRAIN),
    )
    assert states(store)[TrialState.QUEUED] > 1
    run(store, fast, spec=spec(gpus=1), scheduler=Watching(fast, slots=4, device=Device.CUDA))
    assert states(store) == {TrialState.MEASURED: 6}
    assert alone and all(alone)


class Noisy:
    """Step times by layout, run after run: what is not listed takes 10 s."""

    def __init__(self, runs: dict[str, list[float | FailureKind]]) -> None:
        self.runs = {short: iter(values) for short, values in runs.items()}
        self.taken: Counter[str] = Counter()

    def __call__(self, request: TrialRequest) -> float | FailureKind:
        self.taken[request.layout.short] += 1
        return (
            next(self.runs[request.layout.short], 1.0)
            if request.layout.short in self.runs
            else 10.0
        )


def shorts(store: Store) -> dict[str, tuple[TrialState, int]]:
    return {
        t.layout.short: (t.state, t.num_measurements)
        for t in store.trials(store.sweep_named("t").id)
    }


def test_what_stands_at_the_top_is_measured_again_until_one_is_the_winner(store: Store) -> None:
    names = [
        layout.short for layout, _ in run(store, fast, spec=spec(gpus=1, name="names"))[1].started
    ]
    first, second = names[:2]
    noisy = Noisy(
        {first: [1.00, 1.10, 1.10, 1.10, 1.10], second: [1.01, 1.00, 1.00]}
    )  # the first was lucky once
    now = [0.0]

    def a_minute_each(request: TrialRequest) -> float | FailureKind:
        now[0] += 60.0
        return noisy(request)

    # At random: a search with a model doubts the slow one between the two, which is not what this
    # is about.
    wanted = spec(gpus=1, repeats=2, search={"strategy": "random"})
    result, _ = run(store, a_minute_each, spec=wanted, clock=lambda: now[0])
    assert {2, 3, 4} >= {noisy.taken[first], noisy.taken[second]}
    # The others take 10 s: only an anchor and a pair that contradicts physics may be repeated.
    assert sum(noisy.taken.values()) - noisy.taken[first] - noisy.taken[second] <= 4 + 3
    assert [[layout.short for layout in tied] for tied in result.tied.values()] == [[second]]
    assert shorts(store)[second] == (TrialState.MEASURED, noisy.taken[second])
    best = store.best(store.sweep_named("t").id)
    assert next(iter(best.values()))[0].layout.short == second
    again, scheduler = run(store, a_minute_each, spec=wanted, clock=lambda: now[0])
    assert scheduler.started == []
    assert again.tied == result.tied


def test_layouts_that_cannot_be_told_apart_are_tied(store: Store) -> None:
    names = [
        layout.short for layout, _ in run(store, fast, spec=spec(gpus=1, name="names"))[1].started
    ]
    noisy = Noisy({names[0]: [1.00, 1.02, 1.01], names[1]: [1.01, 1.00, 1.02]})
    result, _ = run(store, noisy, spec=spec(gpus=1, repeats=2))
    assert {layout.short for (tied,) in [result.tied.values()] for layout in tied} == set(names[:2])


def test_a_repeat_that_fails_leaves_the_measurement_and_is_not_asked_for_without_end(
    store: Store,
) -> None:
    names = [
        layout.short for layout, _ in run(store, fast, spec=spec(gpus=1, name="names"))[1].started
    ]
    noisy = Noisy({names[0]: [1.00, *[FailureKind.OOM_GPU] * 9]})
    result, _ = run(store, noisy, spec=spec(gpus=1, repeats=2))
    assert noisy.taken[names[0]] == 2
    assert shorts(store)[names[0]] == (TrialState.MEASURED, 1)
    assert result.counts.get(TrialState.OUT_OF_MEMORY, 0) == 0
    assert result.counts[TrialState.MEASURED] == 6


def test_a_repeat_that_the_machine_failed_is_taken_again(store: Store) -> None:
    names = [
        layout.short for layout, _ in run(store, fast, spec=spec(gpus=1, name="names"))[1].started
    ]
    noisy = Noisy({names[0]: [1.00, FailureKind.NODE_LOST, 1.0]})
    run(store, noisy, spec=spec(gpus=1, repeats=1))
    assert shorts(store)[names[0]] == (TrialState.MEASURED, 2)


def test_a_spent_budget_confirms_nothing(store: Store) -> None:
    _, scheduler = run(
        store,
        fast,
        spec=spec(
            gpus=1, repeats=2, search={"max_gpu_hours": 2.5 / 3600, "confirm": {"repeats": 2}}
        ),
    )
    # The third would pass it: a scripted attempt holds 1 GPU-second per GPU.
    assert len({layout for layout, _ in scheduler.started}) == len(scheduler.started) == 2


def test_a_sweep_stopped_among_its_repeats_goes_on_with_them(store: Store) -> None:
    result, scheduler = run(store, fast, spec=spec(gpus=1, repeats=2), stop=after(8, Stop.CANCEL))
    assert result.interrupted
    before = len(scheduler.started)
    _, scheduler = run(store, fast, spec=spec(gpus=1, repeats=2))
    alone, other = run(store, fast, spec=spec(gpus=1, repeats=2, name="whole"))
    assert {t.num_measurements for t in store.trials(alone.sweep_id)} == {
        t.num_measurements for t in store.trials(result.sweep_id)
    }
    assert before + len(scheduler.started) <= len(other.started) + 1


def test_a_cancelled_repeat_is_not_told_as_a_failure(store: Store) -> None:
    told: list[str] = []

    def script(request: TrialRequest) -> float | FailureKind:
        return FailureKind.CANCELLED if request.attempt == 2 else fast(request)

    run(
        store,
        script,
        spec=spec(gpus=1, repeats=1),
        observe=lambda snapshot: told.extend(one.text for one in snapshot.ended),
    )
    assert any("repeat cancelled: " in text for text in told)
    assert not any("repeat failed" in text for text in told)


def test_a_value_that_its_neighbours_contradict_is_measured_once_more(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    tell = Searcher.tell

    def listening(searcher: Searcher, layout: Any, outcome: Any, **kwargs: Any) -> Any:
        if isinstance(outcome, Measured):
            told.append(outcome.score)
        return tell(searcher, layout, outcome, **kwargs)

    def doubting(searcher: Searcher) -> DoubtfulResult | None:
        slow = [layout for layout, _ in scheduler.started if layout.short == odd]
        return (
            DoubtfulResult(layout=slow[0], why="far off")
            if len(slow) == 1 and scheduler.num_running == 0
            else None
        )

    names = [
        layout.short for layout, _ in run(store, fast, spec=spec(gpus=1, name="names"))[1].started
    ]
    odd = names[2]
    noisy = Noisy({odd: [30.0, 2.0]})
    scheduler = FakeScheduler(noisy)
    monkeypatch.setattr(Searcher, "tell", listening)
    monkeypatch.setattr(Searcher, "doubtful", doubting)
    run(store, noisy, scheduler=scheduler, spec=spec(gpus=1))
    assert noisy.taken[odd] == 2
    detail = store.trial(
        next(t.id for t in store.trials(store.sweep_named("t").id) if t.layout.short == odd)
    )
    assert detail.trial.num_measurements == 2
    assert [(e.detail or {})["why"] for e in detail.events if e.event == "repeated"] == ["far off"]
    assert len(told) == 7


def test_a_cell_of_which_nothing_can_fit_is_given_up_with_the_evidence(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Searcher, "nothing_fits", lambda searcher: "the smallest failed" if searcher.told else None
    )
    search = {"strategy": "random"}
    result, scheduler = run(store, lambda _: FailureKind.OOM_GPU, spec=spec(gpus=1, search=search))
    assert set(result.stopped.values()) == {StopReason.NOTHING_FITS}
    assert list(result.nothing_fits.values()) == ["the smallest failed"]
    assert len(scheduler.started) == 1
    assert run(store, fast, spec=spec(gpus=1, search=search))[1].started == []


@pytest.mark.parametrize(("gain", "launched"), [(0.01, 3), (0.05, 6)])  # at most, and expected
def test_a_cell_of_which_no_more_is_expected_is_done(
    store: Store, monkeypatch: pytest.MonkeyPatch, gain: float, launched: int
) -> None:
    monkeypatch.setattr(Searcher, "expected_gain", lambda searcher: gain)
    result, scheduler = run(store, fast, spec=spec(gpus=1, search={"bound": 0.02}))
    assert len(scheduler.started) == launched
    assert set(result.stopped.values()) == {
        StopReason.BOUND if launched == 3 else StopReason.EXHAUSTED
    }


def test_a_cell_begins_from_what_the_cells_before_it_taught(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    observations = Store.observations

    def noting(asked: Store, **kwargs: Any) -> Any:
        found = observations(asked, **kwargs)
        seen.append(len(found))
        return found

    monkeypatch.setattr(Store, "observations", noting)
    result, scheduler = run(store, fast, spec=spec(search={"max_trials": 8}))
    # At the start, and when the second cell came to its turn.
    assert seen == [0, 6]
    assert (len(scheduler.started), result.counts[TrialState.MEASURED]) == (12, 12)


def test_each_cell_is_enumerated_once_per_run_however_often_its_search_begins_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    enumerated, begun = Counter[Cell](), Counter[Cell]()
    enumerate_cell, plan = space.enumerate_cell, CellSearches.plan

    def counting(spec: SweepSpec, cell: Cell, **how: Any) -> space.CellSpace:
        enumerated[cell] += 1
        return enumerate_cell(spec, cell, **how)

    def planning(searches: CellSearches, cell: Cell, cell_id: int) -> PlannedSearch:
        begun[cell] += 1
        return plan(searches, cell, cell_id)

    monkeypatch.setattr(space, "enumerate_cell", counting)
    monkeypatch.setattr(CellSearches, "plan", planning)
    one_at_a_time = spec(gpus=[1, 2], search={"max_parallel_trials": 1})
    run(store, fast, spec=one_at_a_time)
    # The second cell, once the first one taught something.
    assert max(begun.values()) == 2
    assert enumerated == dict.fromkeys(one_at_a_time.cells(), 1)


# -- one cell's trouble ----------------------------------------------------------------------------


def hanging(*gpus: int) -> Script:
    return lambda request: FailureKind.HUNG if request.layout.world_size in gpus else fast(request)


def test_a_cell_of_which_every_layout_hangs_is_stopped_and_the_others_are_measured(
    store: Store,
) -> None:
    one_at_a_time = spec(gpus=[1, 2, 4], search={"max_parallel_trials": 1})
    result, _ = run(
        store,
        hanging(2),
        spec=one_at_a_time,
        scheduler=FakeScheduler(hanging(2), slots=4, device=Device.CUDA),
    )
    reasons = {cell.num_gpus: reason for cell, reason in result.stopped.items()}
    assert reasons == {1: StopReason.EXHAUSTED, 2: StopReason.FAULTS, 4: StopReason.EXHAUSTED}
    assert [cell.num_gpus for cell in result.nothing_feasible] == [2]
    # On 4 GPUs a micro-batch of 4 is more than the batch.
    assert result.counts[TrialState.MEASURED] == 12 - 2
    assert not result.finished
    session = store.newest_session(result.sweep_id)
    assert session is not None
    assert StopReason.FAULTS in session.stop_reasons


def test_gangs_of_one_cell_that_hang_beside_each_other_end_no_other(store: Store) -> None:
    """All six at once, and once more: by then each has failed."""
    scheduler = FakeScheduler(hanging(2), slots=18, device=Device.CUDA)
    result, _ = run(store, hanging(2), scheduler=scheduler, clock=time.monotonic)
    assert states(store) == {TrialState.MEASURED: 6, TrialState.FAILED: 6}
    assert [cell.num_gpus for cell in result.nothing_feasible] == [2]


def test_the_next_call_tries_a_stopped_cell_again(store: Store) -> None:
    run(store, hanging(2))
    result, _ = run(store, fast)
    assert states(store) == {TrialState.MEASURED: 12}
    assert result.finished


def test_where_every_cell_hangs_and_nothing_works_it_is_the_machine(store: Store) -> None:
    with pytest.raises(ClusterUnavailable, match="5 attempts one after the other"):
        run(store, hanging(1, 2))
    assert TrialState.FAILED not in states(store)


def test_cells_that_fail_let_others_show_first_whether_anything_works(store: Store) -> None:
    one_at_a_time = spec(gpus=[1, 2], search={"max_parallel_trials": 1})
    _, scheduler = run(
        store,
        hanging(1),
        spec=one_at_a_time,
        scheduler=FakeScheduler(hanging(1), device=Device.CUDA),
    )
    sizes = [layout.world_size for layout, _ in scheduler.started]
    assert sizes[:2] == [1, 2]


def test_a_layout_that_hangs_twice_is_failed_and_told_to_the_search(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[object, object]] = []
    tell = Searcher.tell
    monkeypatch.setattr(
        Searcher,
        "tell",
        lambda self, layout, outcome: told.append((layout, outcome)) or tell(self, layout, outcome),
    )
    result, scheduler = run(
        store,
        lambda r: FailureKind.HUNG if r.layout.micro_batch_size == 4 else fast(r),
        spec=spec(gpus=1),
    )
    assert states(store) == {TrialState.MEASURED: 4, TrialState.FAILED: 2}
    assert result.finished
    # At once, so that layouts like them come later, and when they failed for good.
    hangs = Counter(layout for layout, outcome in told if isinstance(outcome, Failed))
    assert sorted(hangs.values()) == [2, 2]
    hung = [
        layout
        for layout, attempt in scheduler.started
        if layout.micro_batch_size == 4 and attempt == 1
    ]
    assert [layout for layout, _ in scheduler.started][-2:] == hung, (
        "where there is no other node, again comes last"
    )


@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_shape_that_hangs_ends_nothing_while_what_worked_works_again(
    store: Store, num_calls: int
) -> None:
    """Eight layouts, of which six hang, twice each: what was measured runs again between them."""
    shape = spec(
        gpus=1,
        axes={"micro_batch_size": [1, 2, 4, 8], "recompute": ["none", "full"]},
        search={"max_parallel_trials": 1, "strategy": "exhaustive"},
    )
    num_ended = num_checks = 0

    def script(request: TrialRequest) -> float | FailureKind:
        nonlocal num_ended, num_checks
        num_ended += 1
        works = request.layout.micro_batch_size == 1
        num_checks += works and request.attempt > 1
        return fast(request) if works else FailureKind.HUNG

    def stop() -> Stop:
        """Each call but the last one ends after five attempts."""
        return Stop.DRAIN if num_ended > 4 and not is_last else Stop.GO_ON

    for call in range(1, num_calls + 1):
        num_ended, is_last = 0, call == num_calls
        scheduler = FakeScheduler(script, device=Device.CUDA)
        result, _ = run(store, script, spec=shape, scheduler=scheduler, stop=stop)
    assert states(store) == {TrialState.MEASURED: 2, TrialState.FAILED: 6}
    assert result.finished
    assert num_checks


def test_a_machine_on_which_what_worked_hangs_as_well_is_at_fault(store: Store) -> None:
    num_ended = 0

    def script(request: TrialRequest) -> float | FailureKind:
        nonlocal num_ended
        num_ended += 1
        return fast(request) if num_ended <= 1 else FailureKind.HUNG

    one_at_a_time = spec(gpus=1, search={"max_parallel_trials": 1})
    with pytest.raises(ClusterUnavailable, match="6 attempts one after the other"):
        run(store, script, spec=one_at_a_time)
    assert states(store) == {TrialState.MEASURED: 1, TrialState.QUEUED: 5}


def test_what_hung_is_tried_again_on_another_node(store: Store) -> None:
    where: dict[int, list[str]] = {}

    def script(request: TrialRequest) -> float | FailureKind:
        where.setdefault(request.trial_id, []).append(scheduler.nodes_of[request.trial_id][0])
        return FailureKind.HUNG if request.trial_id == 1 and request.attempt == 1 else fast(request)

    scheduler = FakeScheduler(script, device=Device.CUDA, nodes={"a": 1, "b": 1})
    run(store, script, spec=spec(gpus=1), scheduler=scheduler)
    assert len(set(where[1])) == 2
    assert states(store) == {TrialState.MEASURED: 6}


def test_what_hung_goes_elsewhere_in_the_next_call_too(store: Store) -> None:
    asked: list[Stop] = []

    def script(request: TrialRequest) -> FailureKind:
        asked.append(Stop.CANCEL)
        return FailureKind.HUNG

    nodes = {"a": 1, "b": 1}
    one_at_a_time = spec(gpus=1, search={"max_parallel_trials": 1})
    first = FakeScheduler(script, device=Device.CUDA, nodes=nodes)
    run(
        store,
        script,
        spec=one_at_a_time,
        scheduler=first,
        stop=lambda: asked[-1] if asked else Stop.GO_ON,
    )
    second = FakeScheduler(fast, device=Device.CUDA, nodes=nodes)
    run(store, fast, spec=one_at_a_time, scheduler=second)
    assert states(store) == {TrialState.MEASURED: 6}
    assert first.nodes_of[1] != second.nodes_of[1]


def test_a_trial_is_given_time_by_what_its_step_is_predicted_to_take(store: Store) -> None:
    """70B on 16 GPUs: 73 to 81 s a step, and 60 s was what every step had."""
    requests: list[TrialRequest] = []

    def script(request: TrialRequest) -> float:
        requests.append(request)
        return 80.0

    large = spec(
        model="llama-3.1-70b",
        gpus=16,
        gpus_per_node=8,
        sequence_length=4096,
        global_batch_size=256,
        precision="bf16",
        axes={
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 2,
            "micro_batch_size": 1,
            "zero_stage": 0,
            "recompute": "full",
        },
        workload="synthetic",
        repeats=1,
    )
    scheduler = FakeScheduler(script, device=Device.CUDA, nodes={"a": 8, "b": 8})
    run_sweep(
        large,
        store=store,
        open_scheduler=lambda: scheduler,
        code=CODE,
        hardware=lambda _: DEVICES["h100-sxm"],
        clock=time.monotonic,
    )
    first, repeat = (request.limits for request in requests[:2])
    assert 300.0 < first.steady < 1200.0
    assert first.first_step == pytest.approx(300.0 + first.steady)
    assert repeat.steady >= 5 * 80.0, "of what was measured, the measurement tells"


def test_a_call_that_is_refused_before_its_first_launch_leaves_the_store_as_it_was(
    store: Store,
) -> None:
    too_large = spec(gpus=64, global_batch_size=64)
    with pytest.raises(ResourcesInsufficient):
        run(store, fast, spec=too_large)
    assert store.sweeps() == []

    def no_cluster() -> FakeScheduler:
        raise ClusterUnavailable("nobody answers")

    known = spec(gpus=1)
    run(store, fast, spec=known)
    before = store.sweep_named("t")
    for refused, open_scheduler in ((too_large, lambda: FakeScheduler(fast)), (known, no_cluster)):
        with pytest.raises((ResourcesInsufficient, ClusterUnavailable)):
            run_sweep(
                refused,
                store=store,
                open_scheduler=open_scheduler,
                code=CODE,
                hardware=lambda _: None,
                clock=time.monotonic,
            )
        after = store.sweep_named("t")
        assert (after.state, after.spec_json, after.holder) == (
            before.state,
            before.spec_json,
            None,
        )


def test_a_call_that_fails_after_its_first_launch_leaves_a_stopped_sweep(store: Store) -> None:
    with pytest.raises(UsageInvalid, match="failed in the same way"):
        run(store, lambda _: FailureKind.USER_ERROR)
    assert store.sweep_named("t").state is SweepState.STOPPED


def test_what_a_cancelled_attempt_reserved_is_told_from_what_failed(store: Store) -> None:
    result, _ = run(
        store,
        fast,
        scheduler=FakeScheduler(fast, slots=4, device=Device.CUDA),
        stop=after(3, Stop.CANCEL),
    )
    reserved = store.reserved(result.sweep_id).total
    cancelled = [
        a
        for row in store.trials(result.sweep_id)
        for a in store.trial(row.id).attempts
        if a.failure is not None
    ]
    assert {a.failure.kind for a in cancelled if a.failure is not None} == {FailureKind.CANCELLED}
    assert reserved.failed == 0.0
    assert reserved.cancelled == pytest.approx(sum(a.gpu_seconds or 0.0 for a in cancelled))


def test_untried_layouts_are_counted_also_once_a_search_has_ended(store: Store) -> None:
    seen: list[Snapshot] = []
    result, _ = run(store, fast, spec=spec(gpus=1, search={"max_trials": 2}), observe=seen.append)
    assert (seen[-1].untried, seen[-1].at_most, seen[-1].num_launched) == (4, 2, 2)
    assert list(result.untried.values()) == [4]
    assert [(one.reason, one.untried) for snapshot in seen for one in snapshot.searched] == [
        (StopReason.TRIALS, 4)
    ]


def test_no_more_trials_are_launched_than_a_call_says_at_most(store: Store) -> None:
    """Trials that were invalidated run again, whatever `max_trials` is by then."""
    run(store, fast, spec=spec(gpus=1, search={"max_trials": 3}))
    assert store.invalidate("state = 'measured'")
    seen: list[Snapshot] = []
    run(store, fast, spec=spec(gpus=1, search={"max_trials": 1}), observe=seen.append)
    assert {(one.num_launched, one.at_most) for one in seen} == {(3, 3)}
