"""Several cells and one budget: each gets its first trial and a confirmed best before any is
refined, and what got nothing is said.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from db.store import Store
from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.search_section import Confirm
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import TrialRequest
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.run import Run
from orchestrator.sweep.attempt_cost import AttemptCost
from orchestrator.sweep.cell_life import CellLife
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.confirmation import Confirmation
from orchestrator.sweep.finished import finished_before
from orchestrator.sweep.progress import Stop, StopReason
from orchestrator.sweep.sharing import LITTLE, MARGIN, precedence, reserved_from
from tests.sweep.fake_scheduler import FakeScheduler
from tests.sweep.test_loop import CODE, after, fast, run, spec

HOUR = 3600.0
LENGTHS = [16, 32, 64, 128]


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


def four_cells(*, repeats: int = 0, **search: Any) -> SweepSpec:
    """Four cells of equal cost: each trial holds 1 GPU-second."""
    return spec(
        gpus=1,
        sequence_length=LENGTHS,
        repeats=repeats,
        search={"confirm": {"repeats": repeats}, **search},
    )


class Clock:
    """A scheduler on whose clock each attempt takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def seconds(self, _: TrialRequest) -> float:
        self.now += 1.0
        return 1.0


def launched(store: Store) -> dict[int, int]:
    """Attempts by sequence length."""
    sweep_id = store.sweep_named("t").id
    length = {row.id: row.cell.sequence_length for row in store.cells(sweep_id)}
    found = Counter(dict.fromkeys(LENGTHS, 0))
    for trial in store.trials(sweep_id):
        found[length[trial.cell_id]] += trial.num_attempts
    return dict(found)


@pytest.mark.parametrize("strategy", ["auto", "exhaustive", "random"])
@pytest.mark.parametrize("budget", [4, 6, 12])
def test_a_budget_is_shared_in_rounds(store: Store, strategy: str, budget: int) -> None:
    result, _ = run(
        store, fast, spec=four_cells(strategy=strategy, max_gpu_hours=(budget + 0.1) / HOUR)
    )
    counts = launched(store)
    assert sum(counts.values()) == budget
    # Which goes on with what should gain most.
    if strategy != "auto":
        assert max(counts.values()) - min(counts.values()) <= 1
    assert min(counts.values()) >= 1
    assert list(result.nothing_feasible) == []


@pytest.mark.parametrize("seconds", [4.0, 6.0, 12.0])
def test_so_is_the_time_of_a_call(store: Store, seconds: float) -> None:
    clock = Clock()
    scheduler = FakeScheduler(fast, seconds=clock.seconds)
    wanted = four_cells(strategy="exhaustive", max_wall_time=seconds)
    result, _ = run(store, fast, spec=wanted, scheduler=scheduler, clock=clock)
    counts = launched(store)
    assert sum(counts.values()) == seconds
    assert max(counts.values()) - min(counts.values()) <= 1
    assert list(result.nothing_feasible) == []


def test_a_cell_that_the_budget_did_not_reach_has_nothing_and_is_named(store: Store) -> None:
    search = {"confirm": {"repeats": 0}, "max_gpu_hours": 3.1 / HOUR}
    wanted = spec(gpus=1, sequence_length=LENGTHS, device="cpu", gpus_per_node=2, search=search)
    for result in (run(store, fast, spec=wanted)[0], run(store, fast, spec=wanted)[0]):
        (cell,) = result.nothing_feasible
        assert cell.sequence_length == LENGTHS[3]
        assert (result.launched[cell], result.stopped[cell]) == (0, StopReason.GPU_HOURS)
    again = finished_before(
        wanted, store, code=lambda: CODE, program_version="test", this_host=None
    )
    assert again is not None
    assert list(again.nothing_feasible) == [cell]


