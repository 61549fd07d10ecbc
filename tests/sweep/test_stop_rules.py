"""What a row of failures says of the program or of the machine, and what it does not."""

from __future__ import annotations

import re

import pytest

from orchestrator.core.errors import ClusterUnavailable, UsageInvalid
from orchestrator.core.trial.failure_kinds import (
    HANG_KINDS,
    OUT_OF_MEMORY_KINDS,
    POLICIES,
    SUSPECT_KINDS,
    Failure,
    FailureKind,
    Fault,
)
from orchestrator.sweep.stop_rules import MACHINE_FAULTS_IN_A_ROW, SAME_FAILURES, StopRules

OPEN = {1}  # ids of cells
OF_THE_MACHINE = [kind for kind, policy in POLICIES.items() if policy.fault is Fault.MACHINE]
OF_THE_PROGRAM = [
    kind
    for kind, policy in POLICIES.items()
    if policy.fault in (Fault.CODE, Fault.LAYOUT) and kind not in OUT_OF_MEMORY_KINDS | HANG_KINDS
]


def told(stop_rules: StopRules, kind: FailureKind, *messages: str) -> StopRules:
    """The stop rules after failures of a kind, one after the other, none of which was enough so
    far.
    """
    for message in messages:
        stop_rules.stuck_cells(OPEN)
        stop_rules.note_failure(Failure(kind=kind, message=message), cell_id=1, began=0.0, now=0.0)
    return stop_rules


@pytest.mark.parametrize("kind", OF_THE_PROGRAM)
def test_the_same_failure_from_the_first_trial_on_is_the_program_s(kind: FailureKind) -> None:
    stop_rules = told(StopRules("t"), kind, *["no such option: --fast"] * SAME_FAILURES)
    with pytest.raises(
        UsageInvalid,
        match=rf"the first {SAME_FAILURES} attempts failed in the same way.*: no such option:",
    ):
        stop_rules.stuck_cells(OPEN)


def test_what_to_run_after_the_program_was_corrected_is_said_with_its_order() -> None:
    """`sweep run` alone would end at once, since failed trials are not tried again."""
    stop_rules = told(StopRules("t"), FailureKind.USER_ERROR, *["no such option"] * SAME_FAILURES)
    wanted = (
        "Correct the sweep file or the program. If you correct the program alone, its failures are"
        " kept until you give: sweep invalidate --sweep t --where \"state = 'failed'\" --yes. Then"
        " give the same `sweep run`"
    )
    with pytest.raises(UsageInvalid, match=re.escape(wanted)):
        stop_rules.stuck_cells(OPEN)


def test_one_edit_that_all_first_attempts_see_is_not_the_same_failure_of_each() -> None:
    stop_rules = StopRules("t")
    edited = Failure(kind=FailureKind.EDITED, message="edited")
    # All begun together, and ended one after the other.
    for slot in range(3 * SAME_FAILURES):
        stop_rules.note_failure(edited, cell_id=1, began=0.0, now=10.0 + slot)
    assert stop_rules.stuck_cells(OPEN) == set()
    # A program that writes its own sources does so each time.
    for again in range(2, SAME_FAILURES + 1):
        assert stop_rules.stuck_cells(OPEN) == set()
        stop_rules.note_failure(edited, cell_id=1, began=100.0 * again, now=100.0 * again + 50)
    # Those that show nothing new have failed, too.
    num = 3 * SAME_FAILURES + SAME_FAILURES - 1
    with pytest.raises(UsageInvalid, match=f"the first {num} attempts failed"):
        stop_rules.stuck_cells(OPEN)


def test_an_edit_does_not_show_that_the_machine_works() -> None:
    stop_rules = told(StopRules("t"), FailureKind.HUNG, "it stood still")
    told(stop_rules, FailureKind.EDITED, "edited")
    assert stop_rules.suspects_the_machine


def test_the_same_failure_of_other_ranks_is_the_same() -> None:
    stop_rules = told(
        StopRules("t"),
        FailureKind.USER_ERROR,
        *(f"rank {rank} exited with code 1" for rank in range(SAME_FAILURES)),
    )
    with pytest.raises(UsageInvalid, match=r": exited with code 1\. Correct the"):
        stop_rules.stuck_cells(OPEN)


