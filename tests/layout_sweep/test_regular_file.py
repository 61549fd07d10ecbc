"""A file of a program is read without waiting, whatever the program made of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from layout_sweep.regular_file import read_regular


def test_a_part_of_a_file_is_read_with_what_the_file_is_now(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    os.utime(path, ns=(1, 2))
    found = read_regular(path, offset=2, num_bytes=3)
    assert (found.content, found.size, found.changed_at_ns) == (b"cde", 6, 2)
    assert read_regular(path, offset=4, num_bytes=100).content == b"ef"


def test_a_link_to_a_regular_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", num_bytes=1).content == b"a"


def test_a_fifo_that_nobody_writes_and_a_device_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is no regular file"):
            read_regular(path, num_bytes=1)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "missing", num_bytes=1)
