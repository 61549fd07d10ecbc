"""`sweep run` mirrors what it measures and is not hurt by it; `sweep mirror` does what is left."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from orchestrator.cli.mirror import targets as mirror_targets
from orchestrator.cli.mirror.process import POLL_SECONDS
from orchestrator.cli.mirror.targets import alone, mirror_secrets, missing_packages
from orchestrator.cli.mirror.worker import MirrorWorker
from orchestrator.cli.run.checks import rank_environment
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.sweepfile.mirror_section import MirrorSection
from orchestrator.core.sweepfile.spec import SweepSpec
from tests import measured_table
from tests.acceptance.command import CommandHere
from tests.db.builders import Bench

needs_mlflow = pytest.mark.skipif(
    find_spec("mlflow") is None, reason="MLflow is not installed: pip install -e '.[mlflow]'"
)
# Nobody listens there.
ADDRESS = "http://me:verysecret@127.0.0.1:9"


def replayed(command: CommandHere, tmp_path: Path, *more: str) -> Sequence[str | Path]:
    """A command that measures a table of 19 runs, without Ray."""
    file = tmp_path / "runs.csv"
    file.write_text(measured_table.text())
    table = measured_table.MODEL["table_id"]
    return ("replay", file, "--table", table, "search.strategy=exhaustive", *more)


def stored(command: CommandHere) -> set[str]:
    """The trials in MLflow, each with its state."""
    from mlflow.tracking import MlflowClient

    client: Any = MlflowClient(tracking_uri=f"sqlite:///{command.folder}/mlruns/mlflow.db")
    ids = [one.experiment_id for one in client.search_experiments() if one.name != "Default"]
    found = client.search_runs(ids)
    trials = {f"{run.data.tags['trial_id']} {run.data.tags['state']}" for run in found}
    assert len(trials) == len(found)
    return trials


@needs_mlflow
def test_each_trial_that_ended_is_a_run_once(command: CommandHere, tmp_path: Path) -> None:
    done = command.ok(*replayed(command, tmp_path, "mirror.mlflow=mlruns"))
    assert "mirror" not in done.stderr.lower()
    ended = command.sql("SELECT trial_id, state FROM v_trial WHERE num_attempts > 0")
    trials = {f"{trial_id} {state}" for trial_id, state in ended}
    assert len(trials) > 15 and stored(command) == trials
    said = command.json("mirror")["trackers"]
    assert said == [{"tracker": "mlflow", "written": 0, "left": 0, "why": None}]
    # A trial that waits again keeps its run until it has ended.
    command.ok("retry", ended[0][0])
    command.ok(*replayed(command, tmp_path, "mirror.mlflow=mlruns"))
    assert stored(command) == trials


@needs_mlflow
def test_a_server_that_does_not_answer_hurts_no_sweep(
    command: CommandHere,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command.environment["TRACKER"] = ADDRESS
    monkeypatch.setattr("orchestrator.cli.mirror.worker.END_SECONDS", 5.0)
    done = command.ok(*replayed(command, tmp_path, "mirror.mlflow=${TRACKER}"))
    assert "Winner" in done.stdout or "tied" in done.stdout or "ahead" in done.stdout
    ended = command.sql("SELECT count(*) FROM v_trial WHERE num_attempts > 0")[0][0]
    lines = [line for line in done.stderr.splitlines() if "Not mirrored" in line]
    assert len(lines) == 1 and f"mlflow: {ended} trials" in lines[0]
    assert "sweep mirror" in lines[0]
    later = command.run("mirror")
    assert later.returncode == 75 and f"{ended} left" in later.stdout
    shown = command.ok("export", "json").stdout + command.ok("status", "--json").stdout
    for text in (done.stdout, done.stderr, later.stdout, later.stderr, shown):
        assert "verysecret" not in text and ADDRESS not in text
    # And what was left comes once somebody answers.
    assert command.json("mirror", "--mlflow", "mlruns")["trackers"][0]["written"] == ended
    assert len(stored(command)) == ended


def test_a_package_that_is_missing_is_said_and_the_sweep_runs(
    command: CommandHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_targets, "find_spec", lambda name: None)
    done = command.ok(*replayed(command, tmp_path, "mirror.wandb=runs"))
    assert "mirror.wandb needs wandb, which is not installed: pip install" in done.stderr
    assert "afterwards: sweep mirror" in done.stderr
    later = command.run("mirror")
    assert later.returncode == 2 and "pip install '.[wandb]' in the cloned folder" in later.stderr


def test_a_variable_that_is_not_set_is_a_mistake_before_the_sweep(
    command: CommandHere, tmp_path: Path
) -> None:
    done = command.run(*replayed(command, tmp_path, "mirror.mlflow=${TRACKER}"))
    assert done.returncode == 2 and "export TRACKER" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "has no section mirror: add --mlflow WHERE or --wandb FOLDER"),
        (("--mlflow", ADDRESS), "mlflow: an address may hold a password"),
        (("--wandb", "${X}"), "wandb: runs of W&B are written offline"),
    ],
)
def test_a_mistake_of_the_command_is_named(
    command: CommandHere, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    command.ok(*replayed(command, tmp_path, "search.max_trials=1"))
    done = command.run("mirror", *options)
    assert done.returncode == 2 and said in done.stderr and "verysecret" not in done.stderr


def test_only_one_process_mirrors_a_sweep(command: CommandHere, tmp_path: Path) -> None:
    command.ok(*replayed(command, tmp_path, "search.max_trials=1"))
    with Store.open(command.store_url) as store:
        (row,) = store.sweeps()
    command.environment["SWEEP_HOME"] = str(tmp_path / "home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWEEP_HOME", str(tmp_path / "home"))
        with alone(row) as first, alone(row) as second:
            assert first and not second


def test_the_process_that_mirrors_ends_if_it_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Any program in its place: it tells a warning, nothing else, and does not end."""
    program = "import json, time; print(json.dumps({'warning': 'x'}), flush=True); time.sleep(600)"
    monkeypatch.setattr(
        "orchestrator.cli.mirror.worker.start.command",
        lambda *_: [sys.executable, "-c", program],
    )
    for name in ("END_SECONDS", "DEADLINE_SECONDS", "KILL_SECONDS"):
        monkeypatch.setattr(f"orchestrator.cli.mirror.worker.{name}", 0.5)
    monkeypatch.setattr("orchestrator.cli.mirror.worker.missing_packages", lambda _: [])
    said: list[str] = []
    with (
        caplog.at_level(logging.WARNING),
        MirrorWorker(MirrorSection(wandb="x"), "t", f"sqlite:///{tmp_path}/s", said.append) as it,
    ):
        process = it._process
    assert process is not None and process.returncode is not None
    assert said == ["It is not known whether all trials were mirrored. Later: sweep mirror t"]
    assert [record.getMessage() for record in caplog.records] == ["x"]


