"""The Python that a command runs, and what it says of itself without importing torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.core.trial.fingerprint import Software
from orchestrator.node import program_software
from orchestrator.node.program_software import (
    AttemptSoftware,
    ProgramSoftware,
    interpreter_of,
)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A folder of an environment: its python, and tools as installers write them."""
    folder = tmp_path / "env" / "bin"
    script(folder / "python3", "#!/bin/sh\n")
    script(folder / "torchrun", f"#!{folder}/python3\nimport torch\n")
    script(folder / "accelerate", f"#!/bin/sh\n'''exec' {folder}/python3 \"$0\" \"$@\"\n' '''\n")
    script(folder / "train", "#!/usr/bin/env -S python3 -u\n")
    script(folder / "numactl", "\x7fELF")
    script(folder / "conda", f"#!{folder}/python3\n")
    return folder


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["python3", "train.py"], True),
        (["torchrun", "--nproc-per-node", "2", "train.py"], True),
        (["accelerate", "launch", "train.py"], True),
        (["train", "--fast"], True),
        (["numactl", "-N", "0", "python3", "train.py"], True),
        (["env/bin/train"], True),
        (["conda", "run", "-n", "x", "python3", "train.py"], False),
        (["sh", "-c", "python3 train.py"], False),
        (["no-such-program"], False),
        (["{run_dir}/run.sh"], False),
        (["./data.txt"], False),
    ],
)
def test_the_python_is_found_by_its_name_or_by_a_scripts_first_line(
    argv: list[str], found: bool, bin_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "data.txt").write_text("#!/usr/bin/python3")  # not executable
    path = interpreter_of(argv, search_path=f"{bin_folder}:/bin", cwd=str(tmp_path))
    assert path == (str(bin_folder / "python3") if found else None)


def environment_of(folder: Path) -> Mapping[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}


def install(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_it_lists_its_packages_and_torchs_versions_and_does_not_import_torch(
    tmp_path: Path,
) -> None:
    install(tmp_path, "My.Package", "1.5")
    install(tmp_path, "torch", "9.8.7")
    install(tmp_path, "nvidia-nccl-cu99", "2.99.1")
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "version.py").write_text(
        "from typing import Optional\n__version__ = '9.8.7+cu999'\ncuda: Optional[str] = '99.9'\n"
    )
    found = ProgramSoftware().of(sys.executable, environment_of(tmp_path))
    stack = found.stack
    assert (stack.torch, stack.cuda, stack.nccl) == ("9.8.7+cu999", "99.9", "2.99.1")
    assert stack.python == ".".join(map(str, sys.version_info[:3]))
    packages = dict(found.packages)
    assert (packages["my-package"], packages["torch"]) == ("1.5", "9.8.7")
    assert list(found.packages) == sorted(found.packages)


def test_it_is_asked_again_only_when_a_folder_of_packages_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    popen = subprocess.Popen

    def count(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        asked.append(command[0])
        return popen(command, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "Popen", count)
    install(tmp_path, "one", "1")
    software = ProgramSoftware()
    environment = environment_of(tmp_path)
    first = software.of(sys.executable, environment)
    assert software.of(sys.executable, environment) == first and len(asked) == 1
    install(tmp_path, "two", "2")
    second = software.of(sys.executable, environment)
    assert len(asked) == 2
    assert set(second.packages) - set(first.packages) == {("two", "2")}


@pytest.mark.parametrize("text", ["#!/bin/sh\necho not json\n", "#!/bin/sh\nsleep 60\n"])
def test_a_python_that_does_not_answer_leaves_all_unknown(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_software, "ANSWER_SECONDS", 0.3)
    python = script(tmp_path / "python", text)
    assert ProgramSoftware().of(str(python), {"PATH": "/bin:/usr/bin"}) == Software()


COPY = """
import os, sys
if os.fork() == 0:
    sys.stdin.readline()
    os.execv(sys.argv[1], [sys.argv[1], "-c", "input()"])
print("forked", flush=True)
os.wait()
"""


def test_a_copy_of_a_rank_that_has_not_become_the_program_yet_is_not_its_python(
    tmp_path: Path,
) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(Path(sys.executable).resolve())
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = tmp_path / "env" / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "env" / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\n")
    install(packages, "its-own", "7")
    with subprocess.Popen(
        [sys.executable, "-c", COPY, str(python)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdin is not None and rank.stdout is not None
        rank.stdout.readline()

        def found_now() -> Software:
            attempt = AttemptSoftware(ProgramSoftware(), ("sh", "-c", "x"), devices=(), found=None)
            attempt.find_python([rank.pid], timed_steps_run=False)
            return attempt.software()

        assert found_now().packages == ()
        rank.stdin.write(b"go\n")
        rank.stdin.flush()
        (program,) = psutil.Process(rank.pid).children()
        within(30, lambda: program.cmdline()[0] == str(python))
        within(30, lambda: dict(found_now().packages).get("its-own") == "7")
        program.kill()


ASKS = """
import os
from orchestrator.node.program_software import ProgramSoftware
import sys
ProgramSoftware().of(sys.executable, {"PATH": os.environ["PATH"], "PYTHONPATH": sys.argv[1]})
"""


def test_a_python_that_hangs_dies_with_the_launcher_that_asked_it(tmp_path: Path) -> None:
    # It waits for the text of a package as on a file system that does not answer.
    fifo = tmp_path / "slow-1.dist-info" / "METADATA"
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    with subprocess.Popen(
        [sys.executable, "-c", ASKS, str(tmp_path)], cwd=Path(__file__).parents[2]
    ) as launcher:
        writer = within(60, lambda: opened_by_a_reader(fifo))
        (asked,) = psutil.Process(launcher.pid).children()
        launcher.kill()
    assert within(30, lambda: not asked.is_running())
    os.close(writer)


def opened_by_a_reader(fifo: Path) -> int | None:
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def within(seconds: float, happened: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
