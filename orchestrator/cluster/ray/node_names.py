"""Names the nodes of a cluster by their hosts, so that a node that returns has its name again.

All facts about a node, here and in the store, are stored by its name. Ray's id of a node is
another one each time that it starts.
"""

from __future__ import annotations

from collections.abc import Mapping

# How long Ray may take to see that a node is dead whose host has started another: 13 s, and it is
# asked every 5 s.
SETTLE_SECONDS = 30.0


class NodeNames:
    """Names of nodes: no two living nodes share one, and no living node changes its own."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # Ray's id -> name, if living
        self._known: dict[str, list[str]] = {}  # host -> all names so far
        # Ray's id -> when a node was first seen whose host has another node
        self._new_since: dict[str, float] = {}

    def update(self, hosts: Mapping[str, str], now: float) -> dict[str, str]:
        """Return the names of the living nodes; keys of both are Ray's ids.

        Leaves out a node for as long as it may be the successor of another one.
        """
        is_first = not self._known
        self._names = {node_id: name for node_id, name in self._names.items() if node_id in hosts}
        for node_id, host in hosts.items():
            if node_id not in self._names:
                name = self._free_name(host)
                if name is None:
                    waited = now - self._new_since.setdefault(node_id, now)
                    if not is_first and waited < SETTLE_SECONDS:
                        continue
                    name = f"{host}-{node_id[:8]}"  # several nodes simulated on one machine
                self._names[node_id] = name
                known = self._known.setdefault(host, [])
                if name not in known:
                    known.append(name)
        return self._names

    def _free_name(self, host: str) -> str | None:
        """Return a name that a node of this host has had, or the host's own."""
        taken = set(self._names.values())
        names = (*self._known.get(host, ()), host)
        return next((name for name in names if name not in taken), None)
