"""Trials that are launched again after they were measured: how often, and next to which others.

What a call knows of them is known to the next one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from db.store import Store
from orchestrator.cluster.contract import Finished, SchedulerEvent, Slots
from orchestrator.core.machines.packing import Shape
from orchestrator.core.problem.layout import Layout, Precision
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint, Stack
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.machine_load import MachineLoad
from orchestrator.core.trial.protocol import Device, Phase, RankResult, TrialRequest
from orchestrator.core.trial.purpose import Purpose
from orchestrator.report.comparison import of_fingerprints
from orchestrator.report.sweep_rows import read_rows
from orchestrator.search.proposal import Proposal
from orchestrator.search.row_searcher import RowSearcher, RowStatus
from orchestrator.search.searcher import Searcher
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.confirmation import Repeat
from orchestrator.sweep.finished import finished_before
from orchestrator.sweep.progress import Stop, StopReason
from orchestrator.sweep.run import run_sweep
from tests.db.builders import begin_trial
from tests.sweep.fake_scheduler import FakeScheduler, Script
from tests.sweep.test_loop import (
    CODE,
    Noisy,
    after,
    fast,
    out_of_memory_above,
    run,
    shorts,
    spec,
    states,
    store,
)

__all__ = ["store"]  # the fixture


def names(store: Store) -> list[str]:
    return [
        layout.short for layout, _ in run(store, fast, spec=spec(gpus=1, name="names"))[1].started
    ]


def attempts(store: Store, short: str) -> int:
    return next(
        t.num_attempts for t in store.trials(store.sweep_named("t").id) if t.layout.short == short
    )


def test_wall_time_that_ends_a_confirmation_leaves_it_to_the_next_call(store: Store) -> None:
    now = [0.0]

    def slow(request: TrialRequest) -> float:
        now[0] += 10.0
        return fast(request)

    limited = spec(
        gpus=1,
        device="cpu",
        gpus_per_node=2,
        search={"max_wall_time": 65, "confirm": {"repeats": 2}},
    )
    result, scheduler = run(store, slow, spec=limited, clock=lambda: now[0])
    assert len(scheduler.started) == 7  # six layouts, one repeat
    assert set(result.stopped.values()) == {StopReason.WALL_TIME}
    assert (
        finished_before(limited, store, code=lambda: CODE, program_version="test", this_host="here")
        is None
    )
    result, scheduler = run(store, slow, spec=limited, clock=lambda: now[0])
    assert scheduler.started
    assert result.finished
    assert (
        finished_before(limited, store, code=lambda: CODE, program_version="test", this_host="here")
        is not None
    )


def test_a_repeat_that_ran_out_of_memory_is_not_tried_again_by_the_next_call(store: Store) -> None:
    best = names(store)[0]
    noisy = Noisy({best: [1.00, *[FailureKind.OOM_GPU] * 9]})
    for _ in range(3):
        run(store, noisy, spec=spec(gpus=1, repeats=2))
    assert noisy.taken[best] == 2


def test_a_repeat_that_takes_the_orchestrator_down_is_given_up_as_a_first_attempt_would_be(
    store: Store,
) -> None:
    class Dies(FakeScheduler):
        def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
            # As kill -9 does: nothing is recorded.
            raise KeyboardInterrupt

    run(store, fast, spec=spec(gpus=1))
    started = []
    for _ in range(12):
        dying = Dies(fast)
        try:
            confirmed = {"confirm": {"contenders": 1, "repeats": 1}, "anchor_every": 0}
            run(store, fast, spec=spec(gpus=1, repeats=1, search=confirmed), scheduler=dying)
        except KeyboardInterrupt:
            pass
        started.append(len(dying.started))
    assert started == [1] * 6 + [0] * 6
    assert states(store) == {TrialState.MEASURED: 6}


def test_an_anchor_that_runs_first_with_a_changed_program_is_compared_with_what_follows(
    store: Store,
) -> None:
    software = ["2.13.0"]

    def changed_before_the_first_anchor(request: TrialRequest) -> RankResult:
        if request.attempt > 1:
            software[:] = ["9.9"]
        seconds = fast(request)
        return RankResult(
            step_seconds=[seconds] * 6,
            phase_seconds={Phase.START: 0.1, Phase.STEADY: 6 * seconds},
            peak_memory_allocated_bytes=1000,
            stack=Stack(torch=software[0]),
        )

    result, scheduler = run(
        store,
        changed_before_the_first_anchor,
        spec=spec(gpus=1, repeats=2, search={"anchor_every": 2}),
    )
    place, anchor = next(
        (place, layout) for place, (layout, attempt) in enumerate(scheduler.started) if attempt == 2
    )
    later = [layout for layout, attempt in scheduler.started[place:] if attempt == 1]
    assert later
    rows = store.trials(result.sweep_id)
    assert {t.layout for t in rows if t.is_current_fingerprint} == {anchor, *later}
    compared = of_fingerprints(read_rows(store, store.sweep_named("t")))
    assert compared is not None
    assert [one.layout for one in compared.layouts] == [anchor.key]


def test_what_its_neighbours_contradict_is_measured_once_more_over_all_calls(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stays_doubtful(rows: RowSearcher, *, but: Collection[int] = ()) -> tuple[int, float] | None:
        measured = [
            row for row, told in rows.told.items() if told.score is not None and row not in but
        ]
        return (min(measured), 0.0) if len(measured) >= 3 else None

    monkeypatch.setattr(RowSearcher, "doubtful", stays_doubtful)
    for most in range(4, 7):
        run(store, fast, spec=spec(gpus=1, search={"max_trials": most, "strategy": "random"}))
    assert max(t.num_attempts for t in store.trials(store.sweep_named("t").id)) == 2


def test_what_a_trial_met_before_it_was_measured_is_not_charged_to_its_repeat(store: Store) -> None:
    taken: Counter[int] = Counter()

    def script(request: TrialRequest) -> float | FailureKind:
        taken[request.trial_id] += 1
        if request.trial_id == 1 and taken[1] in (1, 3):
            return FailureKind.NODE_LOST
        return 0.01 if request.trial_id == 1 else fast(request)

    run(store, script, spec=spec(gpus=1, repeats=1))
    assert store.trial(1).trial.num_measurements == 2


def test_other_code_repeats_nothing_that_cannot_count_more_than_once(store: Store) -> None:
    run(store, fast, spec=spec(gpus=1))
    started = []
    for _ in range(3):
        scheduler = FakeScheduler(fast)
        newer = Fingerprint(orchestrator_version="newer")
        run_sweep(
            spec(gpus=1, repeats=2),
            store=store,
            open_scheduler=lambda scheduler=scheduler: scheduler,
            code=newer,
            hardware=lambda _: None,
            clock=time.monotonic,
        )
        started.append(len(scheduler.started))
    assert started == [1, 0, 0]


class Mixed(FakeScheduler):
    """Each attempt reports the torch that it was given.

    The repeat of trial 1 ends after the attempts that run at the same time.
    """

    def __init__(
        self, script: Script, torch_of: Callable[[TrialRequest], str], **kwargs: Any
    ) -> None:
        super().__init__(script, **kwargs)
        self._torch_of = torch_of

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        held = None
        if 1 in self._running and self._running[1][0].attempt == 2 and len(self._running) > 1:
            held = self._running.pop(1)
        request = next(iter(self._running.values()))[0]
        events = [
            self._with_torch(event, self._torch_of(request))
            for event in super().poll(timeout_seconds)
        ]
        if held is not None:
            self._running[1] = held
        return events

    @staticmethod
    def _with_torch(event: SchedulerEvent, torch: str) -> SchedulerEvent:
        if not isinstance(event, Finished) or event.failure is not None:
            return event
        report = event.reports[0]
        ranks = [
            replace(rank, result=_with_torch(rank.result, torch))
            for rank in report.ranks
            if rank.result is not None
        ]
        return replace(event, reports=[replace(report, ranks=ranks)])


def _with_torch(result: RankResult, torch: str) -> RankResult:
    return result.model_copy(update={"stack": result.stack.model_copy(update={"torch": torch})})


def test_a_repeat_of_older_software_does_not_make_it_the_current_one_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def doubted(run_of_cell: CellSearch) -> Repeat | None:
        layout = next(
            (t.layout for t in store.trials(1) if t.id == 1 and t.state is TrialState.MEASURED),
            None,
        )
        if layout is None or asked:
            return None
        asked.append(1)
        return Repeat(trial_id=1, layout=layout, purpose=Purpose.DOUBT, why="doubt")

    monkeypatch.setattr(CellSearch, "_next_doubt", doubted)
    scheduler = Mixed(
        lambda request: 0.1 if request.trial_id == 1 else 1.0,
        lambda request: "old" if request.trial_id == 1 else "new",
        slots=2,
        device=Device.CUDA,
    )
    result, _ = run(
        store, fast, spec=spec(gpus=1, search={"strategy": "random"}), scheduler=scheduler
    )
    assert asked
    assert [t.id for t in store.trials(result.sweep_id) if t.is_current_fingerprint] == [
        2,
        3,
        4,
        5,
        6,
    ]
    first = store.trial(1)
    assert first.trial.layout not in {layout for tied in result.tied.values() for layout in tied}


def test_a_trial_that_waits_again_when_the_last_was_launched_is_not_left_behind(
    store: Store,
) -> None:
    taken: Counter[int] = Counter()

    def script(request: TrialRequest) -> float | FailureKind:
        taken[request.trial_id] += 1
        return FailureKind.NODE_LOST if request.trial_id == 1 and taken[1] == 1 else fast(request)

    four = FakeScheduler(script, slots=4, device=Device.CUDA)
    result, _ = run(
        store,
        script,
        spec=spec(gpus=1, search={"max_trials": 3, "strategy": "random"}),
        scheduler=four,
    )
    assert states(store) == {TrialState.MEASURED: 3}
    assert result.finished


def test_counts_are_those_of_the_store_when_what_waited_is_pruned_again(store: Store) -> None:
    search = {"strategy": "random", "seed": 5}
    run(store, out_of_memory_above(1), spec=spec(gpus=1, search=search))
    store.invalidate("state = 'pruned'")
    result, _ = run(store, out_of_memory_above(1), spec=spec(gpus=1, search=search))
    assert {state: count for state, count in result.counts.items() if count} == dict(states(store))


def test_what_a_dead_orchestrator_reserved_counts_against_the_budget_at_once(store: Store) -> None:
    limited = spec(gpus=1, search={"max_gpu_hours": 0.2 / 3600})
    sweep_id = store.ensure_sweep("t", limited.model_dump_json(), limited.conditions())
    epoch = store.acquire(sweep_id, host="elsewhere", pid=1)
    cell_id = store.ensure_cell(sweep_id, limited.cells()[0], epoch)
    layout = Layout(
        data_parallel_size=1, micro_batch_size=8, grad_accum_steps=1, precision=Precision.FP32
    )
    begin_trial(store, cell_id, layout, epoch=epoch, nodes=["there"])
    time.sleep(0.5)
    result, scheduler = run(store, fast, spec=limited, takeover=True)
    assert scheduler.started == []
    assert set(result.stopped.values()) == {StopReason.GPU_HOURS}


def test_what_ran_the_node_out_of_memory_is_repeated_alone_too(store: Store) -> None:
    beside: list[tuple[int, int]] = []
    taken: Counter[int] = Counter()

    class Watching(FakeScheduler):
        def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
            super().start(request, shape, nodes)
            if request.trial_id == 1:
                beside.append((request.attempt, self.num_running))

    def script(request: TrialRequest) -> float | FailureKind:
        taken[request.trial_id] += 1
        if request.trial_id == 1:
            return FailureKind.OOM_HOST if taken[1] == 1 else 1.005
        return {2: 1.0, 3: 1.001}.get(request.trial_id, 9.0)

    watching = Watching(script, slots=4, device=Device.CUDA)
    run(
        store,
        script,
        spec=spec(gpus=1, repeats=2, search={"strategy": "random", "confirm": {"repeats": 2}}),
        scheduler=watching,
    )
    assert len(beside) > 2
    assert {running for attempt, running in beside if attempt > 1} == {1}


def test_a_layout_asked_for_ahead_is_one_of_those_that_the_bound_looks_at(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = Searcher.ask

    def noting(searcher: Searcher) -> Proposal | None:
        proposal = ask(searcher)
        if proposal is not None:
            asked.append(proposal.layout.short)
        return proposal

    def gain(searcher: Searcher) -> float:
        """All there is to gain is in the layout that was asked for fourth, ahead of its time."""
        if len(asked) < 4:
            return 0.5
        layouts = searcher._candidates.table.layouts()
        row = next(row for row, layout in enumerate(layouts) if layout.short == asked[3])
        return 0.5 if searcher._rows.status(row) is RowStatus.UNTRIED else 0.0

    monkeypatch.setattr(Searcher, "ask", noting)
    monkeypatch.setattr(CellSearch, "should_ask_ahead", property(lambda cell: cell.ahead is None))
    monkeypatch.setattr(Searcher, "expected_gain", gain)
    _, scheduler = run(store, fast, spec=spec(gpus=1, search={"bound": 0.02}))
    assert asked[3] in [layout.short for layout, _ in scheduler.started]
    assert len(scheduler.started) < 6


def test_a_finished_sweep_is_answered_for_the_cells_that_the_file_names_now(store: Store) -> None:
    def two_fail(request: TrialRequest) -> float | FailureKind:
        return FailureKind.OOM_GPU if request.layout.world_size == 2 else fast(request)

    run(store, two_fail, spec=spec(device="cpu", gpus_per_node=2))
    narrow = spec(gpus=[1], device="cpu", gpus_per_node=2)
    told, _ = run(store, two_fail, spec=narrow)
    before = finished_before(
        narrow, store, code=lambda: CODE, program_version="test", this_host="here"
    )
    assert before is not None
    assert (list(before.nothing_feasible), set(before.stopped)) == (
        list(told.nothing_feasible),
        set(told.stopped),
    )
    assert {s: n for s, n in before.counts.items() if n} == {
        s: n for s, n in told.counts.items() if n
    }
    assert not before.code_has_changed
    newer = Fingerprint(orchestrator_version="test", git_sha="other")
    changed = finished_before(
        narrow, store, code=lambda: newer, program_version="test", this_host="here"
    )
    assert changed is not None
    assert changed.code_has_changed


def test_repeats_stopped_midway_come_to_what_an_undisturbed_sweep_has(store: Store) -> None:
    run(store, fast, spec=spec(gpus=1, repeats=2), stop=after(8, Stop.CANCEL))
    run(store, fast, spec=spec(gpus=1, repeats=2))
    whole, _ = run(store, fast, spec=spec(gpus=1, repeats=2, name="whole"))
    undisturbed = sorted(t.num_measurements for t in store.trials(whole.sweep_id))
    assert undisturbed[-1] > 1
    assert sorted(count for _, count in shorts(store).values()) == undisturbed


def test_what_was_measured_on_a_busy_machine_is_measured_again_rather_than_believed(
    store: Store,
) -> None:
    busy = MachineLoad(cpu_cores=2.0, own_cpu_cores=0.5, sweep_cpu_cores=0.0, others_cpu_cores=1.5)
    best, second, *_ = names(store)

    class Busy(FakeScheduler):
        """Others use the machine while each layout is launched for the first time, and the best
        suffers most.
        """

        def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
            events = super().poll(timeout_seconds)
            attempt = self.started[len(self.started) - 1][1]
            return [
                replace(e, reports=[replace(report, load=busy) for report in e.reports])
                if isinstance(e, Finished) and attempt == 1
                else e
                for e in events
            ]

    noisy = Noisy({best: [1.30, 1.00, 1.00, 1.00], second: [1.10, 1.10, 1.10, 1.10]})
    wanted = spec(
        gpus=1,
        repeats=3,
        search={"max_parallel_trials": 1, "confirm": {"contenders": 2, "repeats": 3}},
    )
    told: list[str] = []
    result, _ = run(
        store,
        noisy,
        spec=wanted,
        scheduler=Busy(noisy),
        observe=lambda snapshot: told.extend(one.text for one in snapshot.ended),
    )
    assert told[0].endswith("; the machine was busy: 1.5 of 2 cores were somebody else's") and told[
        1
    ].endswith("tokens/s/GPU (disturbed)")
    assert any(
        "again (to confirm the winner), 1 GPU, " in line and line.endswith("tokens/s/GPU")
        for line in told
    )
    found = next(trial for trial in store.trials(result.sweep_id) if trial.layout.short == best)
    assert found.num_measurements > 1, (
        "18 % slower in its first run, it would not have been looked at again"
    )
    runs = store.repeats(found.cell_id)[found.id].runs
    assert [bool(one.load_sd) for one in runs] == [True, *[False] * (len(runs) - 1)], (
        "as the store has it for the next call"
    )
    assert [attempt.load == busy for attempt in store.trial(found.id).attempts] == [
        True,
        *[False] * (len(runs) - 1),
    ]
    (tied,) = result.tied.values()
    assert tied[0].short == best


def purposes(store: Store) -> list[Purpose | None]:
    """Why each attempt was made, in the order of the measurements."""
    attempts = [
        attempt
        for trial in store.trials(store.sweep_named("t").id)
        for attempt in store.trial(trial.id).attempts
    ]
    return [attempt.purpose for attempt in sorted(attempts, key=lambda attempt: attempt.started_at)]


def test_a_call_that_goes_on_looks_at_the_machine_before_anything_new(store: Store) -> None:
    cells = {"gpus": 1, "search": {"confirm": {"repeats": 2}}}
    run(store, fast, spec=spec(**cells), stop=after(3, Stop.DRAIN))
    before = len(purposes(store))
    assert 2 <= before < 6
    run(store, fast, spec=spec(**cells))
    found = purposes(store)
    assert found[:before] == [Purpose.NEW] * before
    assert found[before] is Purpose.ANCHOR
    assert Purpose.NEW in found[before:]


def test_a_finished_sweep_is_not_looked_at_again(store: Store) -> None:
    for _ in range(2):
        _, scheduler = run(store, fast, spec=spec(gpus=1, repeats=2))
    assert scheduler.started == []


def test_an_orchestrator_that_stood_still_looks_at_the_machine(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGSTOP, or the sleep of a laptop: the loop's own clock may not have gone on, the
    time of day has.
    """
    now, polls = [time.time()], [0]

    class Stopped(FakeScheduler):
        def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
            polls[0] += 1
            now[0] += 3600.0 if polls[0] == 3 else 0.1
            return super().poll(timeout_seconds)

    monkeypatch.setattr("orchestrator.sweep.loop.time.time", lambda: now[0])
    run(store, fast, spec=spec(gpus=1, repeats=2), scheduler=Stopped(fast))
    assert purposes(store)[3] is Purpose.ANCHOR


