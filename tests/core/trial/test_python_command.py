"""What the command line of a Python interpreter runs."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.python_command import PythonCommand, python_command


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["python", "train.py", "-m"], PythonCommand(script="train.py", arguments=["-m"])),
        (["/opt/bin/python3.12", "-u", "a.py"], PythonCommand(script="a.py", arguments=[])),
        (["python", "-X", "dev", "a.py"], PythonCommand(script="a.py", arguments=[])),
        (["python", "-Wignore:from tqdm", "a.py"], PythonCommand(script="a.py", arguments=[])),
        (["pypy3", "-um", "tool", "a.py"], PythonCommand(module="tool", arguments=["a.py"])),
        (["python", "-m", None, "a.py"], PythonCommand(arguments=["a.py"])),
        (
            ["python", "-u", "-m", "tool", "a", "b"],
            PythonCommand(module="tool", arguments=["a", "b"]),
        ),
        (["python", "-u", "-m"], PythonCommand(arguments=[])),
        (["python", "-c", "import torch", "a.py"], PythonCommand()),
        (["python", "-cimport torch", "a.py"], PythonCommand()),
        (["python", "-"], PythonCommand()),
        (["python", None, "a.py"], PythonCommand()),
        (["python", "-X"], PythonCommand()),
        (["python"], PythonCommand()),
        (["torchrun", "train.py"], None),
        (["python-config", "train.py"], None),
        ([None, "train.py"], None),
        ([], None),
    ],
)
def test_the_script_or_module_of_a_python(
    argv: list[str | None], found: PythonCommand | None
) -> None:
    assert python_command(argv) == found
