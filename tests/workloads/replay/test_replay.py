"""The rank that replays: through the real launcher, it returns what a row says or dies of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.pretend.replay import read_table
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.failures import proves_out_of_memory
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.node.launcher import NodeLauncher
from tests import measured_table
from tests.node.launching import order

START = "dp4_tp2_pp1_cp1"


def order_of(csv_file: Path, key: str, trial_id: int) -> LaunchOrder:
    spec = read_table(csv_file.read_text(), "formula-8gpu")
    asked = order("workloads.replay", world_size=1, trial_id=trial_id)
    options = {"table": str(csv_file), "table_id": "formula-8gpu", "layout": key}
    (model,) = spec.models.values()
    request = asked.request.model_copy(
        update={"options": options, "model": model, "sequence_length": 4096, "layout": Layout()}
    )
    return replace(asked, request=request)


def test_a_launched_rank_replays_its_row(tmp_path: Path) -> None:
    csv_file = tmp_path / "table.csv"
    csv_file.write_text(measured_table.text())
    launcher = NodeLauncher(tmp_path / "runs", node="here")
    keys = {
        "ok": "dp8_tp1_pp1_cp1_mbs2_ga2_none_z1_bf16-attention_kernel=flash",
        "oom": f"{START}_mbs8_ga1_none_z1_bf16-attention_kernel=eager",
        "error": f"{START}_mbs2_ga4_none_z1_bf16-attention_kernel=flash",
        "absent": f"{START}_mbs1_ga8_full_z1_bf16-attention_kernel=eager",
    }
    try:
        reports = {
            what: launcher.run(order_of(csv_file, key, number))
            for number, (what, key) in enumerate(keys.items(), 1)
        }
    finally:
        launcher.close()
    assert reports["ok"].failure is None, reports["ok"].failure
    result = reports["ok"].ranks[0].result
    assert result is not None
    assert result.step_seconds == [pytest.approx(4.4)]
    oom, error, absent = (reports[what].failure for what in ("oom", "error", "absent"))
    assert oom is not None and oom.kind is FailureKind.OOM_GPU and proves_out_of_memory(oom)
    assert (
        error is not None
        and error.kind is FailureKind.USER_ERROR
        and "line 13 of table formula-8gpu" in error.message
    )
    assert (
        absent is not None
        and absent.kind is FailureKind.CONFIG_REJECTED
        and "has no run of" in absent.message
    )
