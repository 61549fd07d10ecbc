"""Limits of the machine or shell get one line with the fix, at once; a bug stays a bug."""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.cli.store import home
from orchestrator.cli.terminal import surroundings
from orchestrator.cluster.ray import session_folder as ray_folder
from orchestrator.core.errors import MachineUnready, UsageInvalid

GIB = 1 << 30


def limited(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """As after ulimit; the test's own process keeps what it has."""
    kinds = {getattr(resource, name): most for name, most in limits.items()}
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda kind: (kinds.get(kind, resource.RLIM_INFINITY), resource.RLIM_INFINITY),
    )
    monkeypatch.setattr(surroundings, "_memory_bytes", lambda: 100 * GIB)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"RLIMIT_AS": 20 * GIB}, "ulimit -v leaves 20,480 MiB"),
        ({"RLIMIT_AS": 40 * GIB}, None),
        ({"RLIMIT_FSIZE": 20 * GIB}, "ulimit -f leaves 20,480 MiB"),
        ({"RLIMIT_FSIZE": 31 * GIB}, None),
        ({"RLIMIT_NOFILE": 48}, "ulimit -n leaves 48 open files"),
        ({"RLIMIT_NOFILE": 256}, None),
    ],
)
def test_limits_under_which_no_ray_starts_are_told_before_it_is_tried(
    limits: dict[str, int], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, **limits)
    surroundings.check()
    if says is None:
        surroundings.check_for_ray()
        return
    with pytest.raises(MachineUnready, match=says) as caught:
        surroundings.check_for_ray()
    assert caught.value.exit_code == 75 and "\n" not in str(caught.value)


def test_too_few_addresses_for_python_are_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited(monkeypatch, RLIMIT_AS=150 << 20)
    with pytest.raises(MachineUnready, match="ulimit -v leaves 150 MiB"):
        surroundings.check()


@pytest.mark.parametrize(
    ("exc", "says"),
    [
        (MemoryError(), "no memory left"),
        (OSError(errno.EMFILE, "Too many open files"), "too many open files"),
        (OSError(errno.EFBIG, "File too large"), "a file became too large"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no memory left"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            "cannot write /x/y: No space left on device",
        ),
        (
            UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed"),
            "contains the byte 0xff, which is not UTF-8",
        ),
        (UnicodeEncodeError("ascii", "ä", 0, 1, "ordinal not in range"), None),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory"),
            None,
        ),  # the folder is there: a bug
        (ValueError("?"), None),
    ],
)
def test_what_the_surroundings_cause_is_no_bug(exc: BaseException, says: str | None) -> None:
    known = surroundings.explain(exc)
    assert (known is None) if says is None else (known is not None and says in str(known))


def test_a_temporary_folder_too_long_for_sockets_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("t" * 60)
    long.mkdir()
    monkeypatch.setattr(ray_folder, "USUAL", (Path("/tmp"),))
    for asked in (str(long), str(tmp_path / "missing"), "/proc"):
        assert ray_folder.usable_parent({"TMPDIR": asked}) == Path("/tmp")
    assert ray_folder.usable_parent({}) == Path("/tmp")


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("/tmp/" + "t" * 60, "sockets would exceed 107 bytes; at most 22"),
        ("/proc/none", "No such file"),
        ("/proc", "cannot keep its session in RAY_TMPDIR=/proc"),
    ],
)
def test_the_folder_that_somebody_named_for_ray_is_refused_rather_than_replaced(
    folder: str, says: str
) -> None:
    with pytest.raises(MachineUnready, match=says):
        ray_folder.usable_parent({"RAY_TMPDIR": folder})


def test_a_folder_without_room_is_told_with_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_folder.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    with pytest.raises(MachineUnready, match="5 MiB are free, of 32 that it needs"):
        ray_folder.usable_parent({})


def test_the_paths_of_sockets_are_as_long_as_is_allowed_for() -> None:
    session = "ray/session_2026-11-23_03-36-06_454563_4194304"
    path = f"/{ray_folder.name(4194304)}/{session}/sockets/plasma_store"
    assert len(path) == ray_folder.SESSION_PATH_BYTES


def test_the_home_of_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEP_HOME", "~no-such-user/x")
    with pytest.raises(UsageInvalid, match="no user 'no-such-user'"):
        home.sweep_home()
