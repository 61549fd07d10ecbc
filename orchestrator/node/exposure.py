"""Reads what this machine shows of Ray: its programs' sockets, its token, its version.

See core/machines/exposure.py for what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import psutil

from orchestrator.core.machines.exposure import METRICS, Listener, RayFacts
from orchestrator.core.trial.rank_environment import holds_secret

# Ray's processes, by the file name of one of the first words of their command lines: a path, a
# script or module that Python runs, or a title that Ray sets.
_PROGRAMS = {
    "gcs_server": "gcs_server",
    "raylet": "raylet",
    "dashboard.py": "dashboard",
    "ray::DashboardAgent": "dashboard agent",
    "ray::RuntimeEnvAgent": "runtime environment agent",
    "ray.util.client.server": "client server",
}
_FIRST_WORDS = 3
# A process with such a title has overwritten its environment with it.
_TITLE = "ray::"
# The port of the dashboard's counters, unless DASHBOARD_METRIC_PORT names another. Ray binds every
# interface, whatever its options say.
_METRICS_PORT = "44227"


def ray_facts(environment: Mapping[str, str], *, cluster_address: str | None = None) -> RayFacts:
    """`environment` is this program's. Raises PackageNotFoundError if Ray is not installed."""
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        mode = path.stat().st_mode & 0o777
        characters = len(path.read_text(errors="replace").strip())
    except OSError:
        mode, characters = None, None
    host = (cluster_address or "").rpartition(":")[0].strip("[]")
    return RayFacts(
        version=metadata.version("ray"),
        auth_mode=environment.get("RAY_AUTH_MODE"),
        token_in_environment=bool(environment.get("RAY_AUTH_TOKEN")),
        token_file=str(path),
        token_file_mode=mode,
        token_characters=characters,
        listeners=sorted(_listeners(), key=lambda one: (one.program, one.port)),
        cluster_host=host if cluster_address not in (None, "auto") else None,
    )


def secrets_of_raylets() -> dict[int, list[str]]:
    """Variables that look like secrets in each raylet that this user may read, by process id."""
    found: dict[int, list[str]] = {}
    for process in psutil.process_iter():
        if _program(process) == "raylet":
            variables = _environment(process) or {}
            names = sorted(
                name
                for name, value in variables.items()
                if holds_secret(name, value) or name == "SWEEP_DB"
            )
            found |= {process.pid: names} if names else {}
    return found


def _listeners() -> Iterator[Listener]:
    """Return the listening sockets of all Ray programs that this user may inspect."""
    for process in psutil.process_iter():
        program = _program(process)
        if program is None:
            continue
        mode = _auth_mode(process)
        for address, port in sorted(listening_at(process)):
            is_metrics = program == "dashboard" and _is_of_metrics(process, port)
            yield Listener(
                program=METRICS if is_metrics else program,
                address=address,
                port=port,
                auth_mode=mode,
            )


def listening_at(process: psutil.Process) -> set[tuple[str, int]]:
    """Addresses and ports at which a process accepts connections, if this user may know them."""
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return set()
    return {
        (one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN
    }


def _is_of_metrics(process: psutil.Process, port: int) -> bool:
    """True if a dashboard serves its counters there, and does not accept jobs there."""
    metrics_port = (_environment(process) or {}).get("DASHBOARD_METRIC_PORT") or _METRICS_PORT
    return str(port) == metrics_port and f"--port={port}" not in _command_line(process)


def _program(process: psutil.Process) -> str | None:
    names = [Path(word).name for word in _command_line(process)[:_FIRST_WORDS]]
    return next((_PROGRAMS[name] for name in names if name in _PROGRAMS), None)


def _auth_mode(process: psutil.Process) -> str | None:
    """RAY_AUTH_MODE, by default Ray's: disabled. None: we may not read its environment."""
    if "".join(_command_line(process)[:1]).startswith(_TITLE):
        # The raylet that started it has the environment that the title replaced.
        try:
            parent = process.parent()
        except psutil.Error:
            return None
        return _auth_mode(parent) if parent and _program(parent) == "raylet" else None
    environment = _environment(process)
    return None if environment is None else environment.get("RAY_AUTH_MODE") or "disabled"


def _command_line(process: psutil.Process) -> list[str]:
    """Empty if the process has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _environment(process: psutil.Process) -> dict[str, str] | None:
    """None if the process has ended, or we may not read it."""
    try:
        return dict(process.environ())
    except psutil.Error:
        return None
