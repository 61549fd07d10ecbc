"""A process that does nothing but run attempts whose ranks leave children behind, until somebody kills it. Argument: the root."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from orchestrator.launcher import NodeLauncher
from tests.orchestrator.launching import faulty, order

if __name__ == "__main__":
    launcher = NodeLauncher(Path(sys.argv[1]), node="host")
    options = {"faults": [*faulty("leak_children", at="init")["faults"], *faulty("hang", at="step_3", rank=1)["faults"]]}
    for number in itertools.count():
        launcher.run(order(trial_id=number, options=options, limits={"steady": 0.3}))
        if number == 0:
            sys.stdout.write("one attempt is over\n")
            sys.stdout.flush()