def test_last_lines_of_logs_are_told_and_not_compared() -> None:
    said = "failed in first_step: exit code 127; the last line of its log:"
    texts = [f"rank 0 {said} 12:00:0{num} launch.sh: no torchrun" for num in range(5)]
    with pytest.raises(UsageInvalid, match=r"exit code 127; .* 12:00:00 launch\.sh: no torchrun\."):
        told(StopRules("t"), FailureKind.USER_ERROR, *texts).stuck_cells(OPEN)


def test_bad_results_that_differ_in_their_numbers_are_the_same() -> None:
    texts = [f"52 steps are said to have taken {num},200 s: seconds?" for num in range(5)]
    with pytest.raises(UsageInvalid, match=r": 52 steps are said to have taken 0,200 s"):
        told(StopRules("t"), FailureKind.BAD_RESULT, *texts).stuck_cells(OPEN)
    assert told(StopRules("t"), FailureKind.USER_ERROR, *texts).stuck_cells(OPEN) == set()


def test_numbers_that_cannot_be_true_from_the_first_trial_on_are_the_program_s() -> None:
    stop_rules = StopRules("t")
    for number in range(SAME_FAILURES):
        assert not stop_rules.may_stop
        stop_rules.note_implausible(f"reason {number}", 1, now=0.0)
    assert stop_rules.may_stop
    with pytest.raises(UsageInvalid, match=r"cannot be true, the first: reason 0\. .*implausible"):
        stop_rules.stuck_cells(OPEN)
    stop_rules.note_measured(1, now=1.0)
    assert stop_rules.stuck_cells(OPEN) == set()


def test_failures_with_other_words_are_the_layouts() -> None:
    assert (
        told(
            StopRules("t"),
            FailureKind.USER_ERROR,
            *(f"{n} is not divisible by 3" for n in range(10 * SAME_FAILURES)),
        ).stuck_cells(OPEN)
        == set()
    )


def test_words_that_come_back_after_others_are_counted_anew() -> None:
    same = ["exited with code 1"] * (SAME_FAILURES - 1)
    assert (
        told(
            StopRules("t"), FailureKind.USER_ERROR, *same, "exited with code 2", *same
        ).stuck_cells(OPEN)
        == set()
    )


def test_once_something_was_measured_the_program_is_not_to_blame() -> None:
    stop_rules = told(
        StopRules("t"), FailureKind.USER_ERROR, *["exited with code 1"] * (SAME_FAILURES - 1)
    )
    stop_rules.note_measured(1, now=0.0)
    assert (
        told(
            stop_rules, FailureKind.USER_ERROR, *["exited with code 1"] * (3 * SAME_FAILURES)
        ).stuck_cells(OPEN)
        == set()
    )


@pytest.mark.parametrize("kind", sorted(OUT_OF_MEMORY_KINDS))
def test_running_out_of_memory_is_a_result_however_often(kind: FailureKind) -> None:
    stop_rules = told(StopRules("t"), kind, *["CUDA out of memory"] * (3 * SAME_FAILURES))
    stop_rules.stuck_cells(OPEN)
    assert not stop_rules.suspects_the_machine


@pytest.mark.parametrize("kind", OF_THE_MACHINE)
def test_faults_of_the_machine_in_a_row_are_the_machine_s_even_after_a_measurement(
    kind: FailureKind,
) -> None:
    stop_rules = StopRules("t")
    stop_rules.note_measured(1, now=0.0)
    told(stop_rules, kind, *(f"node-a is gone, {n}" for n in range(MACHINE_FAULTS_IN_A_ROW)))
    last = re.escape(f"the last one: node-a is gone, {MACHINE_FAULTS_IN_A_ROW - 1}.")
    with pytest.raises(
        ClusterUnavailable,
        match=rf"{MACHINE_FAULTS_IN_A_ROW} attempts one after the other failed by the machine's"
        rf" fault, {last}",
    ):
        stop_rules.stuck_cells(OPEN)