def test_ranks_do_not_get_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKER", ADDRESS)
    monkeypatch.setenv("OTHER", "1")
    options = {"argv": ["./train.sh"], "pass_env": ["TRACKER", "OTHER"]}
    spec = SweepSpec.model_validate(
        {
            "name": "t", "model": "llama-tiny", "gpus": 2, "sequence_length": 64,
            "global_batch_size": 8, "workload": {"name": "command", "options": options},
            "mirror": {"mlflow": "${TRACKER}"},
        }
    )  # fmt: skip
    assert rank_environment(spec) == {"OTHER": "1"}
    assert mirror_secrets(spec.mirror) == {"TRACKER": ADDRESS}
    assert "verysecret" not in spec.model_dump_json()
    monkeypatch.delenv("TRACKER")
    with pytest.raises(UsageInvalid, match="TRACKER"):
        mirror_secrets(spec.mirror)
    assert json.loads(spec.model_dump_json())["mirror"]["mlflow"] == "${TRACKER}"
    assert missing_packages(MirrorSection(mlflow="x")) == [] or find_spec("mlflow") is None


@needs_mlflow
def test_a_tracker_that_fails_during_a_sweep_warns_once(
    sqlite_store: Store,
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    bench = Bench.on(sqlite_store)
    bench.measure(1)
    monkeypatch.setenv("TRACKER", ADDRESS)
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    said: list[str] = []

    def warned() -> bool:
        return any("mirror.mlflow does not work" in one.getMessage() for one in caplog.records)

    section = MirrorSection(mlflow="${TRACKER}")
    with (
        caplog.at_level(logging.WARNING),
        MirrorWorker(section, "tiny", sqlite_url, said.append) as worker,
    ):
        process = worker._process
        assert process is not None
        deadline = time.monotonic() + 100.0
        while not warned() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert warned() and process.poll() is None
        # What comes meanwhile is tried as well, and nothing more is said of it.
        bench.measure(2)
        time.sleep(POLL_SECONDS + 1.0)
    assert len(caplog.records) == 1 and "verysecret" not in caplog.text
    assert len(said) == 1 and said[0].startswith("Not mirrored to mlflow: 2 trials (")
    assert "verysecret" not in said[0]
