"""One Ray cluster, seen from its driver: joined or started, what it has, and whether its head answers."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.placement_group import placement_group

from orchestrator.cluster.contract import Slots
from orchestrator.cluster.ray import local
from orchestrator.cluster.ray.bounded_calls import first_line, within
from orchestrator.cluster.ray.guard import RayGuard
from orchestrator.cluster.ray.head_watch import why_unreachable
from orchestrator.cluster.ray.node_names import NodeNames
from orchestrator.core.errors import ClusterUnavailable
from orchestrator.core.machines.packing import Shape
from orchestrator.core.trial.protocol import Device

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

CONNECT_SECONDS = 5.0
AWAIT_SECONDS = 1.0  # between two looks at which nodes have come
CUT_OFF_SECONDS = (
    60.0  # one whose network is cut, after 64 s, of which an agent's silence has taken 20
)
HEAD_SECONDS = 15.0  # for the head to answer a question, milliseconds where it is well
DOUBT_SECONDS = 20.0  # a node that was killed is dead to Ray after 13 s (docs/decisions/leases.md)


def connect(address: str | None, guard: RayGuard | None = None) -> None:
    """Join the cluster at an address, or start a local one under its guard. Raises ClusterUnavailable."""
    # Actors that declare no GPU must still see what the launcher gives them; the launcher sets CUDA_VISIBLE_DEVICES itself.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": "layout-sweep",
    }
    if address is not None:
        _knock(address)
    try:
        with _own_handler_of_sigterm():
            if guard is not None:
                with guard.starting():
                    local.start(guard.end_processes, **options)
            else:
                ray.init(address=address, **options)
    except Exception as exc:  # Ray raises all kinds, a bare Exception among them, and each means that there is no cluster
        where = address or "a local Ray"
        hint = (
            ""
            if address is None
            else " Is the address right, and does RAY_AUTH_TOKEN_PATH name the cluster's token (RAY_AUTH_MODE=token)?"
        )
        raise ClusterUnavailable(f"no connection to {where}: {first_line(exc)}.{hint}") from exc
    local.stop_error_listener()
    _protect_token()


@contextmanager
def _own_handler_of_sigterm() -> Iterator[None]:
    """Keep our handler: Ray installs one that ends this process with code 15. A SIGTERM that comes meanwhile is handed to ours."""
    before = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()  # else neither Ray nor we can
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
    """Wait until a cluster is large enough for such a gang: its nodes are on their way, or an autoscaler has still to order them.

    A placement group that waits is what an autoscaler goes by; ours ends with this connection. False: given up. Raises
    ClusterUnavailable when there is no cluster, or the time is over.
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
                    f"after {patience_seconds:.0f} s the cluster has nodes of {nodes.slots.by_size} slots; {shape.num_nodes} x"
                    f" {shape.slots_per_node} are needed. Is the autoscaler's upper limit high enough? `ray status` tells what it waits for"
                )
            time.sleep(AWAIT_SECONDS)
            answered(nodes.refresh)
        return True
    finally:
        within(HEAD_SECONDS, ray.shutdown)


def bundle(num_slots: int, device: Device) -> dict[str, float]:
    """What so many slots of a node are to Ray. Beside GPUs a core for the agent."""
    return (
        {"GPU": float(num_slots), "CPU": 1.0}
        if device is Device.CUDA
        else {"CPU": float(num_slots)}
    )


