"""The trials that match a condition, which stays within its parentheses."""

from __future__ import annotations

import pytest

from db.sql.repeatable_trials import num_by_state, trials_by_sweep
from db.sql.sql_text import refuse_loose_ends
from db.store import Store
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from tests.db.builders import Bench, failure, record_failure


@pytest.mark.parametrize(
    "condition",
    [
        "1=1) or (1=1",
        "(1=1",
        "1=1)",
        "",
        "  ",
        "1=1; delete from trial",
        "1=1) -- (",
        "1=1 /* ( ",
        "')' = ')') or (1=1",
    ],
)
def test_a_condition_with_loose_ends_is_refused(condition: str) -> None:
    with pytest.raises(UsageInvalid):
        refuse_loose_ends(condition)


@pytest.mark.parametrize(
    "condition",
    ["1=1 /* /* */ ) or (1=1 /* */ */", "trial_id = 1 -- )", "trial_id = 1 /* mine */", "1=1 --"],
)
def test_a_comment_is_refused_because_the_databases_do_not_agree_where_it_ends(
    condition: str,
) -> None:
    with pytest.raises(
        UsageInvalid, match=r"(a condition holds no comment|a comment does not end)"
    ):
        refuse_loose_ends(condition)


@pytest.mark.parametrize(
    "condition",
    [
        "1=1",
        "(trial_id = 1 or cell_id = 2) and sweep_id = 3",
        "why = ')'",
        "state in ('measured', 'failed')",
        "why = '/* -- )'",
        "trial_id = 1 - -1",
        "trial_id / cell_id * 2 > 1",
    ],
)
def test_a_whole_condition_is_let_through(condition: str, store: Store) -> None:
    assert store.count_repeatable(condition) == {}


def test_the_stack_of_a_measurement_can_be_asked_for(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(torch="2.9.1")
    store.release(bench.sweep_id, bench.epoch)
    assert store.count_repeatable("torch like '2.13.%'") == {}
    assert store.count_repeatable("torch like '2.9.%'") == {TrialState.MEASURED: 1}
    assert store.invalidate("torch like '2.9.%'") == 1
    assert store.trial(trial_id).trial.state is TrialState.QUEUED


def url(store: Store) -> str:
    return store._database.url.render_as_string(hide_password=False)


def test_only_trials_that_have_ended_are_found_and_of_one_sweep_if_it_is_given(
    store: Store,
) -> None:
    one, two = Bench.on(store, "one"), Bench.on(store, "two")
    first, third, second = one.measure(1), one.measure(2), two.measure(1)
    under_way, _ = one.start(3)
    found = trials_by_sweep(url(store), "1 = 1", None)
    assert {sweep: sorted(trials) for sweep, trials in found.items()} == {
        one.sweep_id: sorted([first, third]),
        two.sweep_id: [second],
    }
    assert trials_by_sweep(url(store), "1 = 1", two.sweep_id) == {two.sweep_id: [second]}
    assert trials_by_sweep(url(store), f"trial_id = {under_way}", None) == {}


def test_what_a_matching_trial_condemns_is_counted_with_it(bench: Bench) -> None:
    proof, number = bench.start(4)
    record_failure(
        bench.store,
        proof,
        number,
        epoch=bench.epoch,
        failure=failure(),
        event=TrialEvent.OUT_OF_MEMORY,
    )
    bench.prune([5, 6], condemned_by=proof)
    counts = {TrialState.OUT_OF_MEMORY: 1, TrialState.PRUNED: 2}
    assert num_by_state(url(bench.store), f"trial_id = {proof}", bench.sweep_id) == counts
