"""Stored repeats go on or not, by the code of the call, of the trials, and of the last repeats."""

from __future__ import annotations

import pytest

from db.read.rows import OtherRepeat, Repeats
from db.store import Store
from orchestrator.core.sweepfile.search_section import Confirm
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint, Stack
from orchestrator.sweep.stored_confirmation import confirmation_of
from tests.db.builders import Bench, fingerprint

CODE = fingerprint()
EDITED, OTHER = (
    CODE.model_copy(update={"dirty_diff_digest": f"files:{name}"}) for name in ("b", "c")
)
UPGRADED = fingerprint("9.9")


def of_call(of: Fingerprint) -> Fingerprint:
    """The fingerprint that a call knows before it has run anything."""
    return of.model_copy(update={"stack": Stack()})


def goes_on(
    store: Store, code: Fingerprint | None, *last: Fingerprint | None, kind: FailureKind | None
) -> bool:
    """Return whether the only trial of a cell is repeated, after repeats with other code."""
    bench = Bench.on(store)
    trial_id = bench.measure()
    (trial,) = store.trials(bench.sweep_id)
    repeats = Repeats(
        runs=confirmation_of([trial], {}).runs.of_trial[trial_id],
        failures={},
        fingerprint=CODE,
        others=tuple(OtherRepeat(fingerprint=one, failure_kind=kind) for one in last),
    )
    found = confirmation_of([trial], {trial_id: repeats}, code=lambda: code)
    return found.next_repeat(Confirm(repeats=2), anchor_every=0) is not None


@pytest.mark.parametrize(
    ("code", "last", "expected"),
    [
        (None, EDITED, False),  # no call runs
        (of_call(EDITED), EDITED, False),
        (of_call(CODE), EDITED, True),  # the edit was taken back
        (of_call(OTHER), EDITED, False),
        (of_call(CODE), UPGRADED, False),
        (of_call(CODE), None, False),
    ],
)
def test_repeats_go_on_if_the_call_has_the_code_of_the_trials_again(
    sqlite_store: Store, code: Fingerprint | None, last: Fingerprint | None, expected: bool
) -> None:
    assert goes_on(sqlite_store, code, last, kind=None) is expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [(None, False), (of_call(EDITED), False), (of_call(CODE), True), (of_call(OTHER), True)],
)
def test_failures_of_an_edit_that_was_taken_back_are_none_of_the_trials(
    sqlite_store: Store, code: Fingerprint | None, expected: bool
) -> None:
    assert goes_on(sqlite_store, code, EDITED, kind=FailureKind.USER_ERROR) is expected
