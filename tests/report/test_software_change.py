"""What is said of numbers with other code or software, and which command measures them again."""

from __future__ import annotations

from typing import Any

import pytest

from db.read.rows import FingerprintCounts
from orchestrator.report.software_change import changes_of
from tests.db.builders import fingerprint

OLD, NEW = fingerprint("2.9.0"), fingerprint("2.13.0")
EDITED = OLD.model_copy(update={"dirty_diff_digest": "files:b"})


def counts(cell_id: int = 1, **changes: Any) -> FingerprintCounts:
    given: dict[str, Any] = {
        "cell_id": cell_id,
        "num_current": 5,
        "digest": OLD.digest,
        "earlier": (),
        "num_apart": 0,
        "apart_digest": None,
        "newest_attempt_id": cell_id,
    }
    return FingerprintCounts(**(given | changes))


@pytest.mark.parametrize(
    ("newer", "words", "is_of_code"),
    [
        (
            EDITED,
            "the program has changed (the program's files)."
            " 2 repeats of the new code are not counted",
            True,
        ),
        (
            NEW,
            "the software has changed (torch 2.9.0 -> 2.13.0)."
            " 2 repeats of the new software are not counted",
            False,
        ),
    ],
)
def test_repeats_that_were_kept_apart_name_a_file_or_a_package(
    newer: Any, words: str, is_of_code: bool
) -> None:
    apart = [counts(one, num_apart=1, apart_digest=newer.digest) for one in (1, 2)]
    (change,) = changes_of("s", apart, [OLD, newer])
    assert change.text.startswith(f"No more repeats were made: {words}")
    assert (change.is_of_code, change.is_apart) == (is_of_code, True)
    assert f"--where \"fingerprint_digest = '{OLD.digest}'\" --yes" in change.sentences()


def test_cells_that_differ_are_said_only_if_asked() -> None:
    cells = [counts(1), counts(2, digest=EDITED.digest), counts(3, digest=NEW.digest)]
    assert changes_of("s", cells, [OLD, EDITED, NEW]) == []
    (change,) = changes_of("s", cells, [OLD, EDITED, NEW], across_cells=True)
    assert change.text.startswith("Of 3 cells, 2 were measured with other code, software or device")
    assert f"in ('{OLD.digest}', '{EDITED.digest}')" in change.command


def test_a_sweep_of_one_code_has_nothing_to_say() -> None:
    assert changes_of("s", [counts(1), counts(2)], [OLD], across_cells=True) == []


def test_commands_leave_the_cells_alone_that_the_file_does_not_name() -> None:
    earlier = counts(digest=NEW.digest, earlier=((OLD.digest, 2),))
    for cells, where in (
        ((), "'not is_current_fingerprint'"),
        (("a",), "\"not is_current_fingerprint and cell = 'a'\""),
        (("b", "a"), "\"not is_current_fingerprint and cell in ('a', 'b')\""),
    ):
        (change,) = changes_of("s", [earlier], [OLD, NEW], cells=cells)
        assert change.command == f"sweep invalidate --sweep s --where {where} --yes"


def test_the_numbers_of_an_edit_that_was_undone_are_those_to_measure_again() -> None:
    mixed = [counts(num_current=2, digest=EDITED.digest, earlier=((OLD.digest, 3),))]
    (undone,) = changes_of("s", mixed, [OLD, EDITED], now=OLD)
    assert undone.is_undone
    assert undone.text.startswith(
        "Of 5 measured layouts, 2 have numbers of other code than that of"
    )
    assert f"--where \"fingerprint_digest = '{EDITED.digest}'\" --yes" in undone.sentences()
    for now in (None, EDITED):
        (stands,) = changes_of("s", mixed, [OLD, EDITED], now=now)
        assert not stands.is_undone
        assert "2 have numbers with the newest code" in stands.text
        assert "not is_current_fingerprint" in stands.command


def test_cells_that_only_the_code_of_now_measured_are_not_of_the_edit() -> None:
    cells = [
        counts(1, num_current=4),
        counts(2, num_current=2, digest=EDITED.digest, earlier=((OLD.digest, 2),)),
        counts(3, num_current=1, digest=EDITED.digest),
    ]
    (change,) = changes_of("s", cells, [OLD, EDITED], now=OLD)
    assert change.text.startswith("Of 9 measured layouts, 3 have numbers of other code")
    # The same where no cell has both.
    (change,) = changes_of("s", cells[::2], [OLD, EDITED], across_cells=True, now=OLD)
    assert change.is_undone
    assert change.text.startswith("Of 5 measured layouts, 1 has numbers of other code")


def test_all_edits_that_were_undone_are_measured_again() -> None:
    first = OLD.model_copy(update={"dirty_diff_digest": "files:a"})
    earlier = ((OLD.digest, 4), (first.digest, 2))
    cell = counts(num_current=1, digest=EDITED.digest, earlier=earlier)
    (change,) = changes_of("s", [cell], [OLD, first, EDITED], now=OLD)
    assert change.text.startswith("Of 7 measured layouts, 3 have numbers of other code")
    assert f"in ('{first.digest}', '{EDITED.digest}')" in change.command
    assert OLD.digest not in change.command
    # An edit between numbers of the code of now is no undone one: those are to be measured again.
    again = counts(num_current=1, digest=OLD.digest, earlier=((first.digest, 2),))
    (change,) = changes_of("s", [again], [OLD, first], now=OLD)
    assert not change.is_undone
    assert "not is_current_fingerprint" in change.command


def test_a_change_of_software_is_said_beside_an_edit_that_was_undone() -> None:
    newer = NEW.model_copy(update={"dirty_diff_digest": "files:b"})
    cells = [
        counts(1, digest=NEW.digest, earlier=((OLD.digest, 2), (EDITED.digest, 1))),
        counts(2, num_current=3, digest=newer.digest),
    ]
    undone, software = changes_of("s", cells, [OLD, NEW, EDITED, newer], now=NEW)
    assert "4 have numbers of other code" in undone.text
    assert "(the program's files): it was changed back" in undone.text
    assert "Of 7 measured layouts, 5 have numbers with the newest code" in software.text
    assert software.text.endswith("2 with an earlier one (torch 2.9.0 -> 2.13.0)")


def test_an_edit_that_stands_leaves_the_older_numbers_to_measure_again() -> None:
    cells = [counts(1), counts(2, digest=EDITED.digest)]
    (change,) = changes_of("s", cells, [OLD, EDITED], across_cells=True, now=EDITED)
    assert not change.is_undone
    assert f"= '{OLD.digest}'" in change.command
