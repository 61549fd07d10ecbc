"""What the commands import that show a sweep: imports are most of the time that they take."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from db.store import Store
from tests.db.builders import Bench

# No command that reads a store needs these: writes, migrations, other commands.
NEVER = (
    "alembic",
    "db.sql",
    "db.store",
    "db.write",
    "matplotlib",
    "optuna",
    "orchestrator.cli.export.command",
    "orchestrator.cli.run.command",
    "orchestrator.cli.ui.command",
    "orchestrator.core.frameworks",
    "orchestrator.core.sweepfile.search_section",
    "ray",
    "scipy",
    "sqlalchemy.orm",
    "torch",
)
Imported = Callable[[Sequence[str]], tuple[str, int, list[str]]]
# Each command is a fork: what was imported before the first of them, no command may need either.
PROGRAM = """
import json, os, sys

import db.store_reads, rich.console, rich.table
from orchestrator.cli import main

url, never = json.loads(sys.argv[1])
for arguments in map(json.loads, sys.stdin):
    if os.fork() == 0:
        code = main([*arguments, "--db", url])
        print("OUT " + json.dumps([code, sorted({*never} & {*sys.modules})]), flush=True)
        os._exit(0)
    os.wait()
    print("END", flush=True)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Imported]:
    """Run a command in a fork of a new process.

    Returns what it shows, its code, and which of NEVER and numpy it imported.
    """
    url = f"sqlite:///{tmp_path_factory.mktemp('lazy')}/once.sqlite"
    with Store.open(url) as store:
        Bench.on(store).measure()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps([url, [*NEVER, "numpy"]])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def run(command: Sequence[str]) -> tuple[str, int, list[str]]:
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps(command), file=process.stdin, flush=True)
            said = ""
            while (line := process.stdout.readline()) != "END\n":
                assert line, f"the process ended: {said}"
                said += line
            shown, _, found = said.rpartition("OUT ")
            return shown, *json.loads(found)

        yield run


@pytest.mark.parametrize(
    ("command", "others", "says"),
    [
        (["best"], ["numpy"], "tokens/s/GPU"),
        # The import of numpy takes as long as all else that it does. No repeat tells of no drift.
        (["status"], [], "1 trial in 1 cell"),
        (["list"], [], "tiny"),
        (["trials"], [], "measured"),
        (["show", "1"], [], "measured"),
    ],
)
def test_a_command_that_shows_a_sweep_imports_nothing_that_it_does_not_need(
    command: Sequence[str], others: Sequence[str], says: str, imported: Imported
) -> None:
    shown, code, found = imported(command)
    assert (code, sorted({*found} - {*others})) == (0, [])
    assert says in shown
