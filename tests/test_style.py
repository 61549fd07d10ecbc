"""Rules of names and comments that no linter has (CONTRIBUTING, Style)."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections import Counter
from enum import StrEnum
from functools import cache
from pathlib import Path

import pytest

from orchestrator.core.trial import failure_kinds, lifecycle, purpose
from orchestrator.sweep import cell_life, progress

ROOT = Path(__file__).parents[1]
PRODUCT = ("orchestrator", "db", "workloads", "layout_sweep")
CHECKED = (*PRODUCT, "benchmarks", "docs", "tests")
# HOUSE: SQL only in `db`.
WITHOUT_SQL = ("orchestrator", "workloads", "layout_sweep")
SQL = re.compile(
    r"^\s*(select\b.*\bfrom|insert\s+into|update\s+\w+\s+set|delete\s+from)\b"
    r"|(?-i:\bSELECT\b.*\bFROM\b)",
    re.IGNORECASE | re.DOTALL,
)
# The states and kinds of which sets have names, in the module of the enum.
ENUMS: dict[str, type[StrEnum]] = {
    "TrialState": lifecycle.TrialState,
    "TrialEvent": lifecycle.TrialEvent,
    "LogEvent": lifecycle.LogEvent,
    "FailureKind": failure_kinds.FailureKind,
    "_K": failure_kinds.FailureKind,
    "Purpose": purpose.Purpose,
    "CellState": cell_life.CellState,
    "StopReason": progress.StopReason,
}
RAY_START = "orchestrator/cli/ray_start.py"
MOST_WORDS = 6
# Words that begin a sentence without a subject.
SUBJECTLESS = ("Of ", "That ", "Whether ", "Who ", "What became")
LONGEST_LINE = 100
# What linters read, before the words of a comment.
MARKS = re.compile(
    r"^(noqa(: [A-Z]+\d+(, [A-Z]+\d+)*)?|type: ignore(\[[a-z, -]+\])?|fmt: \w+|pragma: [\w ]+)"
    r"[ #-]*"
)


def files(roots: tuple[str, ...]) -> list[Path]:
    return sorted(path for root in roots for path in (ROOT / root).rglob("*.py"))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


def files_with(roots: tuple[str, ...], pattern: str) -> list[Path]:
    """The files in which a pattern occurs. Only these are parsed: that takes 10 ms a file."""
    compiled = re.compile(pattern, re.DOTALL)
    return [path for path in files(roots) if compiled.search(text_of(path))]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def test_no_class_name_is_twice_in_the_product() -> None:
    # `Answer` and `_Answer` are the same word to a reader.
    names = Counter(
        name
        for path in files(PRODUCT)
        for name in re.findall(r"^ *class _*(\w+)[(:\[]", text_of(path), re.MULTILINE)
    )
    assert {name: num for name, num in names.items() if num > 1} == {}


def test_no_line_is_too_long() -> None:
    # The linter does not count what it reads itself at the end of a line.
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files((*CHECKED, "sweeps", "deploy"))
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if len(line) > LONGEST_LINE
    ]
    assert found == []


def test_a_long_comment_stands_above_its_line() -> None:
    possible = files_with(CHECKED, rf"[^\s#][^\n#]*#[# ]*(?:[^\s]+[ \t]+){{{MOST_WORDS}}}\S")
    assert [one for path in possible for one in long_comments(path)] == []


def long_comments(path: Path) -> list[str]:
    """The comments of more than MOST_WORDS words that follow code on its line."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text_of(path)).readline):
        text = token.string.lstrip("# ")
        if token.type != tokenize.COMMENT or not token.line[: token.start[1]].strip():
            continue
        if len(MARKS.sub("", text).split("  # ")[0].split()) > MOST_WORDS:
            found.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}")
    return found


def test_comments_and_docstrings_begin_with_what_they_are_about() -> None:
    begins = "|".join(SUBJECTLESS)
    possible = files_with((*CHECKED, "sweeps", "deploy"), rf"(?:#[# ]*|[\"']\s*)(?:{begins})")
    assert [one for path in possible for one in subjectless(path)] == []


