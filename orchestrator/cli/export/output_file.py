"""Writes an export to the file that `-o` names, or to stdout."""

from __future__ import annotations

from pathlib import Path

from orchestrator.cli.terminal.output import write
from orchestrator.core.errors import UsageInvalid


def write_text(text: str, output: str | None) -> None:
    """Write a text, to stdout if `output` is None. Raises UsageInvalid if it cannot be written."""
    if output is None:
        write(text.rstrip("\n"))
    else:
        write_bytes(text.encode(), output)


def write_bytes(content: bytes, output: str) -> None:
    """Write a file under another name and rename it, so that no reader sees half of it.

    Raises UsageInvalid if it cannot be written.
    """
    try:
        path = Path(output)
        if path.exists() and not path.is_file():
            # A pipe or a device cannot be replaced by a file.
            path.write_bytes(content)
            return
        path = path.resolve()  # a link stays a link
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as exc:
        raise UsageInvalid(f"cannot write {output}: {exc.strerror}") from exc