class Leaving(FakeScheduler):
    """On its clock each attempt takes `seconds`. Its node goes after some, and comes back later."""

    def __init__(self, *, seconds: float, after: int, away_seconds: float) -> None:
        super().__init__(fast, slots=1)
        self.now, self._trial_seconds = 0.0, seconds
        self._after, self._away_seconds = after, away_seconds

    @property
    def slots(self) -> Slots:
        is_away = len(self.started) == self._after and not self.num_running and self._away_seconds
        return replace(super().slots, nodes={}) if is_away else super().slots

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        if self.num_running:
            self.now += self._trial_seconds
        elif not self.slots.nodes:
            self.now, self._away_seconds = self.now + self._away_seconds, 0.0
        return super().poll(timeout_seconds)


@pytest.mark.parametrize(
    ("seconds", "away_seconds", "is_another"),
    [(1.0, 590.0, False), (1.0, 610.0, True), (200.0, 790.0, False), (200.0, 810.0, True)],
)
# The search, which makes 6 attempts; then an anchor and the confirmation.
@pytest.mark.parametrize("after", [3, 8])
def test_nodes_that_were_away_for_ten_minutes_and_four_trials_may_be_others(
    store: Store, seconds: float, away_seconds: float, is_another: bool, after: int
) -> None:
    scheduler = Leaving(seconds=seconds, after=after, away_seconds=away_seconds)
    run(
        store,
        fast,
        spec=spec(gpus=1, repeats=2, measurement={"wait_for_nodes": "1h"}),
        scheduler=scheduler,
        clock=lambda: scheduler.now,
    )
    found = purposes(store)
    assert found.count(Purpose.ANCHOR) == 1 + is_another
    assert (found[after] is Purpose.ANCHOR) is is_another


