"""What a command cannot start without is found before it starts."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from orchestrator.core.sweepfile.program_files import Files, script_of, why_not_startable

FOLDERS = {"/", "/bin", "/home/me", "/home/me/package"}
FILES = {
    "/bin/python",
    "/bin/bash",
    "/home/me/train.py",
    "/home/me/run.sh",
    "/home/me/tool",
    "/home/me/package/__main__.py",
}
HERE = Files(
    exists=lambda path: path in FOLDERS | FILES,
    is_folder=lambda path: path in FOLDERS,
    may_run=lambda path: path.startswith("/bin/") or path == "/home/me/tool",
)


def why_not(
    *argv: str | None, cwd: str | None = "/home/me", written: Collection[str] = ()
) -> str | None:
    return why_not_startable(
        argv, cwd=cwd, search_path="/usr/bin:/bin", files=HERE, written=written
    )


@pytest.mark.parametrize(
    ("argv", "script"),
    [
        (["python", "train.py", "--steps", "8"], "train.py"),
        (["/opt/bin/python3.11", "-u", "-X", "dev", "train.py"], "train.py"),
        (["python", "-c", "print()", "a.py"], None),
        (["python", "-Bc", "print()"], None),
        (["python", "-m", "mine.train", "a.py"], None),
        (["python", "-m", "torch.distributed.run", "--nnodes=1", "a.py"], "a.py"),
        (["python", "-Im", "torch.distributed.run", "-m", "mine"], None),
        (["python", None, "train.py"], None),
        (["bash", "-euo", "pipefail", "run.sh"], "run.sh"),
        (["bash", "-c", "python train.py"], None),
        (["torchrun", "--nproc_per_node", "2", "train.py", "--x"], "train.py"),
        (["accelerate", "launch", "--config_file", "a.yaml", "train.py"], "train.py"),
        (["deepspeed", "train.py", "--deepspeed", "ds.json"], "train.py"),
        (["torchrun", "-m", "mine"], None),
        (["srun", "train.py"], None),
        ([None, "train.py"], None),
    ],
)
def test_the_script_of_a_command_is_known(argv: list[str | None], script: str | None) -> None:
    assert script_of(argv) == script


def test_nothing_is_missing_where_all_is_there() -> None:
    assert why_not("python", "train.py", "--data", "nowhere.bin") is None
    assert why_not("/bin/bash", "/home/me/run.sh", cwd=None) is None
    assert why_not("./tool") is None
    assert why_not("python", "package") is None
    assert why_not("python", "generated.py", cwd=None, written={"generated.py"}) is None
    # Only a rank knows these.
    assert why_not(None, "train.py", cwd=None) is None
    assert why_not("python", None) is None


@pytest.mark.parametrize(
    ("argv", "cwd", "said"),
    [
        (["python"], "/home/you", "cwd '/home/you' is missing: it has to be a folder"),
        (["python"], "/home/me/run.sh", "cwd '/home/me/run.sh' is a file"),
        (["pyhton", "train.py"], "/home/me", "argv[0] 'pyhton' is in none of the folders of PATH"),
        (["run.sh"], "/home/me", "argv[0] 'run.sh' is in none of the folders of PATH"),
        (["/opt/python"], "/home/me", "argv[0] '/opt/python': /opt/python does not exist"),
        (["./package"], "/home/me", "/home/me/package is a folder"),
        (["./run.sh"], "/home/me", "is not executable: chmod +x /home/me/run.sh"),
        (["./run.sh"], None, "relative path, and each rank starts in its own run directory"),
        (
            ["python", "tarin.py"],
            "/home/me",
            "/home/me/tarin.py ('tarin.py' in argv) does not exist",
        ),
        (["python", "train.py"], None, "the script 'train.py', a relative path"),
        (["bash", "/nowhere/run.sh"], None, "/nowhere/run.sh does not exist"),
    ],
)
def test_what_is_missing_is_named_with_the_rule_and_the_fix(
    argv: list[str], cwd: str | None, said: str
) -> None:
    found = why_not(*argv, cwd=cwd)
    assert found is not None and said in found, found


@pytest.mark.parametrize(
    ("argv", "script"),
    [
        (["bash", "-o", "pipefail", "run.sh"], "run.sh"),
        (["bash", "+O", "extglob", "run.sh"], "run.sh"),
        (["bash", "--rcfile", "my.rc", "run.sh"], "run.sh"),
        (["bash", "-e", "run.sh"], "run.sh"),
        (["bash", "-s", "run.sh"], None),
        (["bash", "-x", None, "run.sh"], None),
        (["bash", "-x"], None),
    ],
)
def test_options_of_a_shell_are_no_script(argv: list[str | None], script: str | None) -> None:
    assert script_of(argv) == script
