"""The errors of another program's database, as Optuna raises them."""

from __future__ import annotations

import pytest

from db.connection.foreign_storage import errors_in_one_line
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.search.optuna_storage import export_study


@pytest.mark.parametrize(
    "url", ["nonsense", "nosuch://u:secret@host/db", "sqlite:////no/such/folder/optuna.db"]
)
def test_an_export_to_nowhere_is_one_clear_line_without_the_password(url: str) -> None:
    with (
        pytest.raises(UsageInvalid, match=r"Expected a URL such as sqlite:///x\.db") as refused,
        errors_in_one_line("study", example="sqlite:///x.db"),
    ):
        export_study(url, "cell", [], objectives=[Objective.STEP_SECONDS], attributes={})
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)