@pytest.mark.parametrize(("seconds", "is_another"), [(590.0, False), (610.0, True)])
def test_a_machine_may_be_another_after_a_long_trial_of_another_cell(
    store: Store, seconds: float, is_another: bool
) -> None:
    """Cells take turns. The trials of one take long; of the other nothing runs meanwhile."""
    now = [0.0]

    def takes(request: TrialRequest) -> float:
        now[0] += seconds if request.sequence_length == 128 else 1.0
        return 1.0

    taking_turns = spec(
        gpus=1, sequence_length=[64, 128], repeats=1, search={"max_gpu_hours": 1, "max_trials": 2}
    )
    scheduler = FakeScheduler(fast, seconds=takes)
    run(store, fast, spec=taking_turns, scheduler=scheduler, clock=lambda: now[0])
    third = Purpose.ANCHOR if is_another else Purpose.NEW
    assert purposes(store)[:3] == [Purpose.NEW, Purpose.NEW, third]


def test_anchors_count_against_no_number_of_trials(store: Store) -> None:
    wanted = spec(
        gpus=1, repeats=1, search={"confirm": {"repeats": 1}, "anchor_every": 2, "max_trials": 4}
    )
    run(store, fast, spec=wanted)
    found = Counter(purposes(store))
    assert found[Purpose.NEW] == 4
    assert found[Purpose.ANCHOR] >= 1


