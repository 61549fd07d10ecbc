"""The environments of the frameworks, which `make recipes` makes: one folder each."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]
RECIPES = PROJECT / "sweeps" / "recipes"
ENVIRONMENTS = PROJECT / ".venv-recipes"


# Recipes that run in the environment of another.
SHARED = {"accelerate": "transformers"}


def programs_of(framework: str) -> Path:
    """The folder of a framework's programs. Skips the test if its environment is missing."""
    folder = ENVIRONMENTS / SHARED.get(framework, framework)
    if not (folder / ".installed").exists():
        pytest.skip(f"no environment with {framework}: `make recipes` makes {folder}")
    return folder / "bin"


def answer(framework: str, program: str, *arguments: str, **variables: str) -> Any:
    """What a Python program says in a framework's environment: the JSON of its last line."""
    python = programs_of(framework) / "python"
    done = subprocess.run(
        [python, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"} | variables,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