def subjectless(path: Path) -> list[str]:
    """The comments and docstrings that begin with a word of SUBJECTLESS."""
    tokens = tokenize.generate_tokens(io.StringIO(text_of(path)).readline)
    begins = [
        (token.start[0], token.string.lstrip("# "))
        for token in tokens
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if (docstring := ast.get_docstring(node)) is not None:
                    begins.append((node.body[0].lineno, docstring))
    return [
        f"{path.relative_to(ROOT)}:{line}: {begin[:60]}"
        for line, begin in begins
        if begin.startswith(SUBJECTLESS)
    ]


def test_sql_is_written_in_db_only() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files_with(
            WITHOUT_SQL,
            r"(?i:select\b.*\bfrom|insert\s+into|update\s+\w+\s+set|delete\s+from)",
        )
        for line, text in sql_texts(tree_of(path))
    ]
    assert found == []


def sql_texts(tree: ast.Module) -> list[tuple[int, str]]:
    """The strings that are, or begin as, a statement; values within an f-string read `?`."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr():
                text = "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "?"
                    for part in node.values
                )
            case ast.Constant(value=str() as text):
                pass
            case _:
                continue
        if SQL.search(text):
            found.append((node.lineno, text))
    return found


@pytest.mark.parametrize(
    ("code", "num"),
    [
        ('ask("SELECT name FROM sweep")', 1),
        ('ask(f"  select * from {view}"\n" limit 0")', 1),
        ('ask("SELECT count(*)"\n" FROM trial")', 1),
        ('ask("delete from trial where id = 1")', 1),
        ('ask("update trial set state = 1")', 1),
        ('ask("insert into trial values (1)")', 1),
        ("note(\"more: sweep sql 'select * from v_best'\")", 0),
        ('"""One SELECT over the store, of a person."""', 0),
        ('"""Update the bar from time to time."""', 0),
    ],
)
def test_sql_is_found_in_a_text(code: str, num: int) -> None:
    assert len({line for line, _ in sql_texts(ast.parse(code))}) == num


def test_only_the_command_sql_asks_a_statement() -> None:
    # The others call a function of `db` with a name.
    asking = {
        str(path.relative_to(ROOT))
        for path in files_with(WITHOUT_SQL, "readonly")
        if "db.sql.readonly" in imports(path)
    }
    assert asking == {"orchestrator/cli/sql.py"}


def imports(path: Path) -> set[str]:
    """The modules that a file imports, and the names that it takes from them."""
    found = set()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str() as module, names=names):
                found |= {module, *(f"{module}.{alias.name}" for alias in names)}
    return found


def test_a_set_of_states_or_kinds_is_written_once() -> None:
    tables = {
        Path(inspect.getfile(module)): {
            frozenset(value)
            for value in vars(module).values()
            if isinstance(value, frozenset | tuple) and len(value) > 1
        }
        for module in (lifecycle, failure_kinds, purpose, cell_life, progress)
    }
    enums = "|".join(ENUMS)
    written = [
        (path, line, members)
        for path in files_with(PRODUCT, rf"\b(?:{enums})\.\w+,")
        for line, members in sets_of_members(tree_of(path))
    ]
    num = Counter(members for _, _, members in written)
    twice = {
        f"{path.relative_to(ROOT)}:{line}: {', '.join(sorted(members))}"
        for path, line, members in written
        if num[members] > 1
        or any(members in table for file, table in tables.items() if file != path)
    }
    assert twice == set()


def sets_of_members(tree: ast.Module) -> list[tuple[int, frozenset[str]]]:
    """The literals of several members of one of ENUMS, with their values."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Set | ast.Tuple | ast.List) and len(node.elts) > 1:
            owners = {
                one.value.id
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)
                else ""
                for one in node.elts
            }
            if len(owners) == 1 and (enum := ENUMS.get(owners.pop())) is not None:
                names = [one.attr for one in node.elts if isinstance(one, ast.Attribute)]
                found.append((node.lineno, frozenset(enum[name] for name in names)))
    return found


def test_commands_start_the_scheduler_on_ray_in_one_place() -> None:
    starting = {
        str(path.relative_to(ROOT))
        for path in files_with(("orchestrator",), "RayScheduler")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("RayScheduler")
    }
    assert {path for path in starting if path.startswith("orchestrator/cli/")} == {RAY_START}
