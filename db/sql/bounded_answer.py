"""Fetches an answer in a child process with bounded time and memory.

One call of SQLite's C code cannot be interrupted, and a driver reads whole rows into memory. This
module knows no SQL: a function yields the names of the columns, and then rows.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.core.errors import StoreUnavailable, UsageInvalid
from orchestrator.node.processes import die_with

_MIB = 1 << 20
_BATCH_BYTES = _MIB
# How long an engine may take to report that it has ended a query.
_GRACE_SECONDS = 1.0
_PIECE = 64 * _MIB
# Signals with which a library ends its process if it gets no memory.
_OF_NO_MEMORY = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The limits of one answer."""

    rows: int
    seconds: float
    # Memory of the rows in this process. 100,000 rows of v_trial take about 300 MiB.
    answer_bytes: int = 512 * _MIB
    # Memory of the child process, in addition to what it inherits.
    memory_bytes: int = 1024 * _MIB
    # Size of one temporary file; SQLite sorts in such files.
    file_bytes: int = 4096 * _MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    truncated: bool  # there were more rows than wanted


def cut(answer: Generator[Sequence[Any], None, None], max_rows: int) -> Answer:
    """Take an answer in this process, for statements of this program."""
    columns = tuple(next(answer))
    rows: list[tuple[Any, ...]] = []
    for row in answer:
        if len(rows) == max_rows:
            return Answer(columns=columns, rows=rows, truncated=True)
        rows.append(tuple(row))
    return Answer(columns=columns, rows=rows, truncated=False)


def fetch(
    ask: Callable[[], Generator[Sequence[Any], None, None]],
    bounds: Bounds,
    mistakes: Sequence[type[Exception]],
) -> Answer:
    """Take an answer in a child process.

    Raises UsageInvalid if it exceeds a limit, and `mistakes` as `ask` raises them.
    """
    with _scratch_folder() as folder:
        return _fetch(ask, bounds, mistakes, folder)


@contextmanager
def _scratch_folder() -> Iterator[str | None]:
    """A folder for temporary files, which a killed child cannot remove. None: it cannot be made."""
    try:
        folder = tempfile.mkdtemp(prefix="sweep-query-")
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fetch(
    ask: Callable[[], Generator[Sequence[Any], None, None]],
    bounds: Bounds,
    mistakes: Sequence[type[Exception]],
    folder: str | None,
) -> Answer:
    parent = os.getpid()
    inbox, outbox = os.pipe()
    try:
        child = os.fork()
    except OSError as exc:
        os.close(inbox)
        os.close(outbox)
        raise StoreUnavailable(
            f"no process can be started for the query: {exc.strerror}. "
            "End others, or raise ulimit -u"
        ) from None
    if child == 0:
        os.close(inbox)
        tempfile.tempdir = folder
        _answer(ask, bounds, mistakes, parent, outbox)
    os.close(outbox)
    with (
        os.fdopen(inbox, "rb") as reply,
        _killed_after(child, bounds.seconds + _GRACE_SECONDS) as end,
    ):
        answer = _received(reply, mistakes)
    if answer is None:
        raise UsageInvalid(_why_none(end, bounds))
    return answer


@dataclass(kw_only=True, slots=True)
class _End:
    """The end of the child."""

    was_late: bool = False
    exit_code: int = 0  # -n: by signal n


