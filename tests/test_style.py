"""Rules of names and comments that no linter has (CONTRIBUTING, Style)."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("orchestrator", "db", "workloads", "layout_sweep")
CHECKED = (*PRODUCT, "benchmarks", "docs", "tests")
MOST_WORDS = 6
# What linters read.
MARKS = ("noqa", "type:", "fmt:", "pragma")


def files(roots: tuple[str, ...]) -> list[Path]:
    return sorted(path for root in roots for path in (ROOT / root).rglob("*.py"))


def test_no_class_name_is_twice_in_the_product() -> None:
    names = Counter(
        node.name
        for path in files(PRODUCT)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name: num for name, num in names.items() if num > 1} == {}


def test_a_long_comment_stands_above_its_line() -> None:
    assert [one for path in files(CHECKED) for one in long_comments(path)] == []


def long_comments(path: Path) -> list[str]:
    """The comments of more than MOST_WORDS words that follow code on its line."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        text = token.string.lstrip("# ")
        if token.type != tokenize.COMMENT or not token.line[: token.start[1]].strip():
            continue
        if not text.startswith(MARKS) and len(text.split("  # ")[0].split()) > MOST_WORDS:
            found.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}")
    return found
