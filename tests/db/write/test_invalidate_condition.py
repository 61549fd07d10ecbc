"""A condition of `invalidate` stays within its parentheses, and may ask for the stack."""

from __future__ import annotations

import pytest

from db.sql.sql_text import refuse_loose_ends
from db.store import Store
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.lifecycle import TrialState
from tests.db.builders import Bench


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
