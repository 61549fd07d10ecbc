"""Stdin, stdout and stderr as this process was given them: closed, full, or read by somebody who goes away.

A remark that cannot be written is lost, and nothing else with it. An answer that cannot be written raises OutputLost.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys

BUFFER_BYTES = 1 << 16


class OutputLost(Exception):
    """Stdout takes no more. What a sweep has measured is in its store all the same."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror)
        self.is_closed = cause.errno in (errno.EPIPE, errno.EBADF)
        self.reason = cause.strerror or type(cause).__name__


def take_over() -> None:
    """Put streams that keep these promises in place of Python's. Streams that a test has put there stay."""
    _fill_closed()
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Answers(1), sys.stdout, line_buffering=os.isatty(1))
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Remarks(2), sys.stderr, line_buffering=True)


def give_up_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's last flush says nothing."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # a stdout without a file behind it
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # stays open until the end


class _Descriptor(io.RawIOBase):
    """A descriptor that is never closed here: others write to it as well."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True


class _Answers(_Descriptor):
    def write(self, data: bytes) -> int:  # type: ignore[override]  # whatever its buffer hands it
        while True:
            try:
                return os.write(self._number, data)
            except (
                BlockingIOError
            ):  # whoever shares the descriptor has made it so: wait, as it is usual
                select.select([], [self._number], [])
            except OSError as exc:
                raise OutputLost(exc) from None


class _Remarks(_Descriptor):
    def write(self, data: bytes) -> int:  # type: ignore[override]  # as above
        try:
            return os.write(self._number, data)
        except OSError:  # full, closed, or its reader is gone: nobody can be told
            return len(data)


def _text(raw: _Descriptor, before: object, *, line_buffering: bool) -> io.TextIOWrapper:
    encoding = before.encoding if isinstance(before, io.TextIOWrapper) else "utf-8"
    # A terminal without UTF-8 shows `?` for `±`, and that is no error.
    return io.TextIOWrapper(
        io.BufferedWriter(raw, BUFFER_BYTES),
        encoding=encoding,
        errors="replace",
        line_buffering=line_buffering,
    )


def _fill_closed() -> None:
    """Open what is closed: else the store, or a socket, would get its number, and a library's remark would be written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            if number == 1:
                _open_without_reader()
            else:
                os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def _open_without_reader() -> None:
    """As if whoever reads stdout had gone away."""
    reader, writer = os.pipe()
    if reader == 1:
        reader = os.dup(reader)
    os.dup2(writer, 1)
    for number in {reader, writer} - {1}:
        os.close(number)
