"""The process that calculates: begun by the first question, and ended without questions."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from layout_sweep.start import command
from orchestrator.cli.ui.refusal import Refusal

logger = logging.getLogger(__name__)

MODULE = "orchestrator.cli.ui.calculating"
# Reading a store of 10,000 trials and fitting takes 2 s.
ANSWER_SECONDS = 60.0
IDLE_SECONDS = 600.0
MOST_LINE_BYTES = 1 << 20
NO_ANSWER = "The calculator did not answer; reload the page."


class CalculatorProcess:
    """Asks one question at a time. For the thread of the event loop."""

    def __init__(
        self, db: str | None, sweep: str, *, module: str = MODULE, seconds: float = ANSWER_SECONDS
    ) -> None:
        self._db, self._sweep, self._module, self._seconds = db, sweep, module, seconds
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    async def ask(self, wants: str, cell: str | None, fields: Mapping[str, str]) -> dict[str, Any]:
        """Return the value that answers a question. Raises Refusal."""
        question = json.dumps({"wants": wants, "cell": cell, "fields": dict(fields)})
        async with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            try:
                line = await asyncio.wait_for(self._exchange(question), self._seconds)
                found = json.loads(line)
            except (TimeoutError, OSError, ValueError) as exc:
                logger.error("The calculator of %s failed: %s", self._sweep, exc or "no answer")
                await self._end()
                raise Refusal(503, NO_ANSWER) from None
            except asyncio.CancelledError:
                # Its answer would be taken for that of the next question.
                await self._end()
                raise
            self._rest()
        if found["status"] != 200:
            raise Refusal(found["status"], found["text"])
        value: dict[str, Any] = found["value"]
        return value

    async def close(self) -> None:
        """End the process."""
        if self._idle is not None:
            self._idle.cancel()
        if self._ending is not None:
            await self._ending
        await self._end()

    @property
    def pid(self) -> int | None:
        """The number of the process; None: there is none."""
        return None if self._process is None else self._process.pid

    async def _exchange(self, question: str) -> bytes:
        if self._process is not None:
            # It may have been killed since, as by the kernel when memory ran out.
            with suppress(OSError):
                if line := await _answer(self._process, question):
                    return line
            await self._end()
        self._process = await self._begin()
        return await _answer(self._process, question)

    async def _begin(self) -> asyncio.subprocess.Process:
        # A database's URL goes through the environment, where other users do not see its password.
        return await asyncio.create_subprocess_exec(
            *command(self._module, self._sweep),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | ({"SWEEP_DB": self._db} if self._db is not None else {}),
            limit=MOST_LINE_BYTES,
            # Ctrl-C on the terminal is for the server, which ends it.
            start_new_session=True,
        )

    def _rest(self) -> None:
        """End the process unless another question comes."""
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(IDLE_SECONDS, self._end_idle)

    def _end_idle(self) -> None:
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        # Its pipes and its process id are given back.
        await process.communicate()


async def _answer(process: asyncio.subprocess.Process, question: str) -> bytes:
    """Return the line that answers a question; nothing if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(question.encode() + b"\n")
    await process.stdin.drain()
    return await process.stdout.readline()
