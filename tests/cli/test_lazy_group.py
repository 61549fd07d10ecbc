"""What the commands import that show a sweep: imports are most of the time that they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from db.store import Store
from tests.cli.forked_commands import ForkedCommands, forked_commands
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
    "orchestrator.cli.run.sweep_run",
    "orchestrator.cli.ui.command",
    "orchestrator.core.frameworks",
    "orchestrator.core.sweepfile.search_section",
    "ray",
    "scipy",
    "sqlalchemy.orm",
    "torch",
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = f"sqlite:///{tmp_path_factory.mktemp('lazy')}/once.sqlite"
    with Store.open(found) as store:
        Bench.on(store).measure()
    return found


@pytest.fixture(scope="module")
def commands() -> Iterator[ForkedCommands]:
    """What was imported before the first of them, none of them may need either."""
    with forked_commands() as found:
        yield found


@pytest.mark.parametrize(
    ("command", "needs", "says"),
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
    command: Sequence[str], needs: Sequence[str], says: str, commands: ForkedCommands, url: str
) -> None:
    done = commands.run([*command, "--db", url], {})
    never = {*NEVER, "numpy"} - {*needs}
    assert (done.exit_code, sorted(never & done.modules)) == (0, [])
    assert done.modules >= {"orchestrator.cli", "db.store_reads"}
    assert says in done.out
