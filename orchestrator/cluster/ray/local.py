"""Starts a Ray of our own on this machine, without the services that only clusters need.

These are the autoscaler's monitor, the log monitor, the dashboard and the modules of its agent.
They take as long to start as all the rest (docs/decisions/local-ray.md), and they read logs and
devices while trials are timed. No option of `ray.init` leaves them out, so `lean_ray` replaces
private functions of Ray. If that fails in any way, the plain `ray.init` starts all of Ray.

No other module uses names that Ray does not document.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import ray

from orchestrator.cluster.ray.bounded_calls import first_line, within

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 15.0  # to disconnect from a failed start


def start(end_processes: Callable[[], None], **options: Any) -> None:
    """Start a local Ray and join it, lean if possible, plain otherwise.

    `end_processes` kills what a failed start leaves behind; `options` are those of `ray.init`.
    """
    # Ray's memory monitor would kill an agent for what its ranks use. Without it the kernel kills
    # a rank first, as the rank has asked (see rank_server).
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    # Otherwise Ray starts an idle Python process per core. A gang needs one agent, which Ray
    # starts on request.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # "local": never join a cluster that happens to run on this machine.
    options |= {"address": "local", "include_dashboard": False}
    try:
        with lean_ray():
            ray.init(**options)
    except Exception as exc:
        logger.warning(
            "The lean start of Ray failed (%s); all of Ray is started, which takes seconds more",
            first_line(exc),
        )
        # A shutdown that goes on in its thread would also end the next start.
        if not within(SHUTDOWN_SECONDS, ray.shutdown):
            raise
        end_processes()
        ray.init(**options)


@contextmanager
def lean_ray() -> Iterator[None]:
    """Leave the services out of each Ray that this process starts meanwhile.

    Replaces all of the functions or none. Raises if this Ray lacks one of them.
    """
    with ExitStack() as restored:
        for owner, name, ours in _replacements():
            restored.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, ours)
        yield


def stop_error_listener() -> None:
    """End Ray's thread that prints the cluster's errors.

    Once the head is gone, that thread polls without a pause and keeps a core busy.
    """
    try:
        import_module("ray._private.worker").global_worker.threads_stopped.set()
    except (ImportError, AttributeError) as exc:
        logger.debug("Ray's error listener goes on: %s", exc)


def _replacements() -> list[tuple[Any, str, Any]]:
    """Return the owner, the name and the replacement of each function."""
    parameter, services, utils = (
        import_module(f"ray._private.{name}") for name in ("parameter", "services", "utils")
    )
    if find_spec("ray.dashboard.utils") is None:
        raise ImportError("no module ray.dashboard.utils, which the agent replaces a function of")
    usual_python = services._build_python_executable_command_memory_profileable
    return [
        # As `ray start --no-monitor --include-log-monitor=false`.
        (
            parameter,
            "RayParams",
            partial(parameter.RayParams, no_monitor=True, include_log_monitor=False),
        ),
        # Ray starts the dashboard even without its pages. This returns no address and no process.
        (services, "start_api_server", lambda *_, **__: ("", None)),
        (
            services,
            "_build_python_executable_command_memory_profileable",
            partial(_python_command, usual_python),
        ),
        # As in a Ray without its extra `default`: the agent serves no pages, and Ray need not
        # import the dashboard to see whether it is installed.
        (utils, "get_dashboard_dependency_error", lambda: ImportError("no dashboard is wanted")),
    ]


def _python_command(
    usual: Callable[..., list[str]], component: str, *args: Any, **options: Any
) -> list[str]:
    """Return how Ray calls Python for one of its programs, whose path and options follow."""
    command = usual(component, *args, **options)
    # With -m in it, a profiler runs the program. -P: import nothing from the current folder.
    if component == "dashboard_agent" and "-m" not in command:
        return [*command, "-P", "-c", _AGENT_WITHOUT_MODULES]
    return command


# A raylet ends without its dashboard agent, but the agent runs without its modules.
# These read logs, and poll the dashboard every second and all devices every five.
_AGENT_WITHOUT_MODULES = (
    "import runpy, sys; from ray.dashboard import utils; utils.get_all_modules = lambda _: [];"
    " del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
