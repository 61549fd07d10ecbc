"""A command of `sweep` in a process of its own: what is large or long does not burden the server.

The process has the limits and the permissions of the command, and what it takes ends with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from layout_sweep.start import command


@dataclass(frozen=True, kw_only=True)
class Done:
    """The end of a command. `output` is cut if `is_cut`."""

    exit_code: int
    output: bytes
    is_cut: bool


async def run_command(
    module: str, arguments: Sequence[str], *, db: str | None, most_bytes: int, niceness: int = 0
) -> Done:
    """Run `main` of a module with arguments, and read a limited number of bytes of its output.

    A database's URL goes through the environment, where other users do not see its password.
    """
    environment = os.environ | ({"SWEEP_DB": db} if db is not None else {})
    words = command(module, *arguments)
    process = await asyncio.create_subprocess_exec(
        *(["nice", "-n", str(niceness), *words] if niceness else words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
        # Ctrl-C on the terminal is for the server, which ends it.
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        output = b""
        while len(output) <= most_bytes and (part := await process.stdout.read(65_536)):
            output += part
        if len(output) > most_bytes:
            return Done(exit_code=0, output=output[:most_bytes], is_cut=True)
        return Done(exit_code=await process.wait(), output=output, is_cut=False)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        # Its pipe and its process id are given back.
        await process.stdout.read()
        await process.wait()
