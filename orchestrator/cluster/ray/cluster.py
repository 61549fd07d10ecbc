"""One Ray cluster, as its driver sees it: connecting, its nodes, and whether its head answers."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.placement_group import placement_group

from layout_sweep.start import ROOT
from orchestrator.cluster.contract import Slots
from orchestrator.cluster.ray import local
from orchestrator.cluster.ray.bounded_calls import first_line, within
from orchestrator.cluster.ray.guard import RayGuard
from orchestrator.cluster.ray.head_watch import why_unreachable
from orchestrator.cluster.ray.node_names import NodeNames
from orchestrator.core.errors import ClusterUnavailable
from orchestrator.core.machines.packing import Shape
from orchestrator.core.problem.device_name import driver_name_of
from orchestrator.core.trial.protocol import Device
from orchestrator.node.gpu_monitor import device_name

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

CONNECT_SECONDS = 5.0
AWAIT_SECONDS = 1.0  # between two requests for the nodes
HEAD_SECONDS = 15.0  # for an answer that takes milliseconds
# Ray notices a killed node after 13 s (docs/decisions/leases.md).
DOUBT_SECONDS = 20.0
# Ray notices a node whose network is cut after 64 s. Its agent has been silent for 20 s by then.
CUT_OFF_SECONDS = 60.0


def connect(address: str | None, guard: RayGuard | None = None) -> None:
    """Join a cluster, or start a local one under its guard. Raises ClusterUnavailable."""
    # Lets actors that declare no GPU see those that the launcher gives them by setting
    # CUDA_VISIBLE_DEVICES itself.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": "layout-sweep",
    }
    if address is not None:
        _check_port(address)
    began = time.monotonic()
    try:
        with _own_handler_of_sigterm(), _in_own_folder():
            if guard is not None:
                with guard.starting():
                    local.start(guard.end_processes, **options)
            else:
                ray.init(address=address, **options)
    # Ray raises many kinds, even a bare Exception. Each means that there is no cluster.
    except Exception as exc:
        if address is None:
            raise ClusterUnavailable(_why_not_local(exc, time.monotonic() - began)) from exc
        raise ClusterUnavailable(
            f"no connection to {address}: {first_line(exc)}. Is the address right, and does"
            " RAY_AUTH_TOKEN_PATH name the cluster's token (RAY_AUTH_MODE=token)?"
        ) from exc
    local.stop_error_listener()
    _protect_token()


def _why_not_local(exc: Exception, seconds: float) -> str:
    """Say what to do about a local Ray that did not start, and in a second line what it said.

    Its own logs are removed with its folder, and no setting makes Ray wait longer.
    """
    return (
        f"a local Ray did not start: it failed after {seconds:.0f} s. If this machine is busy, give"
        " the same command later. If it happens again, start Ray yourself (ray start --head), read"
        " its logs in /tmp/ray/session_latest/logs (raylet.out, gcs_server.out), and add"
        f" --ray-address auto\nthe cause: {first_line(exc)}"
    )


@contextmanager
def _in_own_folder() -> Iterator[None]:
    """Work in the folder of our packages meanwhile.

    Ray puts the driver's working folder before all others that its workers import from, and a local
    Ray works there.
    """
    before = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        os.chdir(ROOT)
        yield
    finally:
        os.fchdir(before)
        os.close(before)


@contextmanager
def _own_handler_of_sigterm() -> Iterator[None]:
    """Restore our handler: Ray installs one that ends this process with code 15.

    Passes a SIGTERM that comes meanwhile to ours.
    """
    before = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    was_rays = False
    try:
        yield
    except SystemExit as exc:
        was_rays = exc.code == signal.SIGTERM
        if not was_rays:
            raise
    finally:
        if is_main and before is not None:
            signal.signal(signal.SIGTERM, before)
    if was_rays:
        signal.raise_signal(signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM)


def await_nodes(
    address: str,
    shape: Shape,
    device: Device,
    *,
    patience_seconds: float,
    give_up: Callable[[], bool],
) -> bool:
    """Wait until a cluster can hold a gang of this shape: its nodes are starting.

    An autoscaler starts nodes for a placement group that waits; ours ends with this connection.
    Returns False if `give_up` says so. Raises ClusterUnavailable if there is no cluster, or the
    time is over.
    """
    connect(address)
    try:
        nodes = answered(lambda: ClusterNodes.of(device, shape.slots_per_node))
        if not nodes.slots.hold(shape):
            strategy = "STRICT_SPREAD" if shape.num_nodes > 1 else "STRICT_PACK"
            bundles = [bundle(shape.slots_per_node, device)] * shape.num_nodes
            answered(lambda: placement_group(bundles, strategy=strategy))
        until = time.monotonic() + patience_seconds
        while not nodes.slots.hold(shape):
            if give_up():
                return False
            if time.monotonic() > until:
                raise ClusterUnavailable(
                    f"after {patience_seconds:.0f} s the cluster has nodes of"
                    f" {nodes.slots.by_size} slots; {shape.num_nodes} x {shape.slots_per_node} are"
                    " needed. Is the autoscaler's upper limit high enough? `ray status` tells what"
                    " it waits for"
                )
            time.sleep(AWAIT_SECONDS)
            answered(nodes.refresh)
        return True
    finally:
        within(HEAD_SECONDS, ray.shutdown)


def bundle(num_slots: int, device: Device) -> dict[str, float]:
    """Return the resources that these slots of a node are to Ray, with a core for the agent."""
    if device is Device.CUDA:
        return {"GPU": float(num_slots), "CPU": 1.0}
    return {"CPU": float(num_slots)}


@dataclass(eq=False)
class ClusterNodes:
    """The nodes of the cluster as Ray knows them, by name (node_names.py)."""

    device: Device
    device_name: str | None
    gpus_per_node: int | None  # used slots at most
    _names: NodeNames = field(default_factory=NodeNames)
    _ids: dict[str, str] = field(default_factory=dict)  # name -> Ray's last id
    _alive: dict[str, int] = field(default_factory=dict)  # name -> slots
    _doubted: dict[str, float] = field(default_factory=dict)  # name -> unused until (monotonic)
    _slots: Slots = field(init=False)

    @classmethod
    def of(cls, device: Device | None, gpus_per_node: int | None) -> ClusterNodes:
        """Return the present nodes. Without a device: by GPUs if any node has some, else cores."""
        resources = [node["Resources"] for node in _alive_nodes()]
        if device is None:
            has_gpus = any(each.get("GPU") for each in resources)
            device = Device.CUDA if has_gpus else Device.CPU
        prefix = "accelerator_type:"
        kinds = (key for each in resources for key in each if key.startswith(prefix))
        of_ray = next(kinds, prefix).removeprefix(prefix) or None
        name = driver_name_of(of_ray, among=device_name()) if device is Device.CUDA else None
        found = cls(device=device, device_name=name, gpus_per_node=gpus_per_node)
        found.refresh()
        return found

    @property
    def slots(self) -> Slots:
        """The nodes at the last `refresh` or `doubt`."""
        return self._slots

    def refresh(self) -> None:
        """Ask Ray for the present nodes."""
        resource = "GPU" if self.device is Device.CUDA else "CPU"
        nodes = {
            node["NodeID"]: node
            for node in _alive_nodes()
            if node["Resources"].get(resource, 0) >= 1
        }
        names = self._names.update(
            {node_id: node["NodeManagerHostname"] for node_id, node in nodes.items()},
            time.monotonic(),
        )
        self._alive = {}
        for node_id, name in names.items():
            count = int(nodes[node_id]["Resources"][resource])
            self._alive[name] = min(count, self.gpus_per_node or count)
            self._ids[name] = node_id
        self._count()

    def doubt(self, name: str, *, seconds: float = DOUBT_SECONDS) -> None:
        """Do not use a node for a while: its agent does not answer, and Ray may notice late."""
        self._doubted[name] = max(self._doubted.get(name, 0.0), time.monotonic() + seconds)
        self._count()

    def is_alive(self, node_id: str) -> bool:
        """Return whether Ray lists the node, doubted or not."""
        return any(self._ids[name] == node_id for name in self._alive)

    def id_of(self, name: str) -> str:
        """Return Ray's id of the last node of this name; a node gets a new one at each start."""
        return self._ids[name]

    def _count(self) -> None:
        now = time.monotonic()
        self._doubted = {name: until for name, until in self._doubted.items() if until > now}
        self._slots = Slots(
            device=self.device,
            device_name=self.device_name,
            nodes={name: count for name, count in self._alive.items() if name not in self._doubted},
            # Without GPUs trials share caches and memory bandwidth: one at a time disturbs none.
            usual_at_once=1 if self.device is Device.CPU else None,
        )


