"""Tests see nothing of their caller: a store, a home and variables that would break them."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
POISON = {
    "SWEEP_DB": "postgresql://nobody@127.0.0.1:1/none",
    "SWEEP_HOME": "/proc/none",
    "SWEEP_ANYTHING": "1",
    "RAY_ADDRESS": "127.0.0.1:1",
    "PGHOST": "127.0.0.1",
    "PGPORT": "1",
    "PGOPTIONS": "-c no_such_setting=1",
    "COLUMNS": "20",
    "RANK": "7",
}
# Each breaks if it sees the folder, a variable or the home of whoever runs it: the store, Ray,
# PostgreSQL, and what all tests and their children see.
_FILES = "tests/cli/test_sweep_files.py"
LOOKING = (
    f"{_FILES}::test_a_plan_says_what_the_tightest_budget_leaves",
    f"{_FILES}::test_a_limit_of_money_without_a_price_is_refused_at_the_door[run]",
    "tests/db/write/test_sessions.py::test_sessions_add_up_and_each_is_told_once[postgresql]",
    "tests/test_ambient.py::test_a_test_and_its_children_work_in_a_folder_of_their_own",
    "tests/test_ambient.py::test_the_children_of_a_test_hear_what_nohup_ignores",
)


def test_a_test_and_its_children_work_in_a_folder_of_their_own(tmp_path: Path) -> None:
    ask = "import os; print(os.getcwd(), os.path.expanduser('~'), *sorted(os.environ), sep='\\n')"
    folder, home, *names = subprocess.run(
        [sys.executable, "-c", ask], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert (Path.cwd(), Path(folder)) == (tmp_path, tmp_path)
    assert home != pwd.getpwuid(os.getuid()).pw_dir
    assert not (Path(home) / ".pg_service.conf").exists()
    assert [
        name
        for name in (*os.environ, *names)
        if name in POISON and os.environ.get(name) == POISON[name]
    ] == []
    assert not os.environ.keys() & {
        "SWEEP_DB",
        "SWEEP_HOME",
        "RAY_ADDRESS",
        "PGHOST",
    }  # Ray sets others when imported


def test_the_children_of_a_test_hear_what_nohup_ignores() -> None:
    ask = (
        "import signal; print(signal.getsignal(signal.SIGHUP).name, "
        "signal.getsignal(signal.SIGINT).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["SIG_DFL", "default_int_handler"]


@pytest.mark.long
def test_tests_pass_where_every_setting_of_a_person_would_break_them(tmp_path: Path) -> None:
    (tmp_path / ".sweep").mkdir()
    (tmp_path / ".sweep/sweep.sqlite").write_bytes(b"no database" * 100)
    (tmp_path / "home/.config").mkdir(parents=True)
    (tmp_path / "home/.pg_service.conf").write_text("[broken")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            PROJECT,
            *(PROJECT / name for name in LOOKING),
        ],
        env=os.environ | POISON | {"HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=_ignore_signals,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def _ignore_signals() -> None:
    """As `nohup` and a shell's `&` do."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
