"""The command with bad streams, folders and arguments: the documented code, at most one line."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.command import SWEEP, write_sweep

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
        # Stderr takes nothing: the sweep does not care, and the code tells.
        ("sweep validate t.yaml 2>/dev/full", 0, ""),
        ("sweep validate none.yaml 2>/dev/full", 2, ""),
        ("sweep validate none.yaml 2>&-", 2, ""),
        # Stdout takes nothing.
        ("sweep validate t.yaml >/dev/full", 75, "stdout cannot be written: No space left"),
        ("sweep validate t.yaml >&-", 141, ""),
        ("sweep validate t.yaml <&- >&- 2>&-", 141, ""),
        ("sweep --help >/dev/full", 75, "stdout cannot be written"),
        ("sweep --help >&-", 141, ""),
        ("sweep validate none.yaml --json >/dev/full", 2, "no sweep file none.yaml"),
        ("sweep schema | true; exit ${PIPESTATUS[0]}", 141, ""),
        # Arguments and names.
        ("sweep status --db $'sqlite:///a\\xff.sqlite'", 2, "no store at"),
        ("sweep validate $'\\xff.yaml'", 2, "no sweep file"),
        ('sweep $(printf "%0100000d" 7)', 2, "No such command"),
        ('sweep status --db sqlite:///$(printf "%0100000d" 7)', 2, "is a name that is too long"),
        ("SWEEP_DB=sqlite:////dev/null sweep status", 2, "is a device, and a SQLite store is a"),
        ("mkfifo p; sweep validate p", 2, "p is a pipe that nobody writes to"),
        ("mkfifo f; SWEEP_DB=sqlite:///f sweep status", 2, "is a pipe, and a SQLite store is a"),
        ("SWEEP_DB=sqlite:///~no-such-user/x sweep status", 2, "there is no user of that name"),
        # Surroundings.
        ("mkdir x; cd x; rmdir ../x; sweep status", 2, "the working folder no longer exists"),
        ("ulimit -v 150000; sweep validate t.yaml", 75, "ulimit -v leaves 146 MiB"),
        ("ulimit -n 40; sweep run t.yaml", 75, "ulimit -n leaves 40 open files"),
        ("ulimit -f 100; sweep run t.yaml", 75, "ulimit -f leaves 0 MiB for a file"),
        ("RAY_TMPDIR=/proc/none sweep run t.yaml", 75, "its session in RAY_TMPDIR=/proc/none"),
        (f"sweep run t.yaml --simulate name={'x' * 63}", 2, f"a shorter name, name={'x' * 53}"),
    ],
)  # fmt: skip
def test_one_line_at_most_and_the_documented_code(
    line: str, code: int, says: str, folder: Path
) -> None:
    returned, _, told = shell(folder, line)
    assert (returned, [word for word in TRACES if word in told]) == (code, []), told
    assert len(told.splitlines()) == (1 if says else 0), told
    assert says in told
    assert max(map(len, told.splitlines()), default=0) < 1_200


@pytest.mark.parametrize(
    ("streams", "code"),
    [("2>/dev/full", 0), ("2>&-", 0), (">&-", 141), (">/dev/full", 75), ("<&- >&- 2>&-", 141),
     ("2>&1 | true; exit ${PIPESTATUS[0]}", 141)],
)  # fmt: skip
def test_whatever_becomes_of_what_it_says_a_sweep_is_measured_and_kept(
    streams: str, code: int, folder: Path
) -> None:
    returned, _, told = shell(folder, f"sweep run t.yaml --simulate {streams}")
    assert (returned, [word for word in TRACES if word in told]) == (code, []), told
    with sqlite3.connect(folder / ".sweep" / "sweep.sqlite") as store:
        assert store.execute("select state, count(*) from trial group by 1").fetchall() == [
            ("measured", 1)
        ]


def test_an_odd_width_or_a_path_that_is_no_text_stops_nothing(folder: Path) -> None:
    for line in (
        "COLUMNS=² sweep run t.yaml --simulate",
        "sweep run t.yaml --simulate --db $'sqlite:///a\\xff.sqlite'",
    ):
        returned, out, told = shell(folder, line)
        assert (returned, [word for word in TRACES if word in told]) == (0, []), told
        assert "dp1 mbs1" in out


def test_an_export_to_what_is_no_plain_file_writes_into_it_and_puts_none_in_its_place(
    folder: Path,
) -> None:
    (folder / "real.csv").touch()
    (folder / "link.csv").symlink_to("real.csv")
    os.mkfifo(folder / "pipe")
    line = "sweep run t.yaml --simulate >/dev/null 2>&1; sweep export csv -o link.csv"
    line += " && sweep export csv -o /dev/stdout"
    returned, out, told = shell(
        folder, f"{line} && (cat pipe > got & sweep export csv -o pipe; wait)"
    )
    assert returned == 0, told
    assert (
        out.startswith("trial_id")
        and (folder / "real.csv").read_text() == out == (folder / "got").read_text()
    )
    assert (folder / "pipe").is_fifo() and (folder / "link.csv").is_symlink()