@pytest.mark.parametrize(("num_running", "num_kept_for"), [(0, 0), (1, 1)])
def test_a_cell_whose_first_trial_runs_leaves_the_budget_to_first_trials_of_others(
    num_running: int, num_kept_for: int
) -> None:
    """Its second would start beside the first where the gangs of the other cells do not fit."""

    def cell(num_new: int) -> Any:
        one = spec(gpus=1).cells()[0]
        return SimpleNamespace(
            cell=one,
            cost=AttemptCost(cell=one, predicted_seconds=10.0),
            life=CellLife(),
            confirmation=Confirmation(),
            searcher=SimpleNamespace(untried=5),
            is_searched=True,
            has_nothing=True,
            num_new=num_new,
            launched=num_new,
        )

    mine, other = cell(num_running), cell(0)
    kept = reserved_from(
        mine, [mine, other], confirm=Confirm(repeats=0), is_repeat=False, slots=2, at_once=2
    )
    expected = MARGIN * num_kept_for * other.cost.guessed_gpu_seconds
    assert kept.gpu_seconds == pytest.approx(expected)


def test_a_cell_without_a_number_goes_before_one_that_refines(store: Store) -> None:
    def script(request: TrialRequest) -> float | FailureKind:
        first_two = request.sequence_length == LENGTHS[2] and request.layout.micro_batch_size > 1
        return FailureKind.USER_ERROR if first_two else fast(request)

    result, scheduler = run(
        store, script, spec=four_cells(strategy="exhaustive", max_gpu_hours=8.1 / HOUR)
    )
    # Two of the third came to nothing.
    assert launched(store) == {16: 2, 32: 2, 64: 3, 128: 1}
    assert list(result.nothing_feasible) == []
    assert len(scheduler.started) == 8


@pytest.mark.parametrize("budget", [12, 16])
@pytest.mark.parametrize("limit", ["max_gpu_hours", "max_wall_time"])
def test_the_best_of_each_cell_is_confirmed_within_the_budget(
    store: Store, limit: str, budget: int
) -> None:
    clock = Clock()
    value = (budget + 0.9) / HOUR if limit == "max_gpu_hours" else budget + 0.9
    wanted = four_cells(repeats=1, strategy="exhaustive", **{limit: value})
    result, scheduler = run(
        store, fast, spec=wanted, scheduler=FakeScheduler(fast, seconds=clock.seconds), clock=clock
    )
    assert list(result.unconfirmed) == []
    repeats = Counter(layout for layout, attempt in scheduler.started if attempt == 2)
    assert repeats.total() >= 4
    assert len(scheduler.started) <= budget + 1
    assert max(launched(store).values()) - min(launched(store).values()) <= 2


def test_a_best_that_the_budget_could_not_confirm_is_named(store: Store) -> None:
    result, _ = run(store, fast, spec=four_cells(repeats=1, max_gpu_hours=5.1 / HOUR))
    assert len(result.unconfirmed) == 3
    assert result.counts[TrialState.MEASURED] == 4


@pytest.mark.parametrize("budget", [9, 12, 16])
def test_what_is_kept_for_the_best_does_not_go_to_an_anchor(store: Store, budget: int) -> None:
    order: dict[tuple[int, str], int] = {}

    def later_is_faster(request: TrialRequest) -> float:
        place = order.setdefault((request.sequence_length, request.layout.key), len(order))
        return 1.0 / (1 + place)

    wanted = four_cells(repeats=1, strategy="exhaustive", max_gpu_hours=(budget + 0.1) / HOUR)
    result, _ = run(store, later_is_faster, spec=wanted)
    several = [cell for cell, count in result.launched.items() if count > 1]
    assert several
    assert not set(several) & set(result.unconfirmed)


def test_an_anchor_leaves_room_for_the_best_where_a_search_ends_near_its_budget(
    store: Store,
) -> None:
    measured: list[str] = []

    def later_is_faster(request: TrialRequest) -> float:
        if request.layout.key not in measured:
            measured.append(request.layout.key)
        return 1.0 - 0.01 * measured.index(request.layout.key)  # too little to contradict physics

    wanted = spec(
        gpus=1,
        repeats=1,
        search={"confirm": {"repeats": 1}, "strategy": "exhaustive", "max_gpu_hours": 7.9 / HOUR},
    )
    result, scheduler = run(store, later_is_faster, spec=wanted)
    assert len(scheduler.started) == 7
    assert result.counts[TrialState.MEASURED] == 6
    assert list(result.unconfirmed) == []