def test_what_is_dated_by_a_simulated_clock_keeps_its_order_over_calls(store: Store) -> None:
    hours = iter(range(10_000))
    for most in (3, 6):
        limited = spec(gpus=1, repeats=1, search={"confirm": {"repeats": 1}, "max_trials": most})
        run(store, fast, spec=limited, clock=lambda: 3600.0 * next(hours))
    attempts = [
        attempt
        for trial in store.trials(store.sweep_named("t").id)
        for attempt in store.trial(trial.id).attempts
    ]
    dates = [
        attempt.measured_at for attempt in sorted(attempts, key=lambda attempt: attempt.started_at)
    ]
    assert dates == sorted(dates)


def test_a_sweep_whose_first_anchor_cannot_be_repeated_is_finished_all_the_same(
    store: Store,
) -> None:
    first: list[Layout] = []

    def fails_when_repeated(request: TrialRequest) -> float | FailureKind:
        first.append(request.layout)
        is_anchor = request.layout == first[0] and request.attempt > 1
        return FailureKind.OOM_GPU if is_anchor else fast(request)

    for _ in range(3):
        _, scheduler = run(store, fails_when_repeated, spec=spec(gpus=1, repeats=2))
    assert Purpose.ANCHOR in purposes(store)
    assert scheduler.started == []