def _alive_nodes() -> list[dict[str, Any]]:
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return sorted(nodes, key=lambda node: (node["NodeManagerHostname"], node["NodeID"]))


class RayHead:
    """The head of the cluster. It is gone for good once a call times out, or our local Ray ends."""

    def __init__(self, guard: RayGuard | None) -> None:
        self._guard, self._is_lost = guard, False

    @property
    def is_gone(self) -> bool:
        return self._is_lost or self._has_ended()

    def _has_ended(self) -> bool:
        return self._guard is not None and self._guard.ray_is_gone()

    def ask(self, call: Callable[[], _T]) -> _T:
        """Return the answer. Raises ClusterUnavailable if the head is gone."""
        try:
            return answered(call, should_give_up=self._has_ended)
        except ClusterUnavailable:
            self._is_lost = True
            raise

    def lost(self) -> None:
        """Note that the head is gone, as something else shows."""
        self._is_lost = True


def answered(call: Callable[[], _T], *, should_give_up: Callable[[], bool] = lambda: False) -> _T:
    """Return the head's answer. Raises ClusterUnavailable if the head is gone.

    Ray itself would wait for a minute, and then end this process. `should_give_up` returns whether
    there is no point in waiting any longer.
    """
    answer: Future[_T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except Exception as exc:  # noqa: BLE001  raised again in the caller's thread
            answer.set_exception(exc)

    if within(HEAD_SECONDS, ask, should_give_up=should_give_up):
        return answer.result(timeout=0)
    if should_give_up():
        raise ClusterUnavailable(
            "the local Ray was ended from outside. Nothing acknowledged is lost;"
            " the same command continues"
        )
    raise ClusterUnavailable(
        f"the head of the Ray cluster has not answered for {HEAD_SECONDS:.0f} s: it is gone."
        " Nothing acknowledged is lost; the same command continues once a cluster is there again"
    )


def _check_port(address: str) -> None:
    """Raise ClusterUnavailable at once if nothing listens there; Ray would try for minutes."""
    if not address.rpartition(":")[2].isdigit() or "://" in address:
        return
    unreachable = why_unreachable(address, timeout_seconds=CONNECT_SECONDS)
    if unreachable is not None:
        raise ClusterUnavailable(
            f"no Ray cluster answers at {address}: {unreachable}."
            " Start one with `ray start --head`, or correct --ray-address"
        )


def _protect_token() -> None:
    """Let only the owner read Ray's token, which Ray makes readable by everyone."""
    token = Path.home() / ".ray" / "auth_token"
    try:
        if token.stat().st_mode & 0o077 and token.stat().st_uid == os.getuid():
            token.chmod(0o600)
    except OSError as exc:
        logger.debug("No token to protect: %s", exc)
