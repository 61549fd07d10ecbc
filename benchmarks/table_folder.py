"""Reads the tables of measured runs in a folder of CSV files.

A file that is not such a table is skipped, and named with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from orchestrator.core.pretend.run_table import MeasuredRun, TableInvalid, parse_runs, tables


def read_tables(
    folder: Path, patterns: Sequence[str] | None = None
) -> Iterator[tuple[str, list[list[MeasuredRun]]]]:
    """Each table's id and its runs by cell, in the order of the files' names.

    `patterns`: of the ids to read, all without it; one that no table has is named. Ends the program
    if there is no such folder.
    """
    if not folder.is_dir():
        sys.exit(f"there is no folder {folder}")
    unknown = dict.fromkeys(patterns or ())
    for path in sorted(folder.glob("*.csv")):
        try:
            found = tables(parse_runs(path.read_text(encoding="utf-8")))
        except (TableInvalid, UnicodeDecodeError, OSError) as exc:
            print(f"skipped {path.name}: {exc}", file=sys.stderr)
            continue
        for table_id, cells in found.items():
            matching = [one for one in patterns or () if fnmatch(table_id, one)]
            if matching or patterns is None:
                yield table_id, cells
            for one in matching:
                unknown.pop(one, None)
    for one in unknown:
        print(f"no table in {folder} is named {one}", file=sys.stderr)


def add_table_arguments(parser: argparse.ArgumentParser, *, names: str) -> None:
    """Add `--tables DIR`, and `--table A B`, which may be repeated; `names` describes A and B."""
    parser.add_argument(
        "--tables", type=Path, required=True, help="folder of CSV files, one row per measured run"
    )
    parser.add_argument(
        "--table",
        action="extend",
        nargs="+",
        metavar="ID",
        help=f"only {names}; may be repeated",
    )
