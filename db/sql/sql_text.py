"""Reads SQL statements, and refuses those that could do more than read.

The engine is read-only as well, but in a read-only transaction a function may still read files, run
programs or run SQL. So only functions named here may be called, and a statement is refused if
PostgreSQL could read one of its characters in another way than this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from orchestrator.core.errors import UsageInvalid

_TEXT = """
    char chr ascii concat concat_ws format glob hex instr length char_length like likelihood
    likely lower ltrim octet_length position printf quote regexp_like regexp_match
    regexp_matches regexp_replace regexp_substr repeat replace reverse rtrim soundex split_part
    starts_with strpos string_agg string_to_array substr substring to_char to_number trim btrim
    typeof unicode unlikely upper left right lpad rpad initcap translate
"""
_NUMBERS = """
    abs acos asin atan atan2 avg cbrt ceil ceiling corr cos cosh count covar_pop covar_samp
    degrees div exp floor greatest least ln log log10 log2 max median min mod percentile_cont
    percentile_disc mode pi pow power radians random regr_slope regr_intercept regr_r2 round
    sign sin sinh sqrt stddev stddev_pop stddev_samp sum tan tanh total trunc var_pop var_samp
    variance width_bucket bool_and bool_or every
"""
_WINDOWS = """
    cume_dist dense_rank first_value lag last_value lead nth_value ntile percent_rank rank
    row_number
"""
_TIMES = """
    age clock_timestamp date date_part date_trunc datetime extract julianday make_interval now
    strftime time to_timestamp timediff unixepoch timestamp
"""
_JSON = """
    json json_array json_array_length json_each json_extract json_group_array json_group_object
    json_object json_tree json_type json_valid json_quote jsonb_array_elements
    jsonb_array_elements_text jsonb_array_length jsonb_each jsonb_each_text jsonb_extract_path
    jsonb_extract_path_text jsonb_object_keys jsonb_typeof json_build_object jsonb_build_object
    json_agg jsonb_agg to_json to_jsonb row_to_json -> ->>
"""
_OTHERS = """
    cast changes coalesce collate generate_series group_concat ifnull iif nullif array_agg
    array_length array_to_string unnest cardinality exists row sqlite_version pg_typeof
    pg_size_pretty version array
"""
ALLOWED_FUNCTIONS = frozenset(" ".join((_TEXT, _NUMBERS, _WINDOWS, _TIMES, _JSON, _OTHERS)).split())

# Words after which a parenthesis opens no call, and types with a size.
_BEFORE_PARENTHESES = """
    all and any as between by case cross distinct else except exists filter from full group
    having ilike in inner intersect interval is isnull join lateral left like limit not notnull
    offset on or order outer over partition right select similar some then to union using values
    when where with within materialized varchar numeric decimal char character varying bit float
    time timestamp precision sets cube rollup window analyze verbose explain nulls end