@dataclass(eq=False)
class ClusterNodes:
    """The nodes of the cluster as Ray knows them, by name (node_names.py)."""

    device: Device
    device_name: str | None
    gpus_per_node: int | None  # slots that are used of a node at most
    _names: NodeNames = field(default_factory=NodeNames)
    _ids: dict[str, str] = field(default_factory=dict)  # name -> Ray's id of who had it last
    _alive: dict[str, int] = field(default_factory=dict)  # name -> slots
    _doubted: dict[str, float] = field(
        default_factory=dict
    )  # name -> monotonic time until which nothing is put there
    _slots: Slots = field(init=False)

    @classmethod
    def of(cls, device: Device | None, gpus_per_node: int | None) -> ClusterNodes:
        """What is there now. Without a device: GPUs where any node has some, else cores."""
        nodes = _alive_nodes()
        chosen = device or (
            Device.CUDA if any(node["Resources"].get("GPU") for node in nodes) else Device.CPU
        )
        kinds = (
            key.split(":", 1)[1]
            for node in nodes
            for key in node["Resources"]
            if key.startswith("accelerator_type:")
        )
        found = cls(device=chosen, device_name=next(kinds, None), gpus_per_node=gpus_per_node)
        found.refresh()
        return found

    @property
    def slots(self) -> Slots:
        """As of the last `refresh` or `doubt`."""
        return self._slots

    def refresh(self) -> None:
        """Ask Ray again: nodes come and go."""
        resource = "GPU" if self.device is Device.CUDA else "CPU"
        nodes = {
            node["NodeID"]: node
            for node in _alive_nodes()
            if node["Resources"].get(resource, 0) >= 1
        }
        names = self._names.see(
            {node_id: node["NodeManagerHostname"] for node_id, node in nodes.items()},
            time.monotonic(),
        )
        most = self.gpus_per_node
        self._alive = {}
        for node_id in (node_id for node_id in nodes if node_id in names):
            count = int(nodes[node_id]["Resources"][resource])
            self._alive[names[node_id]] = min(count, most) if most is not None else count
            self._ids[names[node_id]] = node_id
        self._count()

    def doubt(self, name: str, *, seconds: float = DOUBT_SECONDS) -> None:
        """An agent there stopped answering: Ray may take a while to see whether the node is gone."""
        self._doubted[name] = max(self._doubted.get(name, 0.0), time.monotonic() + seconds)
        self._count()

    def is_alive(self, node_id: str) -> bool:
        """Whether Ray has it among its nodes, doubted or not."""
        return any(self._ids[name] == node_id for name in self._alive)

    def id_of(self, name: str) -> str:
        """Ray's, of the node that has this name or had it last: another one each time that it starts."""
        return self._ids[name]

    def _count(self) -> None:
        now = time.monotonic()
        self._doubted = {name: until for name, until in self._doubted.items() if until > now}
        self._slots = Slots(
            device=self.device,
            device_name=self.device_name,
            nodes={name: count for name, count in self._alive.items() if name not in self._doubted},
            # On a machine without GPUs trials share caches and memory bandwidth: one at a time keeps their timing apart.
            usual_at_once=1 if self.device is Device.CPU else None,
        )


def _alive_nodes() -> list[dict[str, Any]]:
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return sorted(nodes, key=lambda node: (node["NodeManagerHostname"], node["NodeID"]))


class Head:
    """The head of the cluster: once it has not answered in time, or the local Ray that `guard` watches has ended, it is gone for good."""

    def __init__(self, guard: RayGuard | None) -> None:
        self._guard, self._is_lost = guard, False

    @property
    def is_gone(self) -> bool:
        return self._is_lost or self._has_ended()

    def _has_ended(self) -> bool:
        return self._guard is not None and self._guard.ray_is_gone()

    def ask(self, call: Callable[[], _T]) -> _T:
        """What it answers. Raises ClusterUnavailable where it is gone."""
        try:
            return answered(call, is_vain=self._has_ended)
        except ClusterUnavailable:
            self._is_lost = True
            raise

    def lost(self) -> None:
        """Something else shows that it is gone."""
        self._is_lost = True


def answered(call: Callable[[], _T], *, is_vain: Callable[[], bool] = lambda: False) -> _T:
    """What the head answers. Raises ClusterUnavailable where it is gone: Ray itself would wait for a minute, and then end this process.

    `is_vain` says that nobody will answer, however long we wait.
    """
    told: list[_T] = []
    raised: list[Exception] = []

    def ask() -> None:
        try:
            told.append(call())
        except Exception as exc:  # noqa: BLE001  raised again below, in the caller's thread
            raised.append(exc)

    if not within(HEAD_SECONDS, ask, is_vain=is_vain):
        if is_vain():
            raise ClusterUnavailable(
                "the local Ray was ended from outside. Nothing acknowledged is lost; the same command goes on"
            )
        raise ClusterUnavailable(
            f"the head of the Ray cluster has not answered for {HEAD_SECONDS:.0f} s: it is gone. Nothing acknowledged is lost;"
            " the same command goes on once a cluster is there again"
        )
    if raised:
        raise raised[0]
    return told[0]


def _knock(address: str) -> None:
    """Ray tries an address that nobody answers for minutes; a look at the port says so at once."""
    if not address.rpartition(":")[2].isdigit() or "://" in address:
        return
    unreachable = why_unreachable(address, patience_seconds=CONNECT_SECONDS)
    if unreachable is not None:
        raise ClusterUnavailable(
            f"no Ray cluster answers at {address}: {unreachable}. Start one with `ray start --head`, or correct --ray-address"
        )


def _protect_token() -> None:
    """Ray writes its token readable by everyone on the machine."""
    token = Path.home() / ".ray" / "auth_token"
    try:
        if token.stat().st_mode & 0o077 and token.stat().st_uid == os.getuid():
            token.chmod(0o600)
    except OSError as exc:
        logger.debug("No token to protect: %s", exc)
