"""Fetches an answer in a process of its own, which is killed when it takes too long and cannot take more than its share of memory.

One call of SQLite's C code cannot be interrupted, and a driver holds a whole row before it gives one. It knows no SQL: what is
asked is a function that yields the names of the columns and then rows.
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
_GRACE_SECONDS = 1.0  # an engine that ends a query by itself says so within this time
_PIECE = 64 * _MIB
_OF_NO_MEMORY = (
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGBUS,
)  # how a library ends its process that cannot have more


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What one answer may take."""

    rows: int
    seconds: float
    # Of the rows, as this process holds them. 100,000 rows of v_trial take about 300 MiB.
    answer_bytes: int = 512 * _MIB
    # Of the process that fetches them, above what it inherits.
    memory_bytes: int = 1024 * _MIB
    # Of one temporary file: SQLite sorts there.
    file_bytes: int = 4096 * _MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    truncated: bool  # there were more rows than were wanted


def cut(answer: Generator[Sequence[Any], None, None], max_rows: int) -> Answer:
    """Take an answer whole, in this process: for statements of this program."""
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
    """Take an answer in a child process. Raises UsageInvalid when it exceeds a bound, and `mistakes` as `ask` raises them."""
    with _scratch_folder() as folder:
        return _fetch(ask, bounds, mistakes, folder)


@contextmanager
def _scratch_folder() -> Iterator[str | None]:
    """Where the child makes temporary files: one that is killed removes none. None: there is no room for a folder."""
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
            f"no process can be started for the query: {exc.strerror}. End others, or raise ulimit -u"
        ) from None
    if child == 0:
        os.close(inbox)
        tempfile.tempdir = folder
        _answer(ask, bounds, mistakes, parent, outbox)
    os.close(outbox)
    with (
        os.fdopen(inbox, "rb") as told,
        _killed_after(child, bounds.seconds + _GRACE_SECONDS) as end,
    ):
        answer = _received(told, mistakes)
    if answer is None:
        raise UsageInvalid(_why_none(end, bounds))
    return answer


@dataclass(kw_only=True, slots=True)
class _End:
    """How the child ended."""

    was_late: bool = False
    exit_code: int = 0  # -n: by signal n


@contextmanager
def _killed_after(child: int, seconds: float) -> Iterator[_End]:
    """The child is gone when this ends, and what is yielded tells how it ended. One that has ended by itself is not killed again."""
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
        # A kill under way is waited for: before waitpid no other process can have the child's number.
        timer.join()
        os.kill(child, signal.SIGKILL)
        found.exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _received(told: BufferedReader, mistakes: Sequence[type[Exception]]) -> Answer | None:
    """The answer; None where the child ended without one."""
    columns: tuple[str, ...] = ()
    rows: list[tuple[Any, ...]] = []
    for line in told:
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
    return f"the process that ran the query was ended from outside ({name}); where the kernel ended it, the machine is short of memory"


def took_too_long(seconds: float) -> str:
    return f"the query took longer than {seconds:g} s and was ended"


def _too_large(bounds: Bounds) -> str:
    return f"the query needs more than {bounds.memory_bytes // _MIB} MiB of memory and was ended; {ASK_FOR_LESS}"


ASK_FOR_LESS = "ask for fewer columns or rows, or for parts of long texts: substr(column, 1, 100)"


# In the child.


def _answer(
    ask: Callable[[], Generator[Sequence[Any], None, None]],
    bounds: Bounds,
    mistakes: Sequence[type[Exception]],
    parent: int,
    outbox: int,
) -> NoReturn:
    """Send the answer, or why there is none. It never returns: what the parent has under way is not the child's to clean up."""
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
            except Exception as exc:  # noqa: BLE001  # raised again in the parent, which tells of it
                _send(tell, ["bug", f"{type(exc).__name__}: {exc}"])
        code = 0
    finally:
        os._exit(code)


def _limit(bounds: Bounds) -> None:
    """Bound memory, and temporary files. A limit that is stricter already stays."""
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
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit is an error


def _send_answer(tell: Any, answer: Generator[Sequence[Any], None, None], bounds: Bounds) -> None:
    _send(tell, ["columns", list(next(answer))])
    batch: list[list[Any]] = []
    total = in_batch = 0
    for number, row in enumerate(answer, start=1):
        if number > bounds.rows:
            _send_rows(tell, batch)
            # Before the end is told, since the parent then kills this process: a copied file would stay.
            answer.close()
            _send(tell, ["end", True])
            return
        size = 64 + sum(map(_held_bytes, row))
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


def _held_bytes(value: Any) -> int:
    """About what a value takes where it is held, its place in the row included."""
    if value is None or isinstance(value, bool):
        return 8
    if isinstance(value, int | float):
        return 40
    if isinstance(value, str | bytes):
        return 64 + len(value)
    if isinstance(value, dict):
        return 64 + sum(100 + len(str(name)) + _held_bytes(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return 64 + sum(map(_held_bytes, value))
    return 100


def _wire(value: Any) -> Any:
    """A value as JSON's types, such that `_value` gives it back. What nothing here needs as itself goes as its text."""
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
