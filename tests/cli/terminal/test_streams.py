"""The command with bad streams, folders and arguments: the documented code, at most one line."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.command import SWEEP, CommandHere, write_sweep
from tests.cli.conftest import Sweep

TRACES = ("Traceback", "this is a bug", "Exception ignored", 'File "')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sweep(tmp_path, gpus=1, axes={"micro_batch_size": [1], "recompute": ["none"]})
    return tmp_path


def shell(folder: Path, line: str) -> tuple[int, str, str]:
    """Run a line of bash, in which `sweep` is ours. It must answer at once, so no test waits."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SWEEP_", "RAY_"))
    }
    done = subprocess.run(
        ["bash", "-c", f'sweep() {{ {SWEEP} "$@"; }}\n{line}'],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return (
        done.returncode,
        done.stdout.decode(errors="replace"),
        done.stderr.decode(errors="replace"),
    )


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        # Stderr takes nothing: the code tells.
        ("sweep validate none.yaml 2>/dev/full", 2, ""),
        ("sweep validate none.yaml 2>&-", 2, ""),
        # Stdout takes nothing. What becomes of a sweep then: below.
        ("sweep --help >/dev/full", 75, "stdout cannot be written"),
        ("sweep --help >&-", 141, "stdout is closed: no answer is shown"),
        ("sweep validate none.yaml --json >/dev/full", 2, "no sweep file none.yaml"),
        ("sweep schema | true; exit ${PIPESTATUS[0]}", 141, ""),
        # Arguments that only a shell can give, and limits of this process.
        ("sweep status --db $'sqlite:///a\\xff.sqlite'", 2, "no store at"),
        ("ulimit -v 150000; sweep validate t.yaml", 75, "ulimit -v leaves 146 MiB"),
        ("ulimit -n 40; sweep run t.yaml", 75, "ulimit -n leaves 40 open files"),
        ("ulimit -f 100; sweep run t.yaml", 75, "ulimit -f leaves 0 MiB for a file"),
    ],
)  # fmt: skip
def test_one_line_at_most_and_the_documented_code(
    line: str, code: int, says: str, folder: Path
) -> None:
    returned, _, told = shell(folder, line)
    assert (returned, wrong_with(told, says)) == (code, []), told


@pytest.mark.parametrize(
    ("environment", "arguments", "code", "says"),
    [
        ({}, ("validate", "\udcff.yaml"), 2, "no sweep file"),
        ({}, ("7" * 100_000,), 2, "No such command"),
        ({}, ("status", "--db", f"sqlite:///{'7' * 100_000}"), 2, "is a name that is too long"),
        ({"SWEEP_DB": "sqlite:////dev/null"}, ("status",), 2, "is a device, and a SQLite store"),
        ({}, ("validate", "pipe"), 2, "pipe is a pipe that nobody writes to"),
        ({"SWEEP_DB": "sqlite:///pipe"}, ("status",), 2, "is a pipe, and a SQLite store is a"),
        ({"SWEEP_DB": "sqlite:///~no-such-user/x"}, ("status",), 2, "no user of that name"),
        ({"RAY_TMPDIR": "/proc/none"}, ("run", "t.yaml"), 75, "session in RAY_TMPDIR=/proc/none"),
        ({}, ("bench", "7" * 100_000), 2, "a node's name has at most 253 characters"),
        ({}, ("run", "t.yaml", "--simulate", f"name={'x' * 63}"), 2, f"name={'x' * 53}"),
    ],
)  # fmt: skip
def test_odd_arguments_and_places_are_one_line_and_the_documented_code(
    environment: dict[str, str], arguments: tuple[str, ...], code: int, says: str, folder: Path
) -> None:
    os.mkfifo(folder / "pipe")
    done = CommandHere(folder, "sqlite:///none.sqlite", environment).run(*arguments)
    assert (done.returncode, wrong_with(done.stderr, says)) == (code, []), done.stderr


def test_a_working_folder_that_is_gone_is_one_line(
    sweep: Sweep, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    for command in (("status",), ("run", "t.yaml", "--db", f"sqlite:///{folder}/s.sqlite")):
        _, told = sweep(*command, code=2)
        assert wrong_with(told, "the working folder no longer exists") == []


def wrong_with(told: str, says: str) -> list[str]:
    """What keeps an answer from being one short line with these words, or none without words."""
    lines = told.splitlines()
    found = [f"it has {word}" for word in TRACES if word in told]
    found += [f"{len(lines)} lines"] if len(lines) != bool(says) else []
    found += [f"it lacks {says!r}"] if says not in told else []
    return found + [f"a line of {len(line)} characters" for line in lines if len(line) >= 1_200]


@pytest.mark.parametrize(
    ("streams", "code", "says"),
    [pytest.param("2>/dev/full", 0, "", marks=pytest.mark.long), ("2>&-", 0, ""),
     pytest.param("<&- >&- 2>&-", 141, "", marks=pytest.mark.long),
     (">&-", 141, "stdout is closed: no answer is shown"),
     (">/dev/full", 75, "stdout cannot be written: No space left"),
     pytest.param("2>&1 | true; exit ${PIPESTATUS[0]}", 141, "", marks=pytest.mark.long)],
)  # fmt: skip
def test_whatever_becomes_of_what_it_says_a_sweep_is_measured_and_kept(
    streams: str, code: int, says: str, folder: Path
) -> None:
    returned, _, told = shell(folder, f"sweep run t.yaml --simulate {streams}")
    assert (returned, [word for word in TRACES if word in told]) == (code, []), told
    assert says in told
    with sqlite3.connect(folder / ".sweep" / "sweep.sqlite") as store:
        assert store.execute("select state, count(*) from trial group by 1").fetchall() == [
            ("measured", 1)
        ]


def test_an_odd_width_or_a_path_that_is_no_text_stops_nothing(folder: Path) -> None:
    odd = CommandHere(folder, "sqlite:///a\udcff.sqlite", {"COLUMNS": "²"})
    assert "dp1 mbs1" in odd.ok("run", "t.yaml", "--simulate").stdout
    assert (folder / "a\udcff.sqlite").is_file()


def test_an_export_to_what_is_no_plain_file_writes_into_it_and_puts_none_in_its_place(
    folder: Path,
) -> None:
    (folder / "real.csv").touch()
    (folder / "link.csv").symlink_to("real.csv")
    os.mkfifo(folder / "pipe")
    here = CommandHere(folder, f"sqlite:///{folder}/.sweep/sweep.sqlite")
    here.ok("run", "t.yaml", "--simulate")
    here.ok("export", "csv", "-o", "link.csv")
    reader = subprocess.Popen(["cat", folder / "pipe"], stdout=subprocess.PIPE, text=True)
    here.ok("export", "csv", "-o", "pipe")
    got, _ = reader.communicate(timeout=60)
    returned, out, told = shell(folder, "sweep export csv -o /dev/stdout")
    assert returned == 0, told
    assert out.startswith("trial_id") and (folder / "real.csv").read_text() == out == got
    assert (folder / "pipe").is_fifo() and (folder / "link.csv").is_symlink()
