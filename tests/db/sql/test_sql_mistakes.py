"""The line about a statement that was refused or is wrong, with the name that was meant."""

from __future__ import annotations

import pytest

from db.sql.sql_mistakes import one_line, refused, wrong

COLUMNS = {
    "trial": ["id", "state", "layout_key"],
    "v_trial": ["trial_id", "state", "layout", "micro_batch_size"],
    "v_best": ["cell", "trial_id"],
}


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            'ERROR:  syntax error at or near "selec"\nLINE 1: selec',
            'syntax error at or near "selec"',
        ),
        ('near "x": syntax error.', 'near "x": syntax error'),
        ("\n\n  second line  \nthird", "second line"),
        (" \n ", "no message"),
    ],
)
def test_of_a_message_the_first_line_is_shown_without_its_severity(message: str, line: str) -> None:
    assert one_line(message) == line
    assert refused(message) == (
        f"the query was refused: {line}; only reading is possible here, one statement at a time"
    )


def test_a_message_that_repeats_the_statement_is_cut() -> None:
    assert len(one_line("x" * 5000)) == 300


@pytest.mark.parametrize(
    "message", ["no such table: v_trails", 'relation "v_trails" does not exist']
)
def test_a_table_with_a_similar_name_is_suggested(message: str) -> None:
    assert wrong(message, "SELECT * FROM v_trails", COLUMNS).endswith("did you mean v_trial?")


def test_without_a_similar_name_all_tables_are_listed() -> None:
    said = wrong("no such table: machines", "SELECT * FROM machines", COLUMNS)
    assert said.endswith("; there are v_trial, v_best, trial")


@pytest.mark.parametrize(
    ("message", "sql", "meant"),
    [
        (
            "no such column: micro_batch",
            "SELECT micro_batch FROM v_trial",
            "did you mean micro_batch_size?",
        ),
        (
            'column "micro_batch" does not exist',
            "SELECT micro_batch FROM v_trial",
            "did you mean micro_batch_size?",
        ),
        (
            "column v.micro_batch does not exist",
            "SELECT v.micro_batch FROM v_trial v",
            "did you mean micro_batch_size?",
        ),
        # The statement names v_best alone.
        ("no such column: layout_key", "SELECT layout_key FROM v_best", "it is a column of trial"),
        ("no such column: zzz", "SELECT zzz FROM v_best", "`sweep sql --schema` shows the columns"),
    ],
)
def test_a_column_is_looked_for_in_the_tables_of_the_statement_then_in_others(
    message: str, sql: str, meant: str
) -> None:
    assert wrong(message, sql, COLUMNS).endswith(f"; {meant}")


def test_a_function_with_a_similar_name_is_suggested_and_other_mistakes_are_only_shown() -> None:
    assert wrong("no such function: medain", "SELECT medain(1)", COLUMNS).endswith(
        "did you mean median?"
    )
    plain = wrong("division by zero", "SELECT 1/0", COLUMNS)
    assert plain == "the query cannot be answered: division by zero"
