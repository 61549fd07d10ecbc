from __future__ import annotations

from itertools import product

import pytest

from orchestrator.sweep.cell_life import (
    EVERYWHERE,
    INITIAL,
    TRANSITIONS,
    CellEvent,
    CellLife,
    CellState,
    IllegalCellTransition,
    advance,
    mermaid,
)
from orchestrator.sweep.progress import BUDGETS, CONFIRMED, DECIDED, StopReason

PAIRS = list(product(CellState, CellEvent))


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if pair in TRANSITIONS])
def test_a_pair_of_the_table_leads_where_the_table_says(state: CellState, event: CellEvent) -> None:
    assert advance(state, event) is TRANSITIONS[state, event]


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if pair not in TRANSITIONS])
def test_any_other_pair_changes_nothing_or_is_refused(state: CellState, event: CellEvent) -> None:
    if event in EVERYWHERE:
        assert advance(state, event) is state
    else:
        with pytest.raises(
            IllegalCellTransition, match=f"{event} is not possible in state {state}"
        ):
            advance(state, event)


def test_every_state_can_be_reached_and_every_event_happens() -> None:
    reached, edge = set(), {INITIAL}
    while edge:
        reached |= edge
        edge = {target for (state, _), target in TRANSITIONS.items() if state in edge} - reached
    assert reached == set(CellState)
    assert {event for _, event in TRANSITIONS} == set(CellEvent)


def test_no_transition_of_the_table_leads_to_where_it_began() -> None:
    assert [pair for pair, target in TRANSITIONS.items() if pair[0] is target] == []


@pytest.mark.parametrize("reason", sorted(set(StopReason) - {StopReason.BEFORE}))
def test_a_search_that_ended_by_itself_or_by_a_budget_is_confirmed_and_others_are_not(
    reason: StopReason,
) -> None:
    life = CellLife()
    life.stop(reason)
    assert life.stopped is reason
    assert not life.is_searched
    assert life.may_be_confirmed == (reason in DECIDED | BUDGETS) == (reason in CONFIRMED)


def test_what_is_left_of_a_search_may_be_given_up() -> None:
    life = CellLife()
    life.stop(StopReason.EXHAUSTED)
    life.stop(StopReason.FAULTS)
    assert (life.state, life.stopped) == (CellState.STOPPED, StopReason.FAULTS)


def test_a_budget_that_ends_the_confirmation_is_why_the_cell_stopped() -> None:
    life = CellLife()
    life.stop(StopReason.PLATEAU)
    life.take(CellEvent.NOTHING_LEFT, StopReason.COST)
    assert (life.state, life.stopped) == (CellState.SETTLED, StopReason.COST)


def test_layouts_that_are_freed_are_searched_if_all_others_were_known() -> None:
    life = CellLife()
    life.stop(StopReason.EXHAUSTED)
    life.free()
    assert (life.state, life.stopped) == (CellState.SEARCHING, None)
    life.stop(StopReason.TRIALS)
    # There are more layouts, and no more trials.
    life.free()
    assert (life.state, life.stopped) == (CellState.CONFIRMING, StopReason.TRIALS)


def test_a_settled_cell_that_is_read_again_is_confirmed_for_the_same_reason() -> None:
    life = CellLife()
    life.stop(StopReason.TRIALS)
    life.take(CellEvent.NOTHING_LEFT)
    life.take(CellEvent.READ_AGAIN)
    assert (life.state, life.stopped) == (CellState.CONFIRMING, StopReason.TRIALS)


def test_the_picture_shows_every_transition() -> None:
    picture = mermaid()
    assert picture.startswith("stateDiagram-v2\n    [*] --> searching")
    assert all(
        f"    {state} --> {target}: {event}" in picture
        for (state, event), target in TRANSITIONS.items()
    )
