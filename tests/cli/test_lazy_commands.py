"""What the commands import that show a sweep: imports are most of the time that they take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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


@pytest.mark.parametrize(
    ("command", "others"),
    [
        (["best"], []),
        (["status"], ["numpy"]),
        (["list"], ["numpy"]),
        (["trials"], ["numpy"]),
        (["show", "1"], ["numpy"]),
    ],
)
def test_a_command_that_shows_a_sweep_imports_nothing_that_it_does_not_need(
    command: Sequence[str], others: Sequence[str], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/once.sqlite"
    with Store.open(url) as store:
        Bench.on(store).measure()
    program = (
        "import sys; from orchestrator.cli import main;"
        f"code = main({[*command, '--db', url]!r});"
        f"print(code, sorted({{*{[*NEVER, *others]!r}}} & {{*sys.modules}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
