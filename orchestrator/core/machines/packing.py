"""Decides which waiting gang starts next, and on which nodes.

The first gang has a reservation; others fill in if they do not delay it. This is the backfilling of
batch schedulers (EASY: Lifka 1995; Mu'alem and Feitelson 2001), for gangs of whole slots on whole
nodes. Nothing here knows clocks, Ray or trials: times are the caller's, in seconds, and durations
are predictions that may be wrong.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse, islice
from math import inf
from types import MappingProxyType
from typing import NamedTuple

# Starts of other gangs, per waiting gang. A gang passed over more often goes before larger ones.
PATIENCE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Whole slots on whole nodes: a slot is a GPU, or a core on a machine without GPUs."""

    num_nodes: int
    slots_per_node: int

    @property
    def num_slots(self) -> int:
        return self.num_nodes * self.slots_per_node

    @classmethod
    def of(cls, world_size: int, *, gpus_per_node: int) -> Shape:
        """Return the shape of a gang: one node while it fits there, else full nodes.

        Raises ValueError if it fills no whole number of nodes.
        """
        if world_size <= gpus_per_node:
            return cls(num_nodes=1, slots_per_node=world_size)
        if world_size % gpus_per_node:
            raise ValueError(
                f"world size {world_size} is more than one node and not a multiple of "
                f"gpus_per_node {gpus_per_node}"
            )
        return cls(num_nodes=world_size // gpus_per_node, slots_per_node=gpus_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeOnNode:
    """The free slots that one gang can get of a node that has them in several pieces."""

    standing: int  # slots with a running agent
    # Slots at most, whichever agents have to start or to end.
    widest: int


class WaitingGang(NamedTuple):
    """A gang that could start.

    Each start makes one for every cell, and a named tuple costs half of a frozen dataclass.
    """

    shape: Shape
    seconds: float  # predicted time on its slots
    passed_over: int = 0  # gangs started since it waits
    # One of its cell's first: these go before others, so that one cell alone cannot use up a
    # budget.
    is_first: bool = False
    exclusive: bool = False  # needs its nodes for itself
    # Its cell's last gangs failed and nothing has worked since: other cells go first.
    is_suspected: bool = False
    # The place of its cell among those that share a budget, smallest first. All gangs have one, or
    # none has.
    cell_order: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The decision: the index of a waiting gang, and its nodes."""

    index: int
    nodes: tuple[str, ...]  # in rank order: by name


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlacedGang:
    shape: Shape
    nodes: tuple[str, ...]
    exclusive: bool
    ends_at: float  # predicted


class FreeSlots:
    """The nodes of a cluster, their free slots, and the gangs on the others with their ends."""

    def __init__(self, slots_of: Mapping[str, int]) -> None:
        self._slots_of = dict(slots_of)
        self._free = dict(slots_of)
        # Free slots, at least one -> nodes with that many, in the order in which they reached it.
        self._by_free: dict[int, dict[str, None]] = {}
        self._num_free = 0
        self._num_nodes: dict[int, int] = {}  # slots -> nodes with that many
        # Free slots -> nodes with at least that many: a cache until the next change.
        self._num_with_free: dict[int, int] = {}
        self._slots_of_all: int | None = None  # if all nodes have equally many
        self._placed: dict[int, _PlacedGang] = {}
        # Gang -> slots of each of its nodes if its end leaves them empty; None: it may not.
        self._emptied: dict[int, int | None] = {}
        self._ends: list[tuple[float, int]] = []  # ends of the placed gangs, ascending
        self._count()

    @property
    def count(self) -> int:
        return self._num_free

    def resize(self, slots_of: Mapping[str, int]) -> None:
        """Nodes came or went. A gang on a lost node keeps its other nodes until `give_back`."""
        if slots_of == self._slots_of:
            return
        self._slots_of = dict(slots_of)
        self._free = dict(slots_of)
        for placed in self._placed.values():
            for node in placed.nodes:
                if node in self._free:
                    self._free[node] -= self._taken(placed, node)
        self._count()
        self._emptied = {key: self._emptied_by(placed) for key, placed in self._placed.items()}

    def holds_without(self, shape: Shape, nodes: Collection[str]) -> bool:
        """Return whether the gang fits on the other nodes once they are free."""
        others = sum(
            slots >= shape.slots_per_node
            for node, slots in self._slots_of.items()
            if node not in nodes
        )
        return others >= shape.num_nodes

    def holds(self, shape: Shape) -> bool:
        """Return whether the gang fits if all nodes are free."""
        least = shape.slots_per_node
        if least not in self._num_nodes:
            self._num_nodes[least] = sum(slots >= least for slots in self._slots_of.values())
        return self._num_nodes[least] >= shape.num_nodes

    def are_unused(self, nodes: Iterable[str]) -> bool:
        """Return whether no gang is on these nodes."""
        return all(self._free[node] == self._slots_of[node] for node in nodes)

    def take(
        self,
        key: int,
        shape: Shape,
        nodes: Sequence[str],
        *,
        ends_at: float,
        exclusive: bool = False,
    ) -> None:
        """Start a gang on these nodes. Raises ValueError if they are not free for it."""
        if key in self._placed:
            raise ValueError(f"gang {key} has nodes already: {', '.join(self._placed[key].nodes)}")
        if (num := len(set(nodes))) != shape.num_nodes:
            names = ", ".join(nodes)
            raise ValueError(f"gang {key} needs {shape.num_nodes} nodes, not {num}: {names}")
        placed = _PlacedGang(shape=shape, nodes=tuple(nodes), exclusive=exclusive, ends_at=ends_at)
        levels, wanted = self._levels(placed, -1), shape.slots_per_node
        fit = {
            node
            for (before, after), some in levels.items()
            if before >= wanted and after >= 0
            for node in some
        }
        if len(fit) != shape.num_nodes:
            short = next(node for node in nodes if node not in fit)
            free = self._free.get(short, 0)
            raise ValueError(f"gang {key} needs {wanted} free slots on {short}, which has {free}")
        self._move(levels)
        self._placed[key] = placed
        self._emptied[key] = self._emptied_by(placed)
        insort(self._ends, (ends_at, key))

    def give_back(self, key: int) -> None:
        """A gang has ended."""
        placed = self._placed.pop(key)
        del self._emptied[key]
        del self._ends[bisect_left(self._ends, (placed.ends_at, key))]
        self._move(self._levels(placed, +1))

    def next_start(
        self,
        waiting: Sequence[WaitingGang],
        *,
        now: float,
        free_on_nodes: Mapping[str, FreeOnNode] = MappingProxyType({}),
    ) -> Start | None:
        """Return the gang to start now; None: nothing fits without delaying the reserved one.

        A gang goes first to nodes with a wide enough agent, and to none with too narrow a piece.
        The free slots of a node without an entry in `free_on_nodes` are one piece.
        """
        num_waiting = len(waiting)
        if not any(gang.shape.num_slots <= self._num_free for gang in waiting):
            return None
        # A gang that fits only on more nodes than there are waits, and delays no other.
        order = [index for index, gang in enumerate(waiting) if self.holds(gang.shape)]
        order.sort(key=lambda index: _precedence(waiting[index], num_waiting))
        reserved: frozenset[str] = frozenset()
        num_reserved: dict[int, int] = {}  # free slots -> reserved nodes
        starts_at = inf
        for index in order:
            gang = waiting[index]
            least = gang.shape.slots_per_node
            without = reserved if now + gang.seconds > starts_at else frozenset[str]()
            if without and least not in num_reserved:
                num_reserved[least] = self._num_among(reserved, least)
            num_open = self._num_with(least) - (num_reserved[least] if without else 0)
            # Cheap to check first: most gangs do not fit, and this runs again and again.
            if num_open >= gang.shape.num_nodes:
                nodes = self._place(gang, free_on_nodes, without=without)
                if nodes is not None:
                    return Start(index=index, nodes=nodes)
            if index == order[0]:
                reserved, starts_at = self._reserve(gang, now, free_on_nodes)
                if _is_overdue(gang, num_waiting):
                    # Predictions were wrong for it for long: nothing fills in on its nodes.
                    starts_at = -inf
        return None

    def place_elsewhere(
        self,
        gang: WaitingGang,
        without: Collection[str],
        *,
        free_on_nodes: Mapping[str, FreeOnNode],
    ) -> tuple[str, ...] | None:
        """Return nodes for the gang now, none of these among them; None: too few are free."""
        return self._place(gang, free_on_nodes, without=frozenset(without))

    def _place(
        self, gang: WaitingGang, free_on_nodes: Mapping[str, FreeOnNode], *, without: frozenset[str]
    ) -> tuple[str, ...] | None:
        """Nodes with enough free slots: first those with an agent, then those it fills most."""
        num_nodes, wanted = gang.shape.num_nodes, gang.shape.slots_per_node
        nodes = self._with_free(gang, without)
        if free_on_nodes:
            standing: list[str] = []
            others: list[str] = []
            for node in nodes:
                free = free_on_nodes.get(node)
                if free is None or free.widest >= wanted:
                    (others if free is None or free.standing < wanted else standing).append(node)
            nodes = chain(standing, others)
        found = tuple(islice(nodes, num_nodes))
        return tuple(sorted(found)) if len(found) == num_nodes else None

    def _num_with(self, least: int) -> int:
        """The number of nodes with at least this many free slots."""
        if least not in self._num_with_free:
            self._num_with_free[least] = sum(
                len(nodes) for free, nodes in self._by_free.items() if free >= least
            )
        return self._num_with_free[least]

    def _num_among(self, nodes: Collection[str], least: int) -> int:
        """The number of these nodes with at least this many free slots."""
        return sum(
            sum(map(level.__contains__, nodes))
            for free, level in self._by_free.items()
            if free >= least
        )

    def _with_free(self, gang: WaitingGang, without: Collection[str]) -> Iterator[str]:
        levels = sorted(free for free in self._by_free if free >= gang.shape.slots_per_node)
        nodes: Iterator[str] = chain.from_iterable(self._by_free[free] for free in levels)
        if without:
            nodes = filterfalse(without.__contains__, nodes)
        if gang.exclusive:
            nodes = (node for node in nodes if self._free[node] == self._slots_of[node])
        return nodes

    def _reserve(
        self, gang: WaitingGang, now: float, free_on_nodes: Mapping[str, FreeOnNode]
    ) -> tuple[frozenset[str], float]:
        """Return where and when a gang that does not fit now will fit, if all predictions hold.

        Of the nodes that will do by then, it gets the ones that are free last: those that are free
        now stay open to others. Free slots in too small pieces are assumed to become one piece when
        the next gang there ends.
        """
        wanted, least = gang.shape.num_nodes, gang.shape.slots_per_node
        # Slots that will be free on nodes with several gangs.
        freed = {
            node: free.widest
            for node, free in free_on_nodes.items()
            if free.widest < least <= self._free.get(node, 0)
        }
        is_simple = not gang.exclusive and not freed
        # Counted before they are listed, since clusters may have thousands of nodes.
        now_free = [] if is_simple else [n for n in self._with_free(gang, ()) if n not in freed]
        num_now = self._num_with(least) if is_simple else len(now_free)
        later: list[str] = []  # nodes that will do, by time
        starts_at = inf
        for ends_at, key in self._ends:
            if ends_at > starts_at:
                break
            emptied = self._emptied[key]
            if emptied is None:
                later += self._freed_by(self._placed[key], gang, freed)
            elif gang.exclusive or emptied >= least:
                later += self._placed[key].nodes
            if num_now + len(later) >= wanted:
                starts_at = max(ends_at, now)
        if len(later) < wanted:
            later = [*(self._with_free(gang, ()) if is_simple else now_free), *later]
        return frozenset(later[-wanted:]), starts_at

    def _freed_by(self, placed: _PlacedGang, gang: WaitingGang, freed: dict[str, int]) -> list[str]:
        """The nodes that a waiting gang can use once this one has ended, and could not before."""
        found = []
        for node in placed.nodes:
            if node not in self._free:
                continue
            before = freed.get(node, self._free[node])
            freed[node] = after = max(before, self._free[node]) + self._taken(placed, node)
            wanted = self._slots_of[node] if gang.exclusive else gang.shape.slots_per_node
            if before < wanted <= after:
                found.append(node)
        return found

    def _emptied_by(self, placed: _PlacedGang) -> int | None:
        """The slots of each of its nodes, if they have equally many and no other gang is there."""
        if set(map(self._free.get, placed.nodes)) != {0}:
            return None
        slots = {self._slots_of_all}
        if self._slots_of_all is None:
            slots = set(map(self._slots_of.get, placed.nodes))
        whole = slots.pop()
        is_alone = not slots and (placed.exclusive or placed.shape.slots_per_node == whole)
        return whole if is_alone else None

    def _taken(self, placed: _PlacedGang, node: str) -> int:
        return self._slots_of[node] if placed.exclusive else placed.shape.slots_per_node

    def _count(self) -> None:
        self._by_free, self._num_nodes, self._num_with_free = {}, {}, {}
        self._num_free = sum(self._free.values())
        sizes = set(self._slots_of.values())
        self._slots_of_all = sizes.pop() if len(sizes) == 1 else None
        for node, free in self._free.items():
            if free > 0:
                self._by_free.setdefault(free, {})[node] = None

    def _move(self, levels: Mapping[tuple[int, int], Sequence[str]]) -> None:
        """Change nodes' free slots; many nodes at once, since gangs may have thousands."""
        self._num_with_free = {}
        for (before, after), nodes in levels.items():
            self._num_free += (after - before) * len(nodes)
            self._free.update(dict.fromkeys(nodes, after))
            if before > 0:
                was = self._by_free[before]
                for node in nodes:
                    del was[node]
            if after > 0:
                self._by_free.setdefault(after, {}).update(dict.fromkeys(nodes))

    def _levels(self, placed: _PlacedGang, sign: int) -> Mapping[tuple[int, int], Sequence[str]]:
        """A gang's nodes by their free slots before and after it starts (-1), or ends (+1)."""
        per_node = sign * placed.shape.slots_per_node
        free = set(map(self._free.get, placed.nodes))
        if not placed.exclusive and len(free) == 1 and (before := free.pop()) is not None:
            # Nearly all large gangs have whole nodes.
            return {(before, before + per_node): placed.nodes}
        levels: dict[tuple[int, int], list[str]] = {}
        for node in placed.nodes:
            if (before := self._free.get(node)) is not None:
                after = before + sign * self._taken(placed, node)
                levels.setdefault((before, after), []).append(node)
        return levels


def _precedence(gang: WaitingGang, num_waiting: int) -> tuple[float, ...]:
    """The sort key of a gang. Suspected gangs come last, after those passed over for too long.

    Then the order of the cells counts, if they share a budget. Else first trials go first, the
    cheapest before the others, which learn from them; then the largest, and of equals the longest.
    """
    if _is_overdue(gang, num_waiting):
        return gang.is_suspected, 0, -gang.passed_over
    if gang.cell_order:
        return gang.is_suspected, 1, *gang.cell_order
    if gang.is_first:
        return gang.is_suspected, 1, gang.shape.num_slots, -gang.seconds
    return gang.is_suspected, 2, -gang.shape.num_slots, -gang.seconds


def _is_overdue(gang: WaitingGang, num_waiting: int) -> bool:
    return gang.passed_over >= PATIENCE * num_waiting
