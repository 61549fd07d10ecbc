"""A process that runs attempts whose ranks leave children behind, until it is killed.

Arguments: the root, and then nothing, or a KIND of tests/faults/stubborn.py to run once.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from orchestrator.node.launcher import NodeLauncher
from tests.faults.evidence import options as stubborn_options
from tests.node.launching import faulty, order


def _run_program(launcher: NodeLauncher, then: str) -> None:
    launcher.run(
        order("workloads.command", trial_id=0, world_size=1, options=stubborn_options(then))
    )


def _run_for_ever(launcher: NodeLauncher) -> None:
    options = {
        "faults": [
            *faulty("leak_children", at="init")["faults"],
            *faulty("hang", at="step_3", rank=1)["faults"],
        ]
    }
    for number in itertools.count():
        launcher.run(order(trial_id=number, options=options, limits={"steady": 0.3}))
        if number == 0:
            sys.stdout.write("one attempt is over\n")
            sys.stdout.flush()


if __name__ == "__main__":
    launcher = NodeLauncher(Path(sys.argv[1]), node="host")
    if len(sys.argv) > 2:
        _run_program(launcher, sys.argv[2])
    else:
        _run_for_ever(launcher)
