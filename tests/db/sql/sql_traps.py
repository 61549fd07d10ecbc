"""Makes hostile statements, and shows where PostgreSQL reads them otherwise than `db.sql.sql_text`.

To run it for longer than a test: python -m tests.db.sql.sql_traps --seconds 600 [--seed 7]. It
needs pglast, which is PostgreSQL's own parser.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from db.sql.sql_text import ALLOWED_FUNCTIONS, _tokens, refuse_beyond_reading
from orchestrator.core.errors import UsageInvalid

CANARY = "canary('seen')"
# What may begin or end a text, a name, a comment or a number, or seem to.
OPENERS = (
    "'", "''", "'''", "' '", "'\n'", "E'", "e'a'\n'", "E'\\'", "E'\\\\'", "E'\\\\\\'",
    "E'\\n'\n'\\'", "'a' -- b\n'", "'a' /* b */ '", "'a'\r'", "'a'\f'", "'\\'", "N'", "n'a'\n'",
    "B'", "b'1'\n'", "X'", "x'1f'\n'", "U&'", "u&'\\0027'", 'U&"', 'u&"', "U& '", "1e'", "1E'\\'",
    "0x'", "1x'", "1_e'", "1.e'", ".5e'", "1n'", "$$", "$a$", "$é$", "$1", "$1$", "$_$", "$ $",
    "$a", "a$$", "x😀$$", "é$$", "1$$", "a$b$", "\u00a0$$", "_$$", "$$$", "$A$a$", '"', '""',
    '"""', '"a""', 'a"', '1"', '"é"', '"$$', '"\'', '\'"', "'$$", "$$'", "/*", "/**/", "/*/",
    "/* /*", "/*/**/", "/***/", "*/", "/*'", "'/*", "--", "--\n", "--'\n", "'--", "--\r", "--\f",
    "--\v\n", "--\u2028", "--\u0085", "-", "+--", "*/*", "+/*", "/-/*", "@--", "#/*", "`", "\\",
    "\\'", "\\\\'", ";", "'a'b'", "e'a'E'\\'", "'a'U&'", "date'", "date '", "text'\\'",
    "interval '1'", "::text'", "[", "(", "{", "?", "?'", ":", ":'", "::", ".", "..", "1..", "1.",
    "t.", "a.b.", "E''", "E'''", "e''\n''", "'\0'", "\ufeff", "\u200b", "\v", "\x1c", "\x85", "ﬀ",
    "K", "ı$$", "\u0301'", "é'", "é\"", "éE'", "_e'", "ue'", "xU&'", "1U&'", "U&1'", "U &'",
    "UESCAPE'!'", "U&'!0027' UESCAPE '!' '",
)  # fmt: skip
GLUE = (
    "",
    " ",
    "\n",
    ",",
    " , ",
    "||",
    " AS x,",
    "\t",
    "\r",
    "\f",
    "--\n",
    "/**/",
    "\n--\n",
    "::text,",
    " x",
    ")",
    "(",
    ";",
    "\u00a0",
    "\v",
)
WORDS = (
    "SELECT",
    "1",
    "x",
    "lower('a')",
    "t.x",
    "t.canary",
    "'a'",
    '"b"',
    "FROM trial t",
    "AS",
    "1.5",
    "count(*)",
    "canary",
    "a$b",
    "😀",
    "é",
    "0x1f",
    "1_000",
    "--",
    "/*",
    "*/",
)


def paired() -> Iterator[str]:
    """Every piece before a call, and every piece behind it."""
    for before, after, glue in itertools.product(OPENERS, OPENERS, ("", ",", "\n", " ")):
        yield f"SELECT {before}{glue}, {CANARY}, {after}"
    for before, after in itertools.product(OPENERS, OPENERS):
        yield f"SELECT 1 AS x{before}, {CANARY}, 2 AS x{after}"
        yield f"SELECT 'a{before}, {CANARY}, {after}b'"


def endless(seed: int) -> Iterator[str]:
    """Statements of random pieces, a call among them."""
    chance = random.Random(seed)
    while True:
        pieces = []
        for _ in range(chance.randint(2, 7)):
            pieces += [chance.choice(OPENERS + WORDS), chance.choice(GLUE)]
        pieces.insert(chance.randint(0, len(pieces)), f", {CANARY}, ")
        # Closed again: more of these are read by both.
        if chance.random() < 0.5:
            pieces.append(chance.choice(("'", '"', "$$", "*/", "\n", "''", "')", "$a$", "' x")))
        yield "SELECT " + "".join(pieces)


