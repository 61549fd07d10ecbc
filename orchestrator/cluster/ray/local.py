"""A Ray of our own on this machine, without what only clusters need: the autoscaler's monitor, the log monitor, the dashboard and its agent's modules.

They take as long to start as all the rest of it (docs/decisions/local-ray.md), and look at logs and devices while trials are timed. No
option of `ray.init` reaches what has to be switched for that; a Ray that has one of these switches no more starts as it is.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import parameter, services, utils

from orchestrator.core.trial.rank_environment import ray_environment


def start(**options: Any) -> None:
    """Start it, and join it. `options`: of `ray.init`."""
    # Ray's memory monitor would kill an agent for what its ranks use; the kernel takes a rank, which offers itself (see rank_server).
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    # Else Ray begins with an idle Python process per core of the machine; a gang needs one agent, which has one started for it.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    with bare():
        ray.init(
            address="local", include_dashboard=False, **options
        )  # "local": never a cluster that happens to run on this machine


@contextmanager
def bare() -> Iterator[None]:
    """What this process starts of Ray meanwhile, it starts without them."""
    switches = [(owner, name, ours) for owner, name, ours in _SWITCHES if hasattr(owner, name)]
    usual = [(owner, name, getattr(owner, name)) for owner, name, _ in switches]
    try:
        for owner, name, ours in switches:
            setattr(owner, name, ours)
        yield
    finally:
        for owner, name, theirs in usual:
            setattr(owner, name, theirs)


class _Parameters(parameter.RayParams):
    """As of `ray start --no-monitor --include-log-monitor=false`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"no_monitor": True, "include_log_monitor": False})


def _no_dashboard(*_: Any, **__: Any) -> tuple[str, None]:
    """Its address, and its process. Without its pages it is still started, to report how Ray is used."""
    return "", None


def _not_installed() -> Exception:
    """As in a Ray that was installed without its extra `default`: else it is imported to see whether it is there, and the node's agent serves it."""
    return ImportError("a local Ray has no dashboard")


def _python(component: str, *args: Any, **options: Any) -> list[str]:
    """How Python is called for one of Ray's own programs, whose path and options follow."""
    usual: list[str] = _USUAL_PYTHON(component, *args, **options)
    is_plain = "-m" not in usual  # else a profiler runs it
    # -P: of the folder that the sweep was started in nothing is imported.
    return (
        [*usual, "-P", "-c", _WITHOUT_MODULES]
        if component == "dashboard_agent" and is_plain
        else usual
    )


# A raylet ends without its dashboard agent; the modules of that read logs, ask for the dashboard once a second, and for all devices every five.
_WITHOUT_MODULES = (
    "import runpy, sys; from ray.dashboard import utils; utils.get_all_modules = lambda _: [];"
    " del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
_UsualPopen: Any = getattr(services, "ConsolePopen", subprocess.Popen)


class _NarrowPopen(_UsualPopen):  # type: ignore[misc]  # which class that is, Ray decides
    """Shows Ray's processes, and so all that they start, what ranks may see and Ray's own switches: not the database, no secret."""

    def __init__(self, *args: Any, env: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(*args, env=ray_environment(os.environ if env is None else env), **options)


_USUAL_PYTHON: Any = getattr(services, "_build_python_executable_command_memory_profileable", None)

_SWITCHES: tuple[tuple[Any, str, Any], ...] = (
    (parameter, "RayParams", _Parameters),
    (services, "start_api_server", _no_dashboard),
    (services, "_build_python_executable_command_memory_profileable", _python),
    (services, "ConsolePopen", _NarrowPopen),
    (utils, "get_dashboard_dependency_error", _not_installed),
)
