"""Writes the config files of a command into the run folder, once for all ranks of a node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.core.problem.layout import OptionValue
from orchestrator.core.sweepfile.config_files import rendered

# The mode of a file whose text begins with #!.
_SCRIPT_MODE = 0o755


def write_files(files: Mapping[str, Any], run_dir: Path, values: Mapping[str, OptionValue]) -> None:
    """Write every file that no rank of this node has written yet.

    A file appears whole and is never written again: the first rank's counts, and a program may
    change it. Raises ValueError for a template that names nothing, OSError.
    """
    for name, content in files.items():
        _write_once(run_dir / name, rendered(name, content, values))


def _write_once(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    if text.startswith("#!"):
        temporary.chmod(_SCRIPT_MODE)
    try:
        # Unlike a rename, a link fails if another rank was first.
        path.hardlink_to(temporary)
    except FileExistsError:
        pass
    except OSError:
        # A file system without links: all ranks of the node write the same text.
        temporary.replace(path)
        return
    temporary.unlink()
