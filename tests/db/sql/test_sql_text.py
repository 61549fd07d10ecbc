"""What the lexer refuses, and that PostgreSQL reads nothing else in what it lets through."""

from __future__ import annotations

import itertools
import os

import pytest

from db.sql.sql_text import refuse_beyond_reading
from orchestrator.core.errors import UsageInvalid
from tests.db.sql import sql_traps

NUM_RANDOM = (
    # A few seconds; `python -m tests.db.sql.sql_traps` goes on as long as it is told.
    10_000
)


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        (
            "SELECT 1 AS x😀$$, set_config('role','none',false), 2 AS y😀$$",
            "a name holds a letter beyond ASCII",
        ),
        ("SELECT $é$'$é$, query_to_xml('x') --'", r"\$ cannot stand outside of texts"),
        ("SELECT E'a'\n'\\'', query_to_xml('x') --'", "two texts follow one another"),
        ("SELECT 'a' -- b\n 'c'", "two texts follow one another"),
        ("SELECT E'\\''", "has an escape other than"),
        ("SELECT E'\\x27'", "has an escape other than"),
        ("SELECT U&'\\0027'", "Unicode escapes"),
        ('SELECT u&"\\0070g"(1)', "Unicode escapes"),
        ("SELECT 1e'\\', f() --'", "a number is followed by a letter, digit or quote"),
        ("SELECT 0x1f", "a number is followed by a letter, digit or quote"),
        ("SELECT 1_000", "a number is followed by a letter, digit or quote"),
        ("SELECT $1", r"\$ cannot stand outside of texts"),
        ("SELECT a$$", r"\$ cannot be part of a name"),
        ("SELECT größe", "a name holds a letter beyond ASCII"),
        ("SELECT \u00a02", "'\\\\xa0' is outside of texts"),
        ("SELECT 1\v2", "'\\\\x0b' is outside of texts"),
        ("SELECT `a`", "cannot be read here"),
        ("SELECT /* /* */ */ 1", "another begins within it"),
        ("SELECT 'a", "a text does not end"),
        ('SELECT "a', "does not end"),
        ("SELECT date'2020-01-01'", "write a space between them"),
        ("SELECT public.lower('a')", "with the name of its schema"),
        ('SELECT "set_config"(1)', "function set_config cannot be called here"),
        (f"SELECT {'a' * 64}", "longer than 63 bytes"),
        ("SELECT query_to_xml\n/* x */ ('x')", "function query_to_xml cannot be called here"),
        ("SELECT * FROM ROWS FROM (evil())", "function evil cannot be called here"),
        ("SELECT 1 OPERATOR(evil.+) 2", "function operator cannot be called here"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused_in_one_line(sql: str, says: str) -> None:
    with pytest.raises(UsageInvalid, match=says) as caught:
        refuse_beyond_reading(sql)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 'größe 😀', \"größe\" FROM t -- größe\n/* 😀 */",
        "SELECT E'a\\n\\t\\\\b', 'it''s', X'1f', B'10', N'x', 1.5e-3, .5, 1.",
        "SELECT t.*, a->>'x', b::text, c[1:2], date '2020-01-01' FROM t WHERE a LIKE ('x%') AND "
        "NOT (b)",
        "SELECT string_agg(a, E'\\n') FILTER (WHERE a > 'b') FROM t",
    ],
)
def test_what_both_read_alike_is_let_through(sql: str) -> None:
    assert sql_traps.is_let_through(sql)


@pytest.mark.long
def test_postgresql_reads_nothing_in_a_hostile_statement_that_we_do_not() -> None:
    if os.environ.get("CI") != "true":  # there its absence is a failure
        pytest.importorskip("pglast", reason="PostgreSQL's own parser, of the test extra")
    made = itertools.chain(
        itertools.islice(sql_traps.paired(), 0, None, 3),
        itertools.islice(sql_traps.endless(1), NUM_RANDOM),
        itertools.islice(sql_traps.bent(1), NUM_RANDOM),
    )
    let_through = [sql for sql in made if sql_traps.is_let_through(sql)]
    assert len(let_through) > 1000
    assert [
        (sql, found) for sql in let_through if (found := sql_traps.difference(sql)) is not None
    ] == []
