"""Runs jobs of `benchmarks/trainer_arm.py`, each in a fork that has imported what an arm imports.

`python -m tests.benchmarks.warm_arms`: for each line of stdin, the path of a job, it answers with a
line of JSON: the exit code of the fork and all that it said.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from benchmarks import trainer_arm
from tests.faults import forks


def run(job: Path) -> tuple[int, str]:
    """The exit code of an arm and what it said."""
    with tempfile.TemporaryFile("w+") as said:

        def arm() -> None:
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
            os.chdir(job.parent)
            sys.argv = [trainer_arm.__file__, str(job)]
            trainer_arm.main()
            sys.stdout.flush()

        code = forks.outcome(arm)
        said.seek(0)
        return code, said.read()


def main() -> None:
    import_module(trainer_arm.IMPORTS["llama"])
    for line in sys.stdin:
        print(json.dumps(run(Path(line.rstrip("\n")))), flush=True)


if __name__ == "__main__":
    main()