def test_what_a_budget_left_unconfirmed_is_said_again_without_asking_a_cluster(
    store: Store,
) -> None:
    wanted = spec(
        gpus=1,
        repeats=1,
        device="cpu",
        gpus_per_node=2,
        search={"confirm": {"repeats": 1}, "max_gpu_hours": 1.1 / HOUR},
    )
    result, _ = run(store, fast, spec=wanted)
    again = finished_before(
        wanted, store, code=lambda: CODE, program_version="test", this_host=None
    )
    assert again is not None
    assert list(again.unconfirmed) == list(result.unconfirmed) == list(wanted.cells())


def test_nothing_is_kept_for_the_best_of_a_cell_that_was_stopped_for_its_faults(
    store: Store,
) -> None:
    class Cell:
        """As much of a cell as sharing reads: two layouts are measured and none is repeated."""

        def __init__(self, stopped: StopReason | None) -> None:
            self.life, self.has_nothing = CellLife(), False
            if stopped is not None:
                self.life.stop(stopped)
            self.is_searched = self.life.is_searched
            self.cell, self.repeats = spec(gpus=1).cells()[0], dict[int, Purpose]()
            self.cost = AttemptCost(cell=self.cell, predicted_seconds=10.0)
            self.cost.note_reserved(10.0, is_measured=True)
            self.confirmation = Confirmation(repeating=self.repeats)
            for trial_id in (1, 2):
                self.confirmation.note(
                    trial_id,
                    Layout(micro_batch_size=trial_id),
                    Run(step_seconds=1.0 / trial_id, at=float(trial_id)),
                )

    def kept_for(stopped: StopReason) -> float:
        mine, other = Cell(None), Cell(stopped)
        mine.repeats[2] = Purpose.CONFIRMATION
        kept = reserved_from(
            mine, [mine, other], confirm=Confirm(repeats=1), is_repeat=False, slots=1, at_once=1
        )  # type: ignore[arg-type, list-item]
        return kept.gpu_seconds

    assert kept_for(StopReason.GPU_HOURS) > 0
    assert kept_for(StopReason.FAULTS) == kept_for(StopReason.NODES) == 0


def test_a_call_that_was_stopped_midway_shares_what_is_left_as_one_call_would(store: Store) -> None:
    wanted = four_cells(strategy="exhaustive", max_gpu_hours=10.1 / HOUR)
    for polls in (2, 3, 4):
        run(store, fast, spec=wanted, stop=after(polls, Stop.CANCEL))
    run(store, fast, spec=wanted)
    measured = [
        trial
        for trial in store.trials(store.sweep_named("t").id)
        if trial.state is TrialState.MEASURED
    ]
    counts = Counter(trial.cell_id for trial in measured)
    assert len(counts) == 4
    assert max(counts.values()) - min(counts.values()) <= 1


def test_without_a_budget_what_fills_the_cluster_goes_first(store: Store) -> None:
    _, scheduler = run(store, fast, spec=four_cells(strategy="exhaustive"))
    assert len(scheduler.started) == 24


def cell_with(
    *, launched: int, gain: float | None, gpu_seconds: float = 100.0, nothing: bool = False
) -> CellSearch:
    """A cell that is searched, with only what decides its place among others."""
    found: Any = SimpleNamespace(
        is_searched=True,
        retries=SimpleNamespace(waiting=[]),
        has_nothing=nothing,
        num_new=0,
        launched=launched,
        cost=SimpleNamespace(guessed_gpu_seconds=gpu_seconds),
        expected_gain=lambda: gain,
    )
    return cast(CellSearch, found)


def test_in_each_round_the_cell_with_most_to_gain_for_its_price_goes_first() -> None:
    cells = {
        "nothing measured yet": cell_with(launched=3, gain=None, nothing=True),
        "behind, and little to gain for it": cell_with(launched=4, gain=0.003),
        "much to gain": cell_with(launched=5, gain=0.2),
        "the same, and twice as dear": cell_with(launched=5, gain=0.2, gpu_seconds=200.0),
        "less to gain": cell_with(launched=5, gain=0.05),
        "ahead by a round": cell_with(launched=6, gain=0.9),
        "hardly anything to gain": cell_with(launched=1, gain=LITTLE / 2),
    }
    assert sorted(cells, key=lambda name: precedence(cells[name])) == list(cells)
