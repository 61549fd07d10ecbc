from __future__ import annotations

from itertools import product

import pytest

from orchestrator.core.trial.lifecycle import (
    INITIAL,
    INVALIDATABLE,
    TERMINAL,
    TRANSITIONS,
    UNDER_WAY,
    IllegalTransition,
    TrialEvent,
    TrialState,
    advance,
    mermaid,
)

PAIRS = list(product(TrialState, TrialEvent))


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if pair in TRANSITIONS])
def test_a_pair_of_the_table_leads_where_the_table_says(
    state: TrialState, event: TrialEvent
) -> None:
    assert advance(state, event) is TRANSITIONS[state, event]


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if pair not in TRANSITIONS])
def test_any_other_pair_is_refused_with_what_is_possible(
    state: TrialState, event: TrialEvent
) -> None:
    with pytest.raises(IllegalTransition) as caught:
        advance(state, event)
    message = str(caught.value)
    assert message.startswith(f"{event} is not possible in state {state}; possible: ")
    assert all(other in message for origin, other in TRANSITIONS if origin is state)


def test_every_state_is_waiting_in_flight_or_at_its_end() -> None:
    assert {INITIAL} | UNDER_WAY | TERMINAL == set(TrialState)
    assert not UNDER_WAY & TERMINAL
    assert INITIAL not in UNDER_WAY | TERMINAL


def test_every_state_can_be_reached_and_every_event_happens() -> None:
    reached, edge = set(), {INITIAL}
    while edge:
        reached |= edge
        edge = {target for (state, _), target in TRANSITIONS.items() if state in edge} - reached
    assert reached == set(TrialState)
    assert {event for _, event in TRANSITIONS} == set(TrialEvent)


def test_an_end_is_left_only_when_a_person_asks_for_it() -> None:
    leaving = {
        event
        for (state, event), target in TRANSITIONS.items()
        if state in TERMINAL and target is not state
    }
    assert leaving == {TrialEvent.INVALIDATED}
    assert all(TRANSITIONS[state, TrialEvent.INVALIDATED] is INITIAL for state in TERMINAL)


def test_an_out_of_memory_is_a_result_and_a_lost_node_is_not() -> None:
    for state in UNDER_WAY:
        assert advance(state, TrialEvent.OUT_OF_MEMORY) in TERMINAL
        assert advance(state, TrialEvent.REQUEUED) is INITIAL


def test_nothing_is_measured_before_its_first_step() -> None:
    first = [
        state
        for (state, event), target in TRANSITIONS.items()
        if event is TrialEvent.MEASURED and target is not state
    ]
    assert first == [TrialState.RUNNING]


def test_a_repeat_leaves_its_trial_measured_whatever_becomes_of_it() -> None:
    assert advance(TrialState.MEASURED, TrialEvent.REPEATED) is TrialState.MEASURED
    assert advance(TrialState.MEASURED, TrialEvent.MEASURED) is TrialState.MEASURED
    assert [state for state, event in TRANSITIONS if event is TrialEvent.REPEATED] == [
        TrialState.MEASURED
    ]


def test_the_picture_shows_every_transition() -> None:
    picture = mermaid()
    assert picture.startswith("stateDiagram-v2\n    [*] --> queued")
    assert all(
        f"    {state} --> {target}: {event}" in picture
        for (state, event), target in TRANSITIONS.items()
    )
    assert all(f"    {state} --> [*]" in picture for state in TERMINAL)


def test_whatever_has_ended_can_be_withdrawn() -> None:
    assert {state.value for state in INVALIDATABLE} == {
        "measured",
        "out_of_memory",
        "failed",
        "pruned",
    }