"""
_NO_CALL = frozenset(_BEFORE_PARENTHESES.split())
_BEGINNINGS = frozenset({"select", "with", "values", "table", "explain", "show"})
_PG_NAMES = frozenset({"pg_typeof", "pg_size_pretty"})
_MAX_NAME_BYTES = 63

# The known tokens; anything else is refused. If PostgreSQL could read a character in another way,
# what looks like a text to us could hide a call. PostgreSQL's own rules are in its scan.l.
_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\n\r\f]+)
  | (?P<comment>--[^\n\r]*|/\*(?:[^*/]|\*(?!/)|/(?!\*))*\*/)
  | (?P<text>(?:[bBxXnN]?'(?:[^']|'')*'|[eE]'(?:[^'\\]|\\[\\ntr]|'')*')(?!'))
  | (?P<quoted>"(?:[^"]|"")+"(?!"))
  | (?P<word>(?![uU]&['"])[A-Za-z_][A-Za-z0-9_]*(?![A-Za-z0-9_$'"]|[^\x00-\x7f]))
  | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?
      (?![A-Za-z0-9_$'".]|[^\x00-\x7f]))
  | (?P<other>[][(),;:.+\-*/<>=~!@\#%^&|?](?<!/(?=\*)))
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamesInStatement:
    """The names in a statement, without the functions that may be called."""

    all: frozenset[str]
    # Before a parenthesis that opens no call: in `a LIKE (b)`, and not in `like(a, b)`.
    before_parenthesis: frozenset[str]


def refuse_beyond_reading(sql: str) -> NamesInStatement:
    """Return the names in a PostgreSQL statement.

    Raises UsageInvalid if it does not begin like a query, calls an unknown function, names a part
    of the server, or has a character that two lexers could read in two ways.
    """
    tokens = list(_tokens(sql))
    if not tokens or tokens[0] not in {*_BEGINNINGS, "("}:
        raise UsageInvalid(
            "only reading is possible here: a statement begins with "
            f"{', '.join(sorted(_BEGINNINGS))}"
        )
    names, before_parenthesis = set(), set()
    before = ""
    for word, after in zip(tokens, [*tokens[1:], ""], strict=True):
        is_name = word[0] == '"' or word[0] == "_" or word[0].isalpha()
        name = word[1:-1].replace('""', '"') if word[0] == '"' else word
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise UsageInvalid(
                f"name {_shown(name)} is longer than {_MAX_NAME_BYTES} bytes; "
                "PostgreSQL would cut it"
            )
        if name.lower().startswith("pg_") and name not in _PG_NAMES:
            raise UsageInvalid(
                f"{_shown(name)} is about the server, not about sweeps; it cannot be read here"
            )
        # `with name (columns)` and `as name (columns)` name columns; they call nothing.
        is_call = (
            is_name
            and after == "("
            and before not in ("with", "recursive", "as")
            and (word[0] == '"' or name not in _NO_CALL)
        )
        if is_call and name not in ALLOWED_FUNCTIONS:
            hint = did_you_mean(name, ALLOWED_FUNCTIONS)
            raise UsageInvalid(f"function {_shown(name)} cannot be called here{hint}")
        if is_call and before == ".":
            raise UsageInvalid(
                f"function {_shown(name)} is called with the name of its schema; leave that out"
            )
        if is_name and name not in ALLOWED_FUNCTIONS:
            names.add(name)
            if after == "(":
                before_parenthesis.add(name)
        before = word
    return NamesInStatement(all=frozenset(names), before_parenthesis=frozenset(before_parenthesis))


def refuse_loose_ends(condition: str) -> None:
    """Raise UsageInvalid for a condition that could leave the parentheses around it.

    A comment is refused: PostgreSQL nests them and SQLite does not.
    """
    depth = 0
    for word in _tokens(condition, with_comments=False):
        depth += {"(": 1, ")": -1}.get(word, 0)
        if depth < 0 or word == ";":
            break
    else:
        if depth == 0 and condition.strip():
            return
    raise UsageInvalid(
        f"{condition!r} is not one condition: its parentheses do not match, "
        "or it holds more than one statement"
    )


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name; empty if no name is close."""
    close = get_close_matches(name.lower(), sorted(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _tokens(sql: str, *, with_comments: bool = True) -> Iterator[str]:
    """Yield words in lower case, quoted names and punctuation; no text, number or comment."""
    place, is_after_text = 0, False
    while place < len(sql):
        match = _TOKEN.match(sql, place)
        if match is None:
            raise UsageInvalid(_unreadable(sql[place:]))
        place, kind = match.end(), match.lastgroup
        if kind == "comment" and not with_comments:
            raise UsageInvalid(
                f"a condition holds no comment; leave out what begins with {match[0][:2]}"
            )
        if kind in ("space", "comment"):
            continue
        # PostgreSQL continues a text after a line break, by the rules of the first part.
        if kind == "text" and is_after_text:
            raise UsageInvalid(
                f"two texts follow one another; join them with ||, before {_shown(match[0])}"
            )
        is_after_text = kind == "text"
        if kind == "word":
            yield match[0].lower()
        elif kind in ("quoted", "other"):
            yield match[0]


def _unreadable(rest: str) -> str:
    """The reason why no token begins here, and what to write instead."""
    for begins, reason in _UNREADABLE:
        if re.match(begins, rest):
            return reason
    if not rest[0].isascii() or not rest[0].isprintable():
        return (
            f"{rest[0]!a} is outside of texts and quoted names; "
            "write texts as '...' and names as \"...\""
        )
    return f'{_shown(rest)} cannot be read here; write names as letters, digits and _, or as "..."'


_UNREADABLE = (
    (r"/\*", "a comment does not end, or another begins within it"),
    (r"[uU]&['\"]", "names and texts with Unicode escapes (U&) cannot be used here"),
    (
        r"[eE]'",
        "a text E'...' does not end, or has an escape other than \\n, \\t, \\r and \\\\; use chr()",
    ),
    (r"[bBxXnN]?'", "a text does not end; within '...' an apostrophe is written twice"),
    (r'"', 'a name in "..." does not end, or is empty'),
    (r"\$", "$ cannot stand outside of texts; write texts as '...'"),
    (r"[0-9.]", "a number is followed by a letter, digit or quote; write a space between them"),
    (r"[A-Za-z_][A-Za-z0-9_]*\$", '$ cannot be part of a name; write the name as "..."'),
    (r"[A-Za-z_][A-Za-z0-9_]*['\"]", "a quote follows a name at once; write a space between them"),
    (
        r"[A-Za-z_][A-Za-z0-9_]*[^\x00-\x7f]",
        'a name holds a letter beyond ASCII; write it as "..."',
    ),
)


def _shown(text: str) -> str:
    """The beginning of a text for a message of one line."""
    line = text if text.isprintable() and len(text) <= 40 else ascii(text[:40])[1:-1]
    return line if len(text) <= 40 else f"{line}..."
