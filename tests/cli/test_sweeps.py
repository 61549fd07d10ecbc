"""The commands about whole sweeps: list, rename, rm."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest

from db.store import Store
from db.types import SweepState
from orchestrator import cli
from orchestrator.cli import sweeps
from orchestrator.cli.store import sweep_folders
from orchestrator.cli.store.home import run_root
from tests.cli.cli_store import fill
from tests.cli.conftest import Sweep
from tests.db.builders import CONDITIONS, Bench


def log_of(store: Store, name: str) -> Path:
    """A log in the run folder of a sweep on this machine."""
    folder = run_root(store.sweep_named(name).run_folder) / "trial-1" / "attempt-1" / "node-0"
    folder.mkdir(parents=True)
    log = folder / "log-0.txt"
    log.write_text("x" * 1000)
    return log


def released(store: Store, name: str) -> Bench:
    """A sweep with two measured trials that nobody works on."""
    bench = Bench.on(store, name)
    bench.measure(1, 900.0)
    bench.measure(2, 1200.0)
    store.release(bench.sweep_id, bench.epoch, SweepState.FINISHED)
    return bench


def test_list_shows_each_sweep_in_a_line_the_newest_first(
    store: Store, sweep: Sweep, tmp_path: Path
) -> None:
    assert "holds no sweep yet" in sweep("list")[1]
    released(store, "first")
    log_of(store, "first")
    fill(store, tmp_path, "second")
    lines = sweep("list")[0].splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["second", "running"],
        ["first", "finished"],
    ]
    assert "1,200" in lines[2] and lines[2].endswith("1.0 KiB")
    found = json.loads(sweep("list", "--json")[0])["sweeps"]
    assert [(row["cells"], row["trials"], row["measured"]) for row in found] == [
        (2, 10, 3),
        (1, 2, 2),
    ]
    assert (found[0]["folder_bytes"], found[1]["folder_bytes"]) == (None, 1000)
    assert sweep("list", "--format", "csv")[0].startswith("sweep,state,cells,trials,measured,")


def test_a_renamed_sweep_keeps_its_results_and_logs(store: Store, sweep: Sweep) -> None:
    bench = released(store, "old")
    log = log_of(store, "old")
    out, _ = sweep("rename", "old", "new")
    assert "`name: new`" in out
    row = store.sweep_named("new")
    assert (row.id, row.state) == (bench.sweep_id, SweepState.FINISHED)
    # The stored path of the log, and the path by the new name.
    assert (
        log.read_text() == (run_root(row.run_folder) / log.relative_to(log.parents[3])).read_text()
    )
    assert json.loads(sweep("rename", "new", "old", "--json")[0])["sweep"] == "old"
    assert log.is_file()


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("other", "exists already"),
        ("Not a name", "is not 1 to 63 of"),
        ("../up", "is not 1 to 63 of"),
        ("mine-simulated", "ends like the name of a simulation"),
    ],
)
def test_a_name_that_cannot_be_taken_is_refused_with_the_rule(
    store: Store, sweep: Sweep, new: str, message: str
) -> None:
    for name in ("mine", "other"):
        released(store, name)
    assert message in sweep("rename", "mine", new, code=2)[1]
    assert {row.name for row in store.sweeps()} == {"mine", "other"}


def test_a_simulated_sweep_keeps_saying_so(store: Store, sweep: Sweep) -> None:
    store.ensure_sweep("made-simulated", "{}", {"workload": "synthetic"})
    _, err = sweep("rename", "made-simulated", "real", code=2)
    assert "real-simulated" in err
    sweep("rename", "made-simulated", "real-simulated")


def test_a_running_sweep_is_neither_renamed_nor_removed(store: Store, sweep: Sweep) -> None:
    Bench.on(store, "mine").measure()
    for arguments in (("rename", "mine", "yours"), ("rm", "mine"), ("rm", "mine", "--yes")):
        assert "held by host" in sweep(*arguments, code=5)[1]
    assert [row.name for row in store.sweeps()] == ["mine"]
    assert not any((run_root("") / sweep_folders.NOTES).iterdir())


def test_rm_asks_says_what_rests_on_it_and_removes_rows_and_files(
    store: Store, sweep: Sweep
) -> None:
    bench = released(store, "mine")
    released(store, "other")
    log = log_of(store, "mine")
    kept = log_of(store, "other")
    _, err = sweep("rm", "mine", code=2)
    assert "2 trials in 1 cell" in err and "add --yes" in err
    assert "2 measured trials, and 0 that ran out of memory, also calibrate" in err
    assert "predictions of other" in err
    assert log.is_file() and store.sweep_named("mine").id == bench.sweep_id
    out, err = sweep("rm", "mine", "--yes")
    assert "Sweep mine is removed" in out
    # The trials ran on nodes of other names.
    assert "on node-a, node-b its files stay" in err
    assert [row.name for row in store.sweeps()] == ["other"]
    assert not log.parents[3].exists() and kept.is_file()
    assert "no sweep is named 'mine'" in sweep("rm", "mine", "--yes", code=2)[1]


def test_rm_asks_also_while_the_lease_of_a_dead_orchestrator_lasts(
    store: Store, sweep: Sweep
) -> None:
    sweep_id = store.ensure_sweep("mine", "{}", CONDITIONS)
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    store.acquire(sweep_id, host=socket.gethostname(), pid=dead.pid)
    assert store.sweep_named("mine").holder is not None
    assert "add --yes" in sweep("rm", "mine", code=2)[1]
    assert store.sweep_named("mine").id == sweep_id
    sweep("rm", "mine", "--yes")
    assert not store.sweeps()


def test_rm_of_a_renamed_sweep_removes_the_folder_and_its_other_names(
    store: Store, sweep: Sweep
) -> None:
    released(store, "old")
    log_of(store, "old")
    sweep("rename", "old", "new")
    sweep("rm", "new", "--yes")
    assert [path.name for path in run_root("").iterdir()] == [sweep_folders.NOTES]


class _Killed(BaseException):
    """Raised in place of a sudden end of the process."""


def killed(*_: object, **__: object) -> None:
    raise _Killed


def test_a_removal_that_was_killed_before_the_commit_has_removed_nothing(
    store: Store, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    released(store, "mine")
    log = log_of(store, "mine")
    with monkeypatch.context() as patched:
        patched.setattr(Store, "remove", killed)
        patched.setattr(sweeps, "finish_removal", killed)
        with pytest.raises(_Killed):
            cli.main(["rm", "mine", "--yes"])
    released(store, "other")
    sweep("rm", "other", "--yes")
    assert log.is_file()
    assert "1,200" in sweep("best", "mine")[0]
    sweep("rm", "mine", "--yes")
    assert not log.parents[3].exists()


def test_a_removal_that_was_killed_after_the_commit_is_finished_by_the_next(
    store: Store, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    released(store, "mine")
    log = log_of(store, "mine")
    with monkeypatch.context() as patched:
        patched.setattr(sweeps, "finish_removal", killed)
        with pytest.raises(_Killed):
            cli.main(["rm", "mine", "--yes"])
    assert log.is_file() and not store.sweeps()
    assert "Sweep mine is removed" in sweep("rm", "mine", "--yes")[0]
    assert not log.parents[3].exists()
    assert not any((run_root("") / sweep_folders.NOTES).iterdir())


def test_a_note_whose_name_is_a_pattern_removes_no_other_sweep(store: Store, sweep: Sweep) -> None:
    released(store, "mine")
    released(store, "kept")
    log = log_of(store, "kept")
    removal = sweep_folders.Removal(name="gone", run_token="*", store=str(store.path))
    sweep_folders.note_removal(removal)
    sweep("rm", "mine", "--yes")
    assert log.is_file()
    assert not any((run_root("") / sweep_folders.NOTES).iterdir())


def test_a_folder_that_cannot_be_written_stops_a_removal_before_it_begins(
    store: Store, sweep: Sweep
) -> None:
    released(store, "mine")
    log_of(store, "mine")
    (run_root("") / sweep_folders.NOTES).write_text("a file in the way")
    assert "cannot be written" in sweep("rm", "mine", "--yes", code=2)[1]
    assert store.sweep_named("mine")
