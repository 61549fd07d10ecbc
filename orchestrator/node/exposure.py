"""What there is to see of Ray on this machine: its programs' sockets, its token, the versions. See core/machines/exposure.py for what is wrong with them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from orchestrator.core.machines.exposure import METRICS, Listener, RayFacts
from orchestrator.core.trial.rank_environment import holds_secret

# By the file name of one of the first words of their command lines: a path, a script or module that Python runs, or a title of Ray's.
_PROGRAMS = {
    "gcs_server": "gcs_server",
    "raylet": "raylet",
    "dashboard.py": "dashboard",
    "ray::DashboardAgent": "dashboard agent",
    "ray::RuntimeEnvAgent": "runtime environment agent",
    "ray.util.client.server": "client server",
}
# Of the dashboard's counters, where DASHBOARD_METRIC_PORT names no other: Ray binds every interface, whatever it is told.
_METRICS_PORT = "44227"
_TITLE = b"ray::"  # how the title of a program begins that has one
_FIRST_WORDS = 3
_LISTENING = "0A"  # the state of a socket in /proc/net/tcp


def look(environment: Mapping[str, str], *, cluster_address: str | None = None) -> RayFacts:
    """`environment`: of this program. Raises PackageNotFoundError where Ray is not installed."""
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        mode, characters = (
            path.stat().st_mode & 0o777,
            len(path.read_text(errors="replace").strip()),
        )
    except OSError:
        mode, characters = None, None
    host = (
        cluster_address.rpartition(":")[0].strip("[]")
        if cluster_address not in (None, "auto")
        else None
    )
    return RayFacts(
        version=metadata.version("ray"),
        auth_mode=environment.get("RAY_AUTH_MODE"),
        token_in_environment=bool(environment.get("RAY_AUTH_TOKEN")),
        token_file=str(path),
        token_file_mode=mode,
        token_characters=characters,
        listeners=sorted(_listeners(), key=lambda one: (one.program, one.port)),
        cluster_host=host,
    )


def secrets_of_raylets() -> dict[int, list[str]]:
    """Find the variables that look like secrets in every Ray on this machine that this user may inspect, by process id."""
    found: dict[int, list[str]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _program(folder) == "raylet":
            variables = dict(
                pair.partition("=")[::2] for pair in map(os.fsdecode, _environment(folder))
            )
            names = sorted(
                name
                for name, value in variables.items()
                if holds_secret(name, value) or name == "SWEEP_DB"
            )
            found |= {int(folder.name): names} if names else {}
    return found


def _listeners() -> Iterator[Listener]:
    """Find the listening sockets of Ray's programs, whoever started them, that this user may inspect."""
    sockets = dict(listening_sockets())
    for folder in Path("/proc").iterdir():
        program = _program(folder) if folder.name.isdigit() else None
        if program is None:
            continue
        mode = _auth_mode(folder)
        for inode in sockets_of(folder) & sockets.keys():
            address, port = sockets[inode]
            is_metrics = program == "dashboard" and _is_of_metrics(folder, port)
            yield Listener(
                program=METRICS if is_metrics else program,
                address=address,
                port=port,
                auth_mode=mode,
            )


def _is_of_metrics(folder: Path, port: int) -> bool:
    """Whether a dashboard tells its counters there, and does not take jobs there, as its command line says."""
    takes_jobs = f"--port={port}" in (os.fsdecode(word) for word in _words(folder))
    return (
        str(port) == (_variable(folder, "DASHBOARD_METRIC_PORT") or _METRICS_PORT)
        and not takes_jobs
    )


def _program(folder: Path) -> str | None:
    names = [Path(os.fsdecode(word)).name for word in _words(folder)[:_FIRST_WORDS]]
    return next((_PROGRAMS[name] for name in names if name in _PROGRAMS), None)


def _words(folder: Path) -> list[bytes]:
    """The words of a process's command line; none where it has ended."""
    try:
        return (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _auth_mode(folder: Path) -> str | None:
    """Unset is Ray's default, none; None: its environment is not ours to read."""
    try:
        if (
            (folder / "cmdline").read_bytes().startswith(_TITLE)
        ):  # written over its environment: it has that of the raylet that started it
            parent = _parent(folder)
            return _auth_mode(parent) if _program(parent) == "raylet" else None
    except OSError:
        return None
    found = _variable(folder, "RAY_AUTH_MODE")
    return "disabled" if found == "" else found


def _variable(folder: Path, name: str) -> str | None:
    """The value of a variable in a process's environment, empty where it is not set; None: not ours to read."""
    pairs = _environment(folder)
    if not pairs:
        return None
    start = f"{name}=".encode()
    return next(
        (os.fsdecode(pair.removeprefix(start)) for pair in pairs if pair.startswith(start)), ""
    )


def _environment(folder: Path) -> list[bytes]:
    """The NAME=VALUE pairs of a process's environment; empty where it is not ours to read."""
    try:
        return (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _parent(folder: Path) -> Path:
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return folder.with_name(fields[1])  # field 4 of proc(5)


def sockets_of(folder: Path) -> set[str]:
    """The sockets that a process holds, by inode, as far as this user may look into its folder of /proc."""
    found = set()
    try:
        for link in (folder / "fd").iterdir():
            target = os.readlink(link)  # noqa: PTH115  a socket's target is no path
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    except OSError:
        return found  # it has ended, or is another user's
    return found


def listening_sockets() -> Iterator[tuple[str, tuple[str, int]]]:
    """Every socket of this network namespace that takes connections: its inode, its address and its port."""
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENING:
                address, _, port = words[1].partition(":")
                yield words[9], (_address(address, family), int(port, 16))


def _address(text: str, family: socket.AddressFamily) -> str:
    """The kernel writes addresses as hexadecimal words of this machine's byte order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
