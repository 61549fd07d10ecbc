"""A tracker gets each trial once, however often it fails between."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from db.store import Store
from orchestrator.report.mirrors.mirroring import Mirroring, read_runs
from orchestrator.report.mirrors.tracker_run import TrackerRun
from tests.db.builders import Bench


@dataclass
class Tracker:
    """A tracker that refuses what it is told to."""

    name: str = "fake"
    refuses: set[int] = field(default_factory=set)
    is_down: bool = False
    runs: dict[str, TrackerRun] = field(default_factory=dict)
    writes: list[int] = field(default_factory=list)

    def known(self) -> dict[str, str]:
        if self.is_down:
            raise ConnectionError("http://me:verysecret@there does not answer")
        return {key: run.version for key, run in self.runs.items()}

    def write(self, run: TrackerRun) -> None:
        if self.is_down or run.trial_id in self.refuses:
            raise ConnectionError("http://me:verysecret@there does not answer")
        self.writes.append(run.trial_id)
        self.runs[run.key] = run

    def close(self) -> None:
        pass


@pytest.fixture
def bench(sqlite_store: Store) -> Bench:
    return Bench.on(sqlite_store)


def runs(bench: Bench) -> list[TrackerRun]:
    return read_runs(bench.store, bench.store.sweep_named("tiny"))


def mirroring(tracker: Tracker) -> Mirroring:
    return Mirroring("fake", lambda: tracker, lambda text: text.replace("verysecret", "***"))


def test_each_pass_writes_what_is_new_or_has_changed(bench: Bench) -> None:
    tracker = Tracker()
    mirror = mirroring(tracker)
    first, second = bench.measure(1), bench.measure(2)
    assert mirror.catch_up(runs(bench)).num_written == 2
    assert mirror.catch_up(runs(bench)).num_written == 0
    # Another process begins anew, and finds what is there.
    assert mirroring(tracker).catch_up(runs(bench)).num_written == 0
    bench.store.release(bench.sweep_id, bench.epoch)
    bench.store.invalidate(f"trial_id = {first}", sweep="tiny")
    again = Bench(
        bench.store, bench.sweep_id, bench.cell_id,
        bench.store.acquire(bench.sweep_id, host="here", pid=1),
    )  # fmt: skip
    assert again.measure(1, 2000.0) == first
    assert mirror.catch_up(runs(bench)).num_written == 1
    assert tracker.writes == [first, second, first] and len(tracker.runs) == 2
    assert tracker.runs[runs(bench)[0].key].metrics["tokens_per_second_per_gpu"] == 2000.0


def test_a_refusal_is_told_without_secrets_and_the_next_pass_goes_on(bench: Bench) -> None:
    ids = [bench.measure(size) for size in (1, 2, 4)]
    tracker = Tracker(refuses={ids[1]})
    mirror = mirroring(tracker)
    done = mirror.catch_up(runs(bench))
    assert (done.num_written, done.num_left) == (1, 2)
    assert done.why == "ConnectionError: http://me:***@there does not answer"
    tracker.is_down = True
    assert mirror.catch_up(runs(bench)).num_left == 3  # nothing is known of it
    tracker.is_down, tracker.refuses = False, set()
    done = mirror.catch_up(runs(bench))
    assert (done.num_written, done.num_left, done.why) == (2, 0, None)
    assert tracker.writes == ids


def test_a_tracker_that_cannot_be_opened_is_opened_again(bench: Bench) -> None:
    bench.measure(1)
    tries = iter([False, True])
    tracker = Tracker()

    def opened() -> Tracker:
        if not next(tries):
            raise OSError("no route")
        return tracker

    mirror = Mirroring("fake", opened, str)
    assert mirror.catch_up(runs(bench)).why == "OSError: no route"
    assert mirror.catch_up(runs(bench)).num_written == 1


def test_a_late_pass_says_what_it_left(bench: Bench) -> None:
    for size in (1, 2, 4):
        bench.measure(size)
    late = iter([False, True])
    done = mirroring(Tracker()).catch_up(runs(bench), lambda: next(late))
    assert (done.num_written, done.num_left, done.why) == (1, 2, "no time was left")
