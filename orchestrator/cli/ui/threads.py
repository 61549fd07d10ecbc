"""Work that waits for the store, in threads that no end of the server waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result]) -> Result:
    """Return what the work returns; raise what it raises.

    The threads of asyncio would keep a process from ending while a database is silent.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: object) -> None:
        if not future.done():
            set_it(value)

    def run() -> None:
        try:
            result = work()
        # It is raised again by the task that waits for the result.
        except BaseException as exc:  # noqa: BLE001
            tell(future.set_exception, exc)
        else:
            tell(future.set_result, result)

    def tell(set_it: Callable[[Any], None], value: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, set_it, value)

    threading.Thread(target=run, daemon=True, name="ui work").start()
    return await future
