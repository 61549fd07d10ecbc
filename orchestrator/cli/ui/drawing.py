"""The program that draws the report of a sweep for `sweep ui`: a process of its own.

Thousands of trials with their attempts and events take more memory than a server should keep.
"""

from __future__ import annotations

import sys
from pathlib import Path

from orchestrator.cli.store.defaults import existing_store
from orchestrator.core.errors import SweepError


def main() -> int:
    """Draw the sweep of the first argument into the folder of the second."""
    from orchestrator.report.pages.report_folder import write_report
    from orchestrator.report.sweep_rows import read_rows

    _, name, folder = sys.argv
    try:
        with existing_store(None) as store:
            rows = read_rows(store, store.sweep_named(name))
        write_report([rows], Path(folder), live_page="../")
    except SweepError as exc:
        print(exc)  # noqa: T201  # the server reads it
        return exc.exit_code
    return 0