@contextmanager
def _killed_after(child: int, seconds: float) -> Iterator[_End]:
    """Kill the child after a number of seconds, or when the block ends; yield its end."""
    found = _End()

    def end() -> None:
        found.was_late = True
        os.kill(child, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield found
    finally:
        timer.cancel()
        # Wait for a kill under way: until waitpid no other process can get the child's id.
        timer.join()
        os.kill(child, signal.SIGKILL)
        found.exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _received(reply: BufferedReader, mistakes: Sequence[type[Exception]]) -> Answer | None:
    """The answer; None: the child ended without one."""
    columns: tuple[str, ...] = ()
    rows: list[tuple[Any, ...]] = []
    for line in reply:
        match json.loads(line, object_hook=_value):
            case ["columns", names]:
                columns = tuple(names)
            case ["rows", batch]:
                rows += map(tuple, batch)
            case ["end", truncated]:
                return Answer(columns=columns, rows=rows, truncated=truncated)
            case ["mistake", name, message]:
                raise next(mistake for mistake in mistakes if mistake.__name__ == name)(message)
            case ["bug", message]:
                raise RuntimeError(message)
    return None


def _why_none(end: _End, bounds: Bounds) -> str:
    if end.was_late:
        return took_too_long(bounds.seconds)
    if end.exit_code >= 0 or -end.exit_code in _OF_NO_MEMORY:
        return _too_large(bounds)
    name = signal.Signals(-end.exit_code).name
    return (
        f"the process that ran the query was ended from outside ({name}); "
        "where the kernel ended it, the machine is short of memory"
    )


def took_too_long(seconds: float) -> str:
    return f"the query took longer than {seconds:g} s and was ended"


def _too_large(bounds: Bounds) -> str:
    memory = f"{bounds.memory_bytes // _MIB} MiB of memory"
    return f"the query needs more than {memory} and was ended; {ASK_FOR_LESS}"


ASK_FOR_LESS = "ask for fewer columns or rows, or for parts of long texts: substr(column, 1, 100)"


# In the child.


def _answer(
    ask: Callable[[], Generator[Sequence[Any], None, None]],
    bounds: Bounds,
    mistakes: Sequence[type[Exception]],
    parent: int,
    outbox: int,
) -> NoReturn:
    """Send the answer or an error, and exit: the child must not clean up for its parent."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        die_with(parent)
        _limit(bounds)
        with os.fdopen(outbox, "wb", buffering=0, closefd=False) as tell:
            try:
                _send_answer(tell, ask(), bounds)
            except tuple(mistakes) as exc:
                _send(tell, ["mistake", type(exc).__name__, str(exc)])
            except MemoryError:
                _send(tell, ["mistake", UsageInvalid.__name__, _too_large(bounds)])
            except Exception as exc:  # noqa: BLE001  # the parent raises it again
                _send(tell, ["bug", f"{type(exc).__name__}: {exc}"])
        code = 0
    finally:
        os._exit(code)


def _limit(bounds: Bounds) -> None:
    """Limit memory and temporary files. Stricter limits stay."""
    pages = (
        int(Path("/proc/self/statm").read_text().split()[0])
        if Path("/proc/self/statm").exists()
        else 0
    )
    wanted = {resource.RLIMIT_FSIZE: bounds.file_bytes, resource.RLIMIT_CORE: 0}
    if pages:
        wanted[resource.RLIMIT_AS] = pages * resource.getpagesize() + bounds.memory_bytes
    for kind, value in wanted.items():
        strictest = min(
            limit for limit in (value, *resource.getrlimit(kind)) if limit != resource.RLIM_INFINITY
        )
        resource.setrlimit(kind, (strictest, strictest))
    # With this signal ignored, a write beyond the limit raises an error.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _send_answer(tell: Any, answer: Generator[Sequence[Any], None, None], bounds: Bounds) -> None:
    _send(tell, ["columns", list(next(answer))])
    batch: list[list[Any]] = []
    total = in_batch = 0
    for number, row in enumerate(answer, start=1):
        if number > bounds.rows:
            _send_rows(tell, batch)
            # Close first: the parent kills this process at the end message, and a copy would stay.
            answer.close()
            _send(tell, ["end", True])
            return
        size = 64 + sum(map(_size, row))
        total += size
        if total > bounds.answer_bytes:
            answer.close()
            so_far = (
                f"after {number:,} rows the answer is larger than {bounds.answer_bytes // _MIB} MiB"
            )
            _send(tell, ["mistake", UsageInvalid.__name__, f"{so_far}; {ASK_FOR_LESS}"])
            return
        batch.append([_wire(value) for value in row])
        in_batch += size
        if in_batch > _BATCH_BYTES:
            _send_rows(tell, batch)
            batch, in_batch = [], 0
    _send_rows(tell, batch)
    _send(tell, ["end", False])


def _send_rows(tell: Any, batch: list[list[Any]]) -> None:
    if batch:
        _send(tell, ["rows", batch])


def _send(tell: Any, message: list[Any]) -> None:
    line = memoryview(
        (json.dumps(message, ensure_ascii=False, separators=(",", ":")) + "\n").encode(
            errors="surrogatepass"
        )
    )
    while line:
        line = line[tell.write(line[:_PIECE]) :]


def _size(value: Any) -> int:
    """The approximate memory of a value, with its place in the row."""
    if value is None or isinstance(value, bool):
        return 8
    if isinstance(value, int | float):
        return 40
    if isinstance(value, str | bytes):
        return 64 + len(value)
    if isinstance(value, dict):
        return 64 + sum(100 + len(str(name)) + _size(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return 64 + sum(map(_size, value))
    return 100


def _wire(value: Any) -> Any:
    """A value in JSON's types, which `_value` reads back; values of other types as text."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes() | bytearray() | memoryview():
            return {"bytes": bytes(value).hex()}
        case dt.datetime():
            return {"datetime": value.isoformat()}
        case dt.date():
            return {"date": value.isoformat()}
        case Decimal():
            return {"decimal": str(value)}
        case dict():
            return {"dict": [[str(name), _wire(item)] for name, item in value.items()]}
        case list() | tuple():
            return [_wire(item) for item in value]
        case _:
            return str(value)


def _value(tagged: dict[str, Any]) -> Any:
    ((kind, value),) = tagged.items()
    match kind:
        case "bytes":
            return bytes.fromhex(value)
        case "datetime":
            return dt.datetime.fromisoformat(value)
        case "date":
            return dt.date.fromisoformat(value)
        case "decimal":
            return Decimal(value)
        case _:
            return dict(value)