def test_what_ran_beside_each_other_fails_once_however_much_it_was() -> None:
    stop_rules = StopRules("t")
    lost = Failure(kind=FailureKind.NODE_LOST, message="node-a is gone")
    # All begun when the sweep was, and told one after the other.
    for gang in range(3 * MACHINE_FAULTS_IN_A_ROW):
        stop_rules.note_failure(lost, cell_id=1, began=0.1 * gang, now=100.0 + gang)
    stop_rules.stuck_cells(OPEN)
    assert stop_rules.suspects_the_machine
    # Begun when the one before was known, and lost as well.
    for again in range(1, MACHINE_FAULTS_IN_A_ROW):
        stop_rules.stuck_cells(OPEN)
        stop_rules.note_failure(lost, cell_id=1, began=100.0 * again, now=100.0 * (again + 1))
    with pytest.raises(
        ClusterUnavailable, match=f"^{MACHINE_FAULTS_IN_A_ROW} attempts one after the other"
    ):
        stop_rules.stuck_cells(OPEN)


@pytest.mark.parametrize(
    "kind",
    [
        None,
        *(kind for kind in OF_THE_PROGRAM if kind is not FailureKind.EDITED),
        *sorted(OUT_OF_MEMORY_KINDS),
    ],
)
def test_a_trial_that_ended_by_itself_shows_that_the_machine_is_well(
    kind: FailureKind | None,
) -> None:
    stop_rules = StopRules("t")
    for number in range(3):
        told(stop_rules, FailureKind.NODE_LOST, *["node-a is gone"] * (MACHINE_FAULTS_IN_A_ROW - 1))
        assert stop_rules.suspects_the_machine
        if kind is None:
            stop_rules.note_measured(1, now=0.0)
        else:
            stop_rules.note_failure(
                Failure(kind=kind, message=f"of its own, {number}"), cell_id=1, began=0.0, now=0.0
            )
        assert not stop_rules.suspects_the_machine
    stop_rules.stuck_cells(OPEN)


def test_what_was_cancelled_says_nothing_of_the_program() -> None:
    assert (
        told(
            StopRules("t"), FailureKind.CANCELLED, *["cancelled"] * (2 * SAME_FAILURES)
        ).stuck_cells(OPEN)
        == set()
    )


def test_what_was_cancelled_says_nothing_of_the_machine() -> None:
    stop_rules = told(
        StopRules("t"), FailureKind.NODE_LOST, *["node-a is gone"] * (MACHINE_FAULTS_IN_A_ROW - 1)
    )
    told(stop_rules, FailureKind.CANCELLED, "cancelled")
    assert stop_rules.suspects_the_machine
    told(stop_rules, FailureKind.NODE_LOST, "node-a is gone")
    with pytest.raises(ClusterUnavailable):
        stop_rules.stuck_cells(OPEN)


# -- several cells ---------------------------------------------------------------------------------


def failing(
    stop_rules: StopRules,
    kind: FailureKind,
    *cells: int,
    at: float = 0.0,
    message: str = "it stood still",
    node: str | None = None,
) -> float:
    """Tell failures of these cells, a second apart. Return when the last of them was."""
    for now, cell_id in enumerate(cells, int(at)):
        stop_rules.note_failure(
            Failure(kind=kind, message=message, node=node),
            cell_id=cell_id,
            began=float(now),
            now=float(now),
        )
    return at + len(cells)


@pytest.mark.parametrize("kind", sorted(SUSPECT_KINDS))
def test_a_cell_that_fails_again_and_again_while_others_run_is_stopped_by_itself(
    kind: FailureKind,
) -> None:
    stop_rules, now = StopRules("t"), 0.0
    for number in range(MACHINE_FAULTS_IN_A_ROW):
        assert stop_rules.stuck_cells({1, 2}) == set()
        now = failing(stop_rules, kind, 1, at=now, message=f"it stood still, {number}")
        stop_rules.note_measured(2, now=now)
        now += 1
    assert stop_rules.stuck_cells({1, 2}) == {1}
    assert stop_rules.stuck_message(1).endswith(
        "attempts in a row failed, the last one: it stood still, 4"
    )
    stop_rules.forget(1)
    assert stop_rules.stuck_cells({2}) == set()


def test_a_cell_is_stopped_as_well_where_the_others_have_not_been_tried_yet() -> None:
    stop_rules = StopRules("t")
    failing(stop_rules, FailureKind.LAUNCH_FAILED, *[1] * MACHINE_FAULTS_IN_A_ROW)
    assert stop_rules.stuck_cells({1, 2}) == {1}


