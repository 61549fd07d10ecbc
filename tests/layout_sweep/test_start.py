"""No process of ours imports from the user's folders; their own programs do as ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from layout_sweep.start import ROOT, command, installed_python_path, own_path

SHADOWED = ("db", "orchestrator", "workloads", "layout_sweep", "yaml", "psutil")


def hostile(folder: Path) -> Path:
    """A folder whose modules have the names of ours, and of packages that we import."""
    folder.mkdir(parents=True)
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('{name} of the user')\n")
    return folder


def test_the_users_folders_leave_the_search_path_and_installed_packages_stay(
    tmp_path: Path,
) -> None:
    users, installed = tmp_path / "project", tmp_path / "site"
    users.mkdir()
    (installed / "torch-2.13.0.dist-info").mkdir(parents=True)
    python_path = f"{users}:{installed}:{tmp_path / 'nowhere'}"
    path = ["", str(users), str(installed), str(tmp_path / "nowhere"), str(Path.cwd()), "/usr/lib"]
    assert own_path(path, python_path) == [str(installed), "/usr/lib", ROOT]
    assert installed_python_path(python_path) == str(installed)
    assert own_path([ROOT, "/usr/lib"], ROOT) == [ROOT, "/usr/lib"], "also if ours is found by it"
    assert own_path(["/usr/lib", ROOT], "") == ["/usr/lib", ROOT]
    library = str(Path(os.__file__).parent)
    assert own_path([library, ROOT], library) == [library, ROOT], "Python's own library stays"


def test_a_process_imports_ours_whatever_lies_in_the_working_folder_or_on_the_path(
    tmp_path: Path,
) -> None:
    """Also if an installed package of somebody else has the name of one of ours."""
    users = hostile(tmp_path / "project")
    installed = hostile(tmp_path / "site")
    (installed / "theirs-1.0.dist-info").mkdir()
    for name in ("yaml", "psutil"):
        (installed / f"{name}.py").unlink()
    program = (
        "import db.types, orchestrator.core, workloads.command, yaml, psutil, sys;"
        "print(orchestrator.__file__, sys.argv)"
    )
    done = subprocess.run(
        command("-c", program, "an argument"),
        cwd=users,
        env={"PYTHONPATH": f"{users}:{installed}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{ROOT}/orchestrator/__init__.py ['-c', 'an argument']\n"


def test_the_command_imports_ours_too(tmp_path: Path) -> None:
    users, script = hostile(tmp_path / "project"), tmp_path / "bin" / "sweep"
    hostile(script.parent)
    # As an installer writes it.
    script.write_text("import sys\nfrom layout_sweep.start import sweep\nsys.exit(sweep())\n")
    (script.parent / "layout_sweep.py").unlink()
    (users / "layout_sweep.py").unlink()
    done = subprocess.run(
        [sys.executable, script, "--version"],
        cwd=users,
        env={"PYTHONPATH": str(users)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sweep ")


def test_the_command_frees_no_object_as_it_ends() -> None:
    """To free what the imports of a command leave takes a fifth of its CPU time."""
    program = (
        "import atexit, gc, sys; from layout_sweep.start import sweep;"
        "atexit.register(lambda: print(gc.get_freeze_count() > 10_000));"
        "sys.argv[1:] = ['--version']; sys.exit(sweep())"
    )
    done = subprocess.run(
        command("-c", program), env={}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "True"


@pytest.mark.parametrize("code", [129, 130, 143])
def test_a_command_that_a_signal_ended_runs_no_end_of_python_in_which_a_library_can_crash(
    code: int,
) -> None:
    program = (
        "import atexit, os, sys; import orchestrator.cli as cli; from layout_sweep.start import"
        " sweep; atexit.register(os.abort);"
        f"cli.main = lambda: {code}; sys.exit(sweep())"
    )
    done = subprocess.run(command("-c", program), env={}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (code, b"")


def test_code_of_the_user_finds_its_own_modules_again(tmp_path: Path) -> None:
    users = tmp_path / "project"
    users.mkdir()
    (users / "workloads.py").write_text("mine = True\n")
    program = (
        "from layout_sweep.start import return_imports; import workloads, db; return_imports();"
        "import workloads; print(workloads.mine, hasattr(db, 'mine'));"
        "import orchestrator.core.errors"
    )
    done = subprocess.run(
        command("-c", program), cwd=users, env={}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr


# The command while it imports its modules, which takes a second on a busy machine.
_IMPORTING = """
import signal, sys, time
from layout_sweep import start
if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
def take_long(module):
    print("ready", flush=True)
    time.sleep(0.2 if "nohup" in sys.argv else 60.0)
    raise SystemExit(7)
start.import_module = take_long
start.sweep()
"""


def importing(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command("-c", _IMPORTING, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, ""), (signal.SIGHUP, 129, "")],
)
def test_a_signal_while_the_command_imports_ends_it_with_its_code_and_no_traceback(
    number: signal.Signals, code: int, said: str
) -> None:
    process = importing()
    process.send_signal(number)
    assert process.communicate(timeout=30.0) == ("", said)
    assert process.returncode == code


def test_under_nohup_a_closed_terminal_ends_no_command_that_imports() -> None:
    process = importing("nohup")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30.0)
    assert process.returncode == 7
