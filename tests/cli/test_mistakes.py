"""Mistakes of users: each gets one clear line, the right exit code, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.command import CommandHere, write_sweep


def said(command: CommandHere, *arguments: str | Path, code: int) -> str:
    done = command.run(*arguments)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_typo_is_named_with_its_line_and_what_was_meant(
    command: CommandHere, tmp_path: Path
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        "name: s\nmodel: lama-tiny\ngpus: 2\nsequence_lenght: 64\nglobal_batch_size: 8\n"
    )
    text = said(command, "run", file, code=2)
    assert "s.yaml:2:8" in text
    assert "llama-tiny" in text
    assert "s.yaml:4:1" in text
    assert "sequence_length" in text


def test_a_file_that_is_not_there(command: CommandHere) -> None:
    assert "no sweep file nothing.yaml" in said(command, "run", "nothing.yaml", code=2)


def test_an_override_that_names_no_key(command: CommandHere, tmp_path: Path) -> None:
    assert "search.max_trails" in said(
        command, "run", write_sweep(tmp_path), "search.max_trails=3", code=2
    )


def test_a_gpu_sweep_on_a_machine_without_gpus(command: CommandHere, tmp_path: Path) -> None:
    text = said(command, "run", write_sweep(tmp_path, device="h100-sxm"), code=2)
    assert "device: cpu" in text
    assert "--ray-address" in text


def test_more_gpus_than_the_machine_has(command: CommandHere, tmp_path: Path) -> None:
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
    command: CommandHere, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert says in said(command, "run", write_sweep(tmp_path), *arguments, code=2)


def test_a_database_that_does_not_answer_keeps_its_password(
    command: CommandHere, tmp_path: Path
) -> None:
    command.store_url = "postgresql://me:s3cr3t@127.0.0.1:9/nothing"
    text = said(command, "run", write_sweep(tmp_path), code=75)
    assert "s3cr3t" not in text
    assert len(text.strip().splitlines()) == 1


def test_a_database_url_that_is_none(command: CommandHere, tmp_path: Path) -> None:
    command.store_url = "sqlite//oops"
    # Not 75: what is run again on "try later" would do so for ever.
    text = said(command, "run", write_sweep(tmp_path), code=2)
    assert len(text.strip().splitlines()) == 1


def test_a_folder_that_cannot_be_written(command: CommandHere, tmp_path: Path) -> None:
    command.store_url = "sqlite:////proc/sweep/sweep.sqlite"
    assert "/proc/sweep" in said(command, "run", write_sweep(tmp_path), code=75)


def test_a_changed_condition_is_refused_with_the_difference(
    command: CommandHere, tmp_path: Path
) -> None:
    command.ok("run", write_sweep(tmp_path), "search.max_trials=1", "--simulate")
    text = said(
        command, "run", write_sweep(tmp_path), "measurement.warmup_steps=7", "--simulate", code=2
    )
    assert "warmup_steps" in text
