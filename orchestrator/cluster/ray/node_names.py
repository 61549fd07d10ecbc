"""What the nodes of a cluster are called: by their host's name, which a node that was lost has again when it comes back.

What is known of a node, in the store and here, goes by its name. Ray's id of it is another each time that it starts.
"""

from __future__ import annotations

from collections.abc import Mapping

SETTLE_SECONDS = 30.0  # for Ray to see that a node is dead whose host has started another: 13 s, and it is asked every 5


class NodeNames:
    """Names the nodes of one cluster. No two living nodes share a name, and no living node changes its own."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # Ray's id -> name, of the living
        self._given: dict[str, list[str]] = {}  # host -> names that nodes of it have had
        self._new_since: dict[
            str, float
        ] = {}  # Ray's id -> when it was first seen, beside another of its host

    def see(self, hosts: Mapping[str, str], now: float) -> dict[str, str]:
        """The name of each living node, by Ray's id; of the hosts that are given by it. One that may have another's place is left out until that is known."""
        is_first = not self._given
        self._names = {node_id: name for node_id, name in self._names.items() if node_id in hosts}
        for node_id, host in hosts.items():
            if node_id not in self._names:
                name = self._free_name(host)
                if name is None and (
                    is_first or now - self._new_since.setdefault(node_id, now) >= SETTLE_SECONDS
                ):
                    name = f"{host}-{node_id[:8]}"  # simulated on one machine
                if name is not None:
                    self._names[node_id] = name
                    self._remember(host, name)
        return self._names

    def _free_name(self, host: str) -> str | None:
        """One that a node of this host has had, or the host's own."""
        taken = set(self._names.values())
        return next(
            (name for name in (*self._given.get(host, ()), host) if name not in taken), None
        )

    def _remember(self, host: str, name: str) -> None:
        names = self._given.setdefault(host, [])
        if name not in names:
            names.append(name)
