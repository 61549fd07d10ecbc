"""Mistakes of users: each gets one clear line, the right exit code, and no traceback."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.node.processes import descendants
from tests.acceptance.command import Command, measured, write_sweep

pytestmark = pytest.mark.acceptance


def said(command: Command, *arguments: str | Path, code: int, **options: object) -> str:
    done = command.run(*arguments, **options)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_typo_is_named_with_its_line_and_what_was_meant(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        "name: s\nmodel: lama-tiny\ngpus: 2\nsequence_lenght: 64\nglobal_batch_size: 8\n"
    )
    text = said(command, "run", file, code=2)
    assert "s.yaml:2:8" in text
    assert "llama-tiny" in text
    assert "s.yaml:4:1" in text
    assert "sequence_length" in text


def test_a_file_that_is_not_there(command: Command) -> None:
    assert "no sweep file nothing.yaml" in said(command, "run", "nothing.yaml", code=2)


def test_an_override_that_names_no_key(command: Command, tmp_path: Path) -> None:
    assert "search.max_trails" in said(
        command, "run", write_sweep(tmp_path), "search.max_trails=3", code=2
    )


def test_a_gpu_sweep_on_a_machine_without_gpus(command: Command, tmp_path: Path) -> None:
    text = said(command, "run", write_sweep(tmp_path, device="h100-sxm"), code=2)
    assert "device: cpu" in text
    assert "--ray-address" in text


def test_more_gpus_than_the_machine_has(command: Command, tmp_path: Path) -> None:
    text = said(command, "run", write_sweep(tmp_path, gpus=64), code=2)
    assert "gpus: 64" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--wait-for-nodes", "5min"), "add --ray-address"),
        (
            ("--wait-for-nodes", "5min", "--ray-address", "auto"),
            "needs gpus_per_node in the sweep file",
        ),
        (
            ("--wait-for-nodes", "soon", "--ray-address", "auto", "gpus_per_node=1"),
            "'soon' is no duration",
        ),
    ],
)
def test_nodes_that_could_only_be_waited_for_in_vain(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert says in said(command, "run", write_sweep(tmp_path), *arguments, code=2)


def test_a_database_that_does_not_answer_keeps_its_password(
    command: Command, tmp_path: Path
) -> None:
    command.store_url = "postgresql://me:s3cr3t@127.0.0.1:9/nothing"
    text = said(command, "run", write_sweep(tmp_path), code=75)
    assert "s3cr3t" not in text
    assert len(text.strip().splitlines()) == 1


def test_a_database_url_that_is_none(command: Command, tmp_path: Path) -> None:
    command.store_url = "sqlite//oops"
    text = said(
        command, "run", write_sweep(tmp_path), code=2
    )  # not 75: what is run again on "try later" would do so for ever
    assert len(text.strip().splitlines()) == 1


def test_a_folder_that_cannot_be_written(command: Command, tmp_path: Path) -> None:
    command.store_url = "sqlite:////proc/sweep/sweep.sqlite"
    assert "/proc/sweep" in said(command, "run", write_sweep(tmp_path), code=75)


def test_a_cluster_that_is_not_there(command: Command, tmp_path: Path) -> None:
    text = said(
        command, "run", write_sweep(tmp_path), "--ray-address", "127.0.0.1:9", code=75, timeout=100
    )
    assert "127.0.0.1:9" in text


def test_a_changed_condition_is_refused_with_the_difference(
    command: Command, tmp_path: Path
) -> None:
    command.ok("run", write_sweep(tmp_path), "search.max_trials=1", "--simulate")
    text = said(
        command, "run", write_sweep(tmp_path), "measurement.warmup_steps=7", "--simulate", code=2
    )
    assert "warmup_steps" in text


def test_a_sweep_that_was_refused_at_its_start_may_be_mended_under_its_name(
    command: Command, tmp_path: Path
) -> None:
    said(command, "run", write_sweep(tmp_path), "device=h100-sxm", "search.max_trials=1", code=2)
    with Store.open(
        command.store_url
    ) as store:  # as on a cluster, which is looked at once the sweep is held
        store.ensure_sweep("t", "{}", {"device": "h100-sxm"})
    command.ok("run", write_sweep(tmp_path), "search.max_trials=1")
    assert command.sql("select count(*) from v_trial where state = 'measured'") == [[1]]


def test_a_disk_that_fills_up_loses_nothing_acknowledged(command: Command, tmp_path: Path) -> None:
    slow = {"name": "synthetic", "options": {"sleep": True, "time_scale": 15.0}}
    file = write_sweep(tmp_path, workload=slow)
    with Store.open(command.store_url) as store:
        running = command.start("run", file)
        running.until(lambda: len(measured(store, "t")) >= 2)
        # Of the orchestrator alone: whatever it writes next is refused, as on a full disk.
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        code, _, err = running.end()
        assert code == 75, err
        assert "Traceback" not in err
        assert err.strip().splitlines()[-1].startswith("error:")
        assert len(measured(store, "t")) >= 2
    command.ok("run", file)
    assert command.sql("select count(*) from v_trial where state = 'measured'") == [[16]]


def test_ray_that_is_ended_from_outside_is_said_and_nothing_hangs(
    command: Command, tmp_path: Path
) -> None:
    slow = {"name": "synthetic", "options": {"sleep": True, "time_scale": 100.0}}
    file = write_sweep(tmp_path, workload=slow)
    with Store.open(command.store_url) as store:
        running = command.start("run", file)
        running.until(lambda: len(measured(store, "t")) >= 1)
        raylet = next(
            pid
            for pid in descendants(running.process.pid)
            if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"
        )
        running.look()
        os.kill(raylet, signal.SIGKILL)
        code, _, err = running.end()
        assert code == 75, err
        assert "the same command goes on" in err
        assert running.survivors(seconds=10) == []
        assert store.sweep_named("t").holder is None
