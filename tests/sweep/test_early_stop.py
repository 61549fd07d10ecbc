"""A trial that cannot win is ended early: its numbers are bounds, which never win."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from db.store import Store
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from orchestrator.core.trial.protocol import Device, RankResult, TrialRequest
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.stopping import advance_timing, begin
from orchestrator.sweep.confirmation import Confirmation
from tests.sweep.fake_scheduler import FakeScheduler
from tests.sweep.test_loop import run, spec


class Timer:
    """Times layouts as ranks do, and remembers what each was to beat."""

    def __init__(self) -> None:
        self.to_beat: list[tuple[int, float | None]] = []

    def __call__(self, request: TrialRequest) -> RankResult:
        self.to_beat.append((request.attempt, request.measurement.beat_seconds))
        # The larger the micro-batch, the faster: from 2.5 s to 1 s.
        seconds = 1.0 + 1.5 / request.layout.micro_batch_size
        samples, timing = list[float](), begin(request.measurement)
        while not timing.is_enough:
            samples.append(seconds)
            timing = advance_timing(timing, samples, request.measurement)
        return RankResult(
            warmup_seconds=samples[: timing.num_warmup],
            step_seconds=samples[timing.num_warmup :],
            step_seconds_bound=timing.bound,
            stack=Stack(torch="2.13.0"),
        )


def asked(early_stop: bool | str = True, *, repeats: int = 1) -> SweepSpec:
    return spec(
        gpus=1, repeats=repeats, search={"early_stop": early_stop, "confirm": {"repeats": repeats}}
    )


def test_what_cannot_win_is_ended_early_stored_as_a_bound_and_never_ranked(store: Store) -> None:
    timer, words = Timer(), list[str]()
    result, _ = run(
        store, timer, spec=asked(), observe=lambda s: words.extend(one.text for one in s.ended)
    )
    trials = store.trials(result.sweep_id)
    assert {trial.state for trial in trials} == {TrialState.MEASURED}
    ended = [trial for trial in trials if trial.step_seconds_bound is not None]
    assert ended
    assert timer.to_beat[0] == (1, None), "there is nothing to beat yet"
    best = min(
        trial.step_seconds_median for trial in trials if trial.step_seconds_median is not None
    )
    for trial in ended:
        assert trial.step_seconds_bound is not None
        assert trial.step_seconds_bound > 1.25 * best
        assert trial.num_steps == 2
        assert trial.confident is False
        assert trial.num_measurements == 1, "it is not measured again"
    (ranked,) = store.best(result.sweep_id, 100).values()
    assert not {trial.id for trial in ended} & {trial.id for trial in ranked}
    assert ranked[0].step_seconds_median == best
    assert any("ended early: a step takes" in text for text in words)


def test_a_repeat_is_timed_to_its_end_and_so_is_everything_if_the_file_says_so(
    store: Store,
) -> None:
    timer = Timer()
    result, _ = run(store, timer, spec=asked(repeats=2))
    attempts = [
        attempt
        for trial in store.trials(result.sweep_id)
        for attempt in store.trial(trial.id).attempts
    ]
    assert any(attempt.purpose is Purpose.CONFIRMATION for attempt in attempts)
    assert all(beat is None for number, beat in timer.to_beat if number > 1)
    told = Timer()
    run(store, told, spec=asked(early_stop=False).model_copy(update={"name": "all"}))
    assert {beat for _, beat in told.to_beat} == {None}


def test_a_call_that_continues_launches_nothing_again_that_was_ended_early(store: Store) -> None:
    first, _ = run(store, Timer(), spec=asked())
    timer = Timer()
    again, _ = run(store, timer, spec=asked())
    assert again.sweep_id == first.sweep_id
    assert timer.to_beat == []
    assert {trial.state for trial in store.trials(first.sweep_id)} == {TrialState.MEASURED}


@pytest.mark.parametrize(("device", "is_raced"), [(Device.CPU, False), (Device.CUDA, True)])
def test_on_gpus_trials_race_unless_the_file_says_otherwise(
    store: Store, device: Device, is_raced: bool
) -> None:
    timer = Timer()
    run(store, timer, spec=asked("auto"), scheduler=FakeScheduler(timer, device=device))
    assert any(beat is not None for _, beat in timer.to_beat) is is_raced


class Killed(BaseException):
    """The end of an orchestrator in the middle of its work."""


class Doubting:
    """Holds that the first trial that was ended early could be the fastest.

    `test_winner.py` tests which ones could.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trial_id: int | None = None
        monkeypatch.setattr(
            Confirmation, "ended_early_that_could_win", lambda confirmation: self(confirmation)
        )

    def __call__(self, confirmation: Confirmation) -> dict[int, frozenset[str]]:
        found = confirmation._ended_early
        if not found or self.trial_id is not None:
            return {}
        self.trial_id = min(found)
        return {self.trial_id: frozenset(found[self.trial_id].nodes)}


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_could_be_the_fastest_runs_again_elsewhere_to_its_end(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """If the orchestrator is killed before that, the next call does it."""
    doubting, timer = Doubting(monkeypatch), Timer()
    where: dict[tuple[int, int], tuple[str, ...]] = {}

    def script(request: TrialRequest) -> RankResult:
        where[request.trial_id, request.attempt] = tuple(scheduler.nodes_of[request.trial_id])
        return timer(request)

    def nodes() -> FakeScheduler:
        return FakeScheduler(script, nodes={"a": 1, "b": 1}, device=Device.CUDA)

    scheduler = nodes()
    if is_killed:
        requeue = Store.requeue_ended_early

        def die(*arguments: Any, **known: Any) -> int:
            requeue(*arguments, **known)
            raise Killed

        with monkeypatch.context() as dying:
            dying.setattr(Store, "requeue_ended_early", die)
            with pytest.raises(Killed):
                run(store, script, spec=asked(), scheduler=scheduler)
        assert doubting.trial_id is not None
        assert (doubting.trial_id, 2) not in where
        assert store.trial(doubting.trial_id).trial.state is TrialState.QUEUED
        scheduler = nodes()
    result, _ = run(store, script, spec=asked(), scheduler=scheduler)
    assert result.finished
    trial_id = doubting.trial_id
    assert trial_id is not None
    trial = store.trial(trial_id)
    first, then = trial.attempts
    assert first.measurement is not None and then.measurement is not None
    assert first.measurement.step_seconds_bound is not None
    assert then.measurement.step_seconds_bound is None
    assert then.measurement.step_time.num_steps == 8
    assert (2, None) in timer.to_beat
    assert set(where[trial_id, 1]).isdisjoint(where[trial_id, 2])
    assert trial_id in {one.id for one in store.best(result.sweep_id, 100)[trial.trial.cell_id]}
    [why] = [event.detail for event in trial.events if event.event == TrialEvent.INVALIDATED]
    assert "the machine may have been slow then" in str(why)
    assert result.counts[TrialState.MEASURED] == 6 and not result.counts[TrialState.QUEUED]


def test_a_budget_that_is_spent_leaves_what_was_ended_early_as_it_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubting, timer = Doubting(monkeypatch), Timer()
    # Each attempt holds a GPU for a second.
    budget = asked().model_dump()
    budget["search"]["max_gpu_hours"] = 8.5 / 3600
    result, scheduler = run(
        store,
        timer,
        spec=SweepSpec.model_validate(budget),
        scheduler=FakeScheduler(timer, device=Device.CUDA),
    )
    assert doubting.trial_id is not None, "one could have been the fastest"
    assert len(scheduler.started) == 8, "six layouts, an anchor and a repeat of the best"
    assert result.counts[TrialState.MEASURED] == 6 and not result.counts[TrialState.QUEUED]
    assert store.trial(doubting.trial_id).trial.step_seconds_bound is not None


def test_a_layout_that_the_file_no_longer_names_stays_ended_early(store: Store) -> None:
    first, _ = run(store, Timer(), spec=asked())
    ended = {
        t.id: t.layout.micro_batch_size
        for t in store.trials(first.sweep_id)
        if t.step_seconds_bound is not None
    }
    assert set(ended.values()) == {1, 2}
    narrowed = asked().model_dump()
    narrowed["axes"]["micro_batch_size"] = [2, 4]
    known: list[set[int]] = []

    def note(confirmation: Confirmation) -> dict[int, frozenset[str]]:
        known.append(set(confirmation._ended_early))
        return {}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Confirmation, "ended_early_that_could_win", note)
        scheduler = FakeScheduler(Timer(), device=Device.CUDA)
        # Its conditions are the same, so it goes on; what is ended early is asked for at its end.
        spec = SweepSpec.model_validate(narrowed | {"name": asked().name})
        run(store, Timer(), spec=spec, scheduler=scheduler)
    assert known == [{i for i, size in ended.items() if size == 2}]


def test_a_layout_that_somebody_asked_for_is_ended_early_like_any_other(store: Store) -> None:
    few = asked().model_dump()
    few["search"]["max_trials"] = 1
    few["axes"]["recompute"] = ["none"]
    spec = SweepSpec.model_validate(few)
    first, _ = run(store, Timer(), spec=spec)
    (tried,) = store.trials(first.sweep_id)
    assert tried.layout.micro_batch_size == 4
    slow = replace(tried.layout, micro_batch_size=1, grad_accum_steps=8)
    trial_id, _, _ = store.enqueue(tried.cell_id, slow)
    timer = Timer()
    run(store, timer, spec=spec)
    assert timer.to_beat == [(1, tried.step_seconds_median)]
    assert store.trial(trial_id).trial.step_seconds_bound is not None
