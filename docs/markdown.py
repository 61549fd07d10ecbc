"""Tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


def markdown_table(titles: str, rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; `titles` are separated by " | "."""
    columns = titles.split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell_text, line))} |" for line in lines)


def words_table(title: str, words: Mapping[str, str]) -> str:
    """A Markdown table of words, each with its meaning."""
    return markdown_table(
        f"{title} | meaning", [(f"`{name}`", means) for name, means in words.items()]
    )


def _cell_text(cell: object) -> str:
    """One line, without the bar that ends a cell."""
    return re.sub(r"\s*\n\s*", " ", str(cell)).replace("|", "&#124;")
