"""The best layouts of live pages are those of the ranking."""

from __future__ import annotations

import pytest

from db.store import Store
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report import ranked_cells
from orchestrator.report.live_bests import RESTS_PER_RANKING
from orchestrator.report.live_sweep import LiveSweep
from orchestrator.report.ranking import rank_cell
from orchestrator.report.top_screen import TableName, table
from tests.db.builders import SLOW_END, Bench, fingerprint, measure_runs, measurement, start_repeat
from tests.db.builders import record_measurement as record

CPU_SECONDS = 0.3  # of each ranking here


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """CPU time that only rankings use, and the cells that were ranked so far after it."""
    used = [0.0]

    def ranked(*arguments: object) -> object:
        used[0] += CPU_SECONDS
        used.append(0.0)
        return rank_cell(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ranked_cells, "rank_cell", ranked)
    return used


def num_ranked(clock: list[float]) -> int:
    return len(clock) - 1


def test_the_live_page_shows_the_best_of_the_ranking(store: Store) -> None:
    trials = measure_runs(store, SLOW_END)
    sweep_id = store.sweeps()[0].id
    (cell_id, (raw,)), *_ = store.best(sweep_id).items()
    best = rank_cell(store, sweep_id, cell_id, store.best(sweep_id, 16)[cell_id]).leading[0]
    assert (raw.id, best.id) == (trials[2], trials[4])
    rows = LiveSweep(store, "tiny").read(0.0)
    assert [cell.best for cell in rows.status.cells] == [best]
    assert rows.status.row.name == "tiny"
    now = rows.trials[best.id].updated_at
    (line,) = table(TableName.CELLS, rows, now=now, progress={}).lines
    assert line.trial_id == best.id


def test_a_best_of_the_ranking_that_counts_no_more_is_not_shown(store: Store) -> None:
    trials = measure_runs(store, SLOW_END)
    live = LiveSweep(store, "tiny")
    (cell,) = live.read(0.0).status.cells
    assert cell.best is not None and cell.best.id == trials[4]
    row = store.sweeps()[0]
    store.retry(row.id, [trials[4]], epoch=row.owner_epoch)
    (cell,) = live.read(1.0).status.cells
    assert cell.best is not None and cell.best.state is TrialState.MEASURED
    assert cell.best.id != trials[4]


def test_a_cell_is_ranked_again_when_it_changed_but_seldom(
    store: Store, clock: list[float]
) -> None:
    trials = measure_runs(store, SLOW_END)
    epoch = store.sweeps()[0].owner_epoch
    live = LiveSweep(store, "tiny", cpu_clock=lambda: clock[0])
    live.read(0.0)
    live.read(1.0)
    assert num_ranked(clock) == 1

    def repeat() -> None:
        attempt = start_repeat(store, trials[1], epoch, ["node-a", "node-b"])
        record(
            store,
            trials[1],
            attempt,
            epoch=epoch,
            measurement=measurement(),
            fingerprint=fingerprint(),
        )

    repeat()
    live.read(2.0)  # the first ranking delays none
    assert num_ranked(clock) == 2
    repeat()
    live.read(3.0)
    rest = RESTS_PER_RANKING * CPU_SECONDS
    live.read(1.9 + rest)
    assert num_ranked(clock) == 2
    live.read(2.1 + rest)
    live.read(9.0 + 2 * rest)
    assert num_ranked(clock) == 3


def test_only_cells_with_a_repeat_are_ranked(store: Store, clock: list[float]) -> None:
    Bench.on(store).measure(1)
    live = LiveSweep(store, "tiny", cpu_clock=lambda: clock[0])
    (cell,) = live.read(0.0).status.cells
    assert cell.best is not None and not num_ranked(clock)
    assert store.repeated_cells() == {}