VALID = (
    "SELECT a , b FROM trial AS t ( a , b ) WHERE a IN ( SELECT 1 ) ORDER BY 1",
    "WITH RECURSIVE n ( i ) AS ( SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5 ) SELECT "
    "sum ( i ) FROM n",
    "SELECT row_number ( ) OVER ( PARTITION BY a ORDER BY b ) , count ( * ) FILTER ( WHERE a > "
    "1 ) FROM t",
    "SELECT CAST ( a AS numeric ( 10 , 2 ) ) , CASE WHEN ( a ) THEN 1 ELSE ( 2 ) END FROM t "
    "LIMIT ( 3 )",
    "SELECT t.a , t . b FROM trial t JOIN v_trial USING ( trial_id ) LEFT JOIN LATERAL ( SELECT "
    "1 ) x ON ( true )",
    "SELECT a FROM t GROUP BY GROUPING SETS ( ( a ) , ( ) ) HAVING count ( * ) > ALL ( ARRAY [ "
    "1 ] )",
    "EXPLAIN ( ANALYZE ) SELECT date '2020-01-01' + interval '1 day' , extract ( year FROM now "
    "( ) )",
    "VALUES ( 1 , 'a' ) , ( 2 , 'b' )",
    "SELECT percentile_cont ( 0.5 ) WITHIN GROUP ( ORDER BY a ) , ( t ) . a FROM t WHERE a "
    "BETWEEN ( 1 ) AND ( 2 )",
    "SELECT * FROM ROWS FROM ( generate_series ( 1 , 2 ) ) WITH ORDINALITY AS x ( i , n )",
)
INSERTED = (
    "canary ( 'seen' )", "canary ( 'seen' )", "canary", "AS", "WITH", "RECURSIVE", '"as"', ".",
    ",", "(", ")", "t . as", "t . with", "OVER", "FILTER", "OPERATOR ( + )", "USING",
    "COLLATION FOR", "TABLESAMPLE", "FROM", "LATERAL", "ROWS FROM (", "SELECT", "VALUES",
    "xmlparse ( document 'x' )", "overlay ( 'a' placing 'b' from 1 )", "CAST (", "::", "[", "]",
    "NOT", "IN", "EXISTS", "WINDOW", "VARIADIC", "=>", ":=", "MATERIALIZED", "lower ( 'a' )", "-",
    "1", "'a'",
)  # fmt: skip


def bent(seed: int) -> Iterator[str]:
    """Valid statements with inserted words: what precedes a parenthesis decides if it is a call."""
    chance = random.Random(seed)
    while True:
        words = chance.choice(VALID).split(" ")
        for _ in range(chance.randint(1, 4)):
            place = chance.randint(1, len(words))
            words[place : place + chance.choice((0, 0, 1))] = [chance.choice(INSERTED)]
        yield " ".join(words)


def is_let_through(sql: str) -> bool:
    if "\0" in sql:  # refused before it is read
        return False
    try:
        refuse_beyond_reading(sql)
    except UsageInvalid:
        return False
    return True


def difference(sql: str) -> str | None:
    """A call that PostgreSQL reads and we do not in a statement that is let through; or None."""
    from pglast import parser, visitors

    try:
        tokens = parser.scan(sql)
    except parser.ParseError:
        return None
    theirs = "".join(
        _as_ours(sql[token.start : token.end + 1]) for token in tokens if not _is_literal(token)
    )
    ours = "".join(_tokens(sql))
    if theirs != ours:
        return f"it reads {theirs!r}, we read {ours!r}"
    try:
        tree = parser.parse_sql(sql)
    except parser.ParseError:
        return None
    called: set[str] = set()

    class Calls(visitors.Visitor):
        def visit_FuncCall(self, ancestors: object, node: object) -> None:
            called.add(node.funcname[-1].sval)  # type: ignore[attr-defined]

    Calls()(tree)
    # What its grammar turns into calls, and cannot be called by that name.
    # The catalog is asked whether what is before a parenthesis is a function.
    unknown = (
        called
        - ALLOWED_FUNCTIONS
        - refuse_beyond_reading(sql).before_parenthesis
        - {
            "like_escape",
            "similar_to_escape",
            "timezone",
            "overlaps",
            "is_normalized",
            "btrim",
            "pg_collation_for",
        }
    )
    return f"it calls {sorted(unknown)}" if unknown else None


def _is_literal(token: Any) -> bool:
    # The letter of N'...' is a word to PostgreSQL, and part of the text to us.
    is_letter = token.name == "NCHAR" and token.start == token.end
    return is_letter or token.name in (
        "SCONST",
        "USCONST",
        "BCONST",
        "XCONST",
        "ICONST",
        "FCONST",
        "SQL_COMMENT",
        "C_COMMENT",
    )


def _as_ours(token: str) -> str:
    return token if token.startswith('"') else token.lower()


def turns(*makers: Iterator[str]) -> Iterator[str]:
    return itertools.chain.from_iterable(zip(*makers, strict=True))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=int(time.time()))
    asked = options.parse_args()
    until, num, num_let_through = time.monotonic() + asked.seconds, 0, 0
    for sql in itertools.chain(paired(), turns(endless(asked.seed), bent(asked.seed))):
        if time.monotonic() > until:
            break
        num += 1
        if is_let_through(sql):
            num_let_through += 1
            if (found := difference(sql)) is not None:
                print(f"seed {asked.seed}: {sql!r}: {found}")
                return 1
    print(
        f"seed {asked.seed}: {num:,} statements, {num_let_through:,} let through, none read "
        "otherwise by PostgreSQL"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