@pytest.mark.parametrize("kind", sorted(SUSPECT_KINDS))
def test_where_every_cell_fails_and_nothing_works_it_is_the_machine(kind: FailureKind) -> None:
    stop_rules = StopRules("t")
    failing(stop_rules, kind, 1, 2, 3, 1, node="node-a")
    assert stop_rules.stuck_cells({1, 2, 3}) == set()
    failing(stop_rules, kind, 2, at=9.0, node="node-a")
    with pytest.raises(
        ClusterUnavailable,
        match=r"5 attempts .* failed by the machine's fault, all on node node-a, the last one",
    ):
        stop_rules.stuck_cells({1, 2, 3})


def test_a_cell_that_has_not_been_tried_shows_first_whether_it_is_the_machine() -> None:
    stop_rules = StopRules("t")
    failing(stop_rules, FailureKind.STORAGE, *[1, 2] * 2)
    failing(stop_rules, FailureKind.STORAGE, 1, at=9.0)
    assert stop_rules.stuck_cells({1, 2, 3}) == set(), (
        "neither alone was five times, and the third may work"
    )
    assert stop_rules.suspected_cells == {1, 2}
    failing(stop_rules, FailureKind.STORAGE, 3, at=10.0)
    with pytest.raises(ClusterUnavailable):
        stop_rules.stuck_cells({1, 2, 3})


def test_hangs_in_a_call_in_which_something_worked_are_never_the_machine_s() -> None:
    """The others have ended by now; what is left of the sweep hangs."""
    stop_rules = StopRules("t")
    stop_rules.note_measured(2, now=0.0)
    failing(stop_rules, FailureKind.HUNG, *[1] * MACHINE_FAULTS_IN_A_ROW, at=1.0)
    assert stop_rules.stuck_cells({1}) == {1}


def test_a_cell_whose_attempts_hang_waits_for_what_worked_to_show_whether_the_machine_works() -> (
    None
):
    stop_rules = StopRules("t")
    failing(stop_rules, FailureKind.HUNG, *[1] * (MACHINE_FAULTS_IN_A_ROW - 1))
    assert stop_rules.cells_to_check == set()
    failing(stop_rules, FailureKind.START_TIMEOUT, 1, at=8.0)
    assert stop_rules.cells_to_check == {1}
    assert stop_rules.stuck_cells({1}, can_check={1}) == set()
    # It worked: the others hang by themselves.
    stop_rules.note_measured(1, now=9.0)
    assert stop_rules.cells_to_check == set() and stop_rules.stuck_cells({1}, {1}) == set()


def test_where_what_worked_hangs_as_well_it_is_the_machine() -> None:
    stop_rules = StopRules("t")
    stop_rules.note_measured(1, now=0.0)
    failing(stop_rules, FailureKind.HUNG, *[1] * MACHINE_FAULTS_IN_A_ROW, at=1.0)
    assert stop_rules.stuck_cells({1}, can_check={1}) == set()
    again = Failure(kind=FailureKind.HUNG, message="and again")
    stop_rules.note_failure(again, cell_id=1, began=9.0, now=9.0, is_repeat=True)
    assert stop_rules.cells_to_check == set()
    with pytest.raises(ClusterUnavailable, match=r"6 attempts .* the last one: and again\."):
        stop_rules.stuck_cells({1}, can_check={1})


def test_a_cell_on_whose_nodes_what_worked_hangs_ends_alone_while_another_works() -> None:
    stop_rules = StopRules("t")
    failing(stop_rules, FailureKind.HUNG, *[1] * MACHINE_FAULTS_IN_A_ROW)
    again = Failure(kind=FailureKind.HUNG, message="and again")
    stop_rules.note_failure(again, cell_id=1, began=9.0, now=9.0, is_repeat=True)
    stop_rules.note_measured(2, now=10.0)
    assert stop_rules.stuck_cells({1, 2}, can_check={1, 2}) == {1}


def test_cells_that_hang_in_turn_are_checked_together() -> None:
    stop_rules = StopRules("t")
    failing(stop_rules, FailureKind.HUNG, 1, 2, 1, 2, 1)
    assert stop_rules.cells_to_check == {1, 2}
    assert stop_rules.stuck_cells({1, 2}, can_check={1}) == set()
    with pytest.raises(ClusterUnavailable):
        stop_rules.stuck_cells({1, 2}, can_check=())


