"""The code of an attempt is that of its start."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.sweep.measured_code import MeasuredCode

BEFORE, AFTER = (Fingerprint(orchestrator_version="1", dirty_diff_digest=one) for one in "ab")


def ticking(*times: float) -> Callable[[], float]:
    left = list(times)
    return lambda: left.pop(0)


def test_code_that_nobody_edits_stays_as_it_was() -> None:
    code = MeasuredCode(BEFORE)
    assert code.as_of_now() is code.now is BEFORE


def test_an_attempt_has_the_code_of_the_last_edit_before_its_start() -> None:
    edits = [None, AFTER, None]
    code = MeasuredCode(BEFORE, lambda: edits.pop(0), ticking(0, 0, 1, 1, 2, 2))
    assert [code.as_of_now() for _ in range(3)] == [BEFORE, AFTER, AFTER]


def test_a_quick_check_is_made_each_time() -> None:
    checked: list[int] = []
    code = MeasuredCode(BEFORE, lambda: checked.append(1), ticking(0, 0.04, 0.05, 0.09))
    assert code.may_change and not MeasuredCode(BEFORE).may_change
    for _ in range(2):
        code.as_of_now()
    assert len(checked) == 2


def test_checking_for_edits_takes_at_most_a_twentieth_of_the_time() -> None:
    checked: list[int] = []
    # The first check takes a second, so the next one comes 20 s after it.
    code = MeasuredCode(BEFORE, lambda: checked.append(1), ticking(0, 1, 20.9, 21.0, 21.0))
    for _ in range(3):
        code.as_of_now()
    assert len(checked) == 2
