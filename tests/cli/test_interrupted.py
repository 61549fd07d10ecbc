"""Trials that were under way when their orchestrator died, before the next call takes them up."""

from __future__ import annotations

import socket
import subprocess

from db.store import Store
from orchestrator.cli.top.dialogs import detail_text
from orchestrator.report.notebook import open_store
from orchestrator.report.pages.trial_document import document
from tests.cli.conftest import Sweep
from tests.db.builders import Bench


def test_all_views_say_that_nobody_works_on_a_trial_whose_orchestrator_died(
    store: Store, sweep: Sweep
) -> None:
    bench = Bench.on(store)
    trial_id, _ = bench.start(1)
    for command in ("status", "trials", "show"):
        assert "interrupted" not in sweep(command, *([str(trial_id)] * (command == "show")))[0]
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    store.acquire(bench.sweep_id, host=socket.gethostname(), pid=dead.pid, takeover=True)
    status, trials = sweep("status")[0], sweep("trials")[0]
    shown = sweep("show", str(trial_id))[0].splitlines()
    assert f"(pid {dead.pid}) is dead; the same `sweep run` continues it" in status
    assert "interrupted" in status
    said = "under way when its orchestrator ended; the same `sweep run` starts it again"
    assert "interrupted: " + said in trials and "running" not in trials
    assert shown[0].endswith("(interrupted)")
    assert ["interrupted", said] in [line.split(maxsplit=1) for line in shown]
    trial = open_store(store.url).sweep().trial(trial_id)
    assert "(interrupted)" in repr(trial)
    page = document(trial.files, trial.detail, is_worked_on=trial.is_worked_on)
    assert page["title"].endswith("(interrupted)")
    top = str(detail_text(trial.detail, is_worked_on=trial.is_worked_on))
    assert top.splitlines()[0].startswith(page["title"])
    # A call that ended with an error has given the sweep back.
    store.release(bench.sweep_id, bench.epoch + 1)
    assert "interrupted" in sweep("trials")[0] and "interrupted" in sweep("status")[0]
