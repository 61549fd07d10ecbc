"""Runs a module as a process that dies with its parent; the module need not know of that.

start.py orchestrator.node.die_with_parent PARENT MODULE [ARGUMENTS]
"""

from __future__ import annotations

import runpy
import sys

from orchestrator.node.processes import die_with


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    die_with(parent)
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
