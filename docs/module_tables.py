"""The tables of docs/modules.md: every module of the product in one line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docs.markdown import markdown_table

PROJECT = Path(__file__).parent.parent
FOLDERS = (
    "layout_sweep",
    "orchestrator/cli",
    "orchestrator/cli/best",
    "orchestrator/cli/doctor",
    "orchestrator/cli/export",
    "orchestrator/cli/live",
    "orchestrator/cli/mirror",
    "orchestrator/cli/run",
    "orchestrator/cli/store",
    "orchestrator/cli/terminal",
    "orchestrator/cli/top",
    "orchestrator/cli/ui",
    "orchestrator/report",
    "orchestrator/report/pictures",
    "orchestrator/report/pages",
    "orchestrator/report/mirrors",
    "orchestrator/sweep",
    "orchestrator/search",
    "orchestrator/cluster",
    "orchestrator/cluster/ray",
    "orchestrator/node",
    "orchestrator/core",
    "orchestrator/core/problem",
    "orchestrator/core/physics",
    "orchestrator/core/trial",
    "orchestrator/core/frameworks",
    "orchestrator/core/machines",
    "orchestrator/core/sweepfile",
    "orchestrator/core/search",
    "orchestrator/core/pretend",
    "db",
    "db/tables",
    "db/read",
    "db/write",
    "db/sql",
    "db/connection",
    "workloads",
    "workloads/llama",
    "workloads/synthetic",
    "workloads/replay",
    "workloads/command",
    "workloads/netbench",
    "workloads/tools",
)


def module_tables() -> str:
    """Every module with the first sentence of its docstring."""
    lines = []
    for folder in FOLDERS:
        rows = []
        for file in sorted((PROJECT / folder).glob("*.py")):
            about = ast.get_docstring(ast.parse(file.read_text()))
            if about:
                sentence = re.split(r"(?<=[.])\s", " ".join(about.split()), maxsplit=1)[0]
                package = folder.rpartition("/")[2]
                rows.append((f"`{package if file.stem == '__init__' else file.name}`", sentence))
        lines += [f"**`{folder}/`**", "", markdown_table("module | what it is", rows), ""]
    return "\n".join(lines).rstrip()