@pytest.mark.parametrize("began", [0.5, 9.0])
def test_a_repeat_that_hung_before_the_check_or_began_before_it_proves_nothing(
    began: float,
) -> None:
    stop_rules = StopRules("t")
    again = Failure(kind=FailureKind.HUNG, message="and again")
    if began < 1:
        # It began before the first hang was known, and is told after the fifth.
        failing(stop_rules, FailureKind.HUNG, *[1] * MACHINE_FAULTS_IN_A_ROW, at=1.0)
        stop_rules.note_failure(again, cell_id=1, began=began, now=10.0, is_repeat=True)
    else:
        stop_rules.note_failure(again, cell_id=1, began=0.0, now=0.0, is_repeat=True)
        failing(stop_rules, FailureKind.HUNG, *[1] * (MACHINE_FAULTS_IN_A_ROW - 1), at=1.0)
    assert stop_rules.cells_to_check == {1}
    assert stop_rules.stuck_cells({1}, can_check={1}) == set()


def test_a_check_under_way_in_one_cell_is_waited_for_when_that_of_another_hung() -> None:
    stop_rules = StopRules("t")
    failing(stop_rules, FailureKind.HUNG, 1, 2, 1, 2, 1)
    again = Failure(kind=FailureKind.HUNG, message="and again")
    stop_rules.note_failure(again, cell_id=2, began=9.0, now=9.0, is_repeat=True)
    assert stop_rules.stuck_cells({1, 2}, can_check={1, 2}, checking={1}) == set()
    stop_rules.note_failure(again, cell_id=1, began=9.0, now=10.0, is_repeat=True)
    with pytest.raises(ClusterUnavailable):
        stop_rules.stuck_cells({1, 2}, can_check={1, 2})


@pytest.mark.parametrize("kind", sorted(SUSPECT_KINDS - HANG_KINDS))
def test_only_hangs_are_checked(kind: FailureKind) -> None:
    stop_rules = StopRules("t")
    failing(stop_rules, FailureKind.HUNG, *[1] * MACHINE_FAULTS_IN_A_ROW)
    failing(stop_rules, kind, 1, at=9.0)
    assert stop_rules.cells_to_check == set()
    with pytest.raises(ClusterUnavailable):
        stop_rules.stuck_cells({1}, can_check={1})


@pytest.mark.parametrize(
    ("kind", "told"), [(FailureKind.HUNG, ""), (FailureKind.STORAGE, ", all on node a")]
)
def test_of_several_nodes_it_is_not_known_which_one_hangs(kind: FailureKind, told: str) -> None:
    stop_rules = StopRules("t")
    for at in range(MACHINE_FAULTS_IN_A_ROW):
        failure = Failure(kind=kind, message="it stood still", node="a")
        stop_rules.note_failure(failure, cell_id=1, began=at, now=at, num_nodes=2)
    with pytest.raises(ClusterUnavailable, match=rf"the machine's fault{told}, the last one"):
        stop_rules.stuck_cells({1})


def test_a_machine_that_breaks_after_something_was_measured_is_the_machine_all_the_same() -> None:
    stop_rules = StopRules("t")
    stop_rules.note_measured(2, now=0.0)
    failing(stop_rules, FailureKind.STORAGE, *[1] * MACHINE_FAULTS_IN_A_ROW, at=1.0)
    with pytest.raises(ClusterUnavailable):
        stop_rules.stuck_cells({1})


def test_the_same_words_of_one_cell_end_nothing_while_another_may_work() -> None:
    stop_rules = StopRules("t")
    failing(
        stop_rules,
        FailureKind.USER_ERROR,
        *[1] * (3 * SAME_FAILURES),
        message="no such option: --fast",
    )
    assert stop_rules.stuck_cells({1, 2}) == set()
    assert stop_rules.suspected_cells == {1}
    failing(stop_rules, FailureKind.USER_ERROR, 2, message="no such option: --fast")
    with pytest.raises(UsageInvalid, match="no such option: --fast"):
        stop_rules.stuck_cells({1, 2})


def test_what_has_nothing_left_to_start_is_not_stopped() -> None:
    stop_rules = StopRules("t")
    failing(stop_rules, FailureKind.NODE_LOST, *[1] * MACHINE_FAULTS_IN_A_ROW)
    assert stop_rules.stuck_cells(set()) == set()
