"""Stdin, stdout and stderr that may be closed, full, or lose their reader.

What cannot be written to stderr is dropped. What cannot be written to stdout raises OutputLost.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys

BUFFER_BYTES = 1 << 16


class OutputLost(Exception):
    """Stdout cannot be written. The results of a sweep are in its store all the same."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror)
        self.is_closed = cause.errno in (errno.EPIPE, errno.EBADF)
        self.reason = cause.strerror or type(cause).__name__


def take_over() -> bool:
    """Replace Python's streams by ones that behave so. Streams of a test stay.

    Return whether stdout was open.
    """
    was_open = _fill_closed()
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Stdout(1), sys.stdout, line_buffering=os.isatty(1))
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Stderr(2), sys.stderr, line_buffering=True)
    return was_open


def give_up_stdout() -> None:
    """Send what is still buffered to /dev/null, so that the interpreter's last flush succeeds."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        # A stdout without a file behind it.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # stays open until the end


class _Descriptor(io.RawIOBase):
    """A descriptor that is never closed here, because others write to it too."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True


class _Stdout(_Descriptor):
    def write(self, data: bytes) -> int:  # type: ignore[override]  # its buffer writes bytes
        while True:
            try:
                return os.write(self._number, data)
            except BlockingIOError:  # another process has made it non-blocking
                select.select([], [self._number], [])
            except OSError as exc:
                raise OutputLost(exc) from None


class _Stderr(_Descriptor):
    def write(self, data: bytes) -> int:  # type: ignore[override]  # as above
        try:
            return os.write(self._number, data)
        except OSError:  # full, closed, or without a reader
            return len(data)


def _text(raw: _Descriptor, before: object, *, line_buffering: bool) -> io.TextIOWrapper:
    encoding = before.encoding if isinstance(before, io.TextIOWrapper) else "utf-8"
    # A terminal without UTF-8 shows `?` for `±`.
    return io.TextIOWrapper(
        io.BufferedWriter(raw, BUFFER_BYTES),
        encoding=encoding,
        errors="replace",
        line_buffering=line_buffering,
    )


def _fill_closed() -> bool:
    """Open closed streams: else the store could get their number, and a library write into it.

    Return whether stdout was open.
    """
    was_open = True
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            if number == 1:
                was_open = False
                _open_without_reader()
            else:
                os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    return was_open


def _open_without_reader() -> None:
    """Make stdout a pipe without a reader."""
    reader, writer = os.pipe()
    if reader == 1:
        reader = os.dup(reader)
    os.dup2(writer, 1)
    for number in {reader, writer} - {1}:
        os.close(number)
