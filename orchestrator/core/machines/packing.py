"""Which waiting gang starts next, and on which nodes: who is first has a reservation, others fill in where they do not delay it.

Backfilling as batch schedulers do it (EASY: Lifka 1995; Mu'alem and Feitelson 2001), for gangs of whole slots on whole nodes. Knows
nothing of clocks, Ray or trials: times are the caller's, in seconds, and durations are predictions that may be wrong.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse, islice
from math import inf
from types import MappingProxyType
from typing import NamedTuple

PATIENCE = 8  # starts of others, times the gangs that wait: after so many, the one that was passed over goes before larger ones


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
        """The shape of a gang: one node while it fits there, else full nodes. Raises ValueError when it fills no whole number of them."""
        if world_size <= gpus_per_node:
            return cls(num_nodes=1, slots_per_node=world_size)
        if world_size % gpus_per_node:
            raise ValueError(
                f"world size {world_size} is more than one node and not a multiple of gpus_per_node {gpus_per_node}"
            )
        return cls(num_nodes=world_size // gpus_per_node, slots_per_node=gpus_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeOnNode:
    """What one gang can have of a node's free slots, where they are in pieces."""

    standing: int  # slots beside an agent that stands there
    widest: int  # slots at most, whichever agents have to start or to go


class WaitingGang(NamedTuple):
    """A gang that could start. Made anew for every cell at every start: a named tuple costs half of what a frozen dataclass does."""

    shape: Shape
    seconds: float  # that it is predicted to hold its slots
    passed_over: int = 0  # gangs that were started since it began to wait
    is_first: bool = False  # one of its cell's first: those go before others', so that a budget is not spent on one cell alone
    exclusive: bool = False  # wants its nodes for itself
    # Its cell's last gangs failed and nothing has worked since: other cells go first.
    is_suspected: bool = False
    # The place of its cell among those that share a budget, smallest first. All gangs have one, or none has.
    turn: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The decision: a waiting gang, by its place in what was asked about, and its nodes."""

    index: int
    nodes: tuple[str, ...]  # in rank order: by name


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    shape: Shape
    nodes: tuple[str, ...]
    exclusive: bool
    ends_at: float  # as predicted


class FreeSlots:
    """The nodes of a cluster, what is free on them, and who holds the rest until when."""

    def __init__(self, slots_of: Mapping[str, int]) -> None:
        self._slots_of = dict(slots_of)
        self._free = dict(slots_of)
        self._by_free: dict[
            int, dict[str, None]
        ] = {}  # free slots, if any -> nodes that have so many, the longest so first
        self._num_free = 0
        self._num_nodes: dict[
            int, int
        ] = {}  # slots -> nodes that have at least so many; filled as it is asked
        self._num_roomy: dict[int, int] = {}  # the same of free slots, since the last move
        self._slots_of_all: int | None = None  # where all nodes have equally many
        self._held: dict[int, _Held] = {}
        self._emptied: dict[
            int, int | None
        ] = {}  # of what is held: slots of each node that its end leaves empty; None: it may not
        self._ends: list[tuple[float, int]] = []  # of all that is held, the first end first
        self._count()

    @property
    def count(self) -> int:
        return self._num_free

    @property
    def held_slots(self) -> int:
        """Slots that gangs hold, those that an exclusive one keeps empty included."""
        return sum(self._slots_of.values()) - self._num_free

    def resize(self, slots_of: Mapping[str, int]) -> None:
        """Nodes came, or went: those that went are free of nothing, and whoever holds them keeps what is left until `give_back`."""
        if slots_of == self._slots_of:
            return
        self._slots_of = dict(slots_of)
        self._free = dict(slots_of)
        for held in self._held.values():
            for node in held.nodes:
                if node in self._free:
                    self._free[node] -= self._taken(held, node)
        self._count()
        self._emptied = {key: self._emptied_by(held) for key, held in self._held.items()}

    def holds_without(self, shape: Shape, nodes: Collection[str]) -> bool:
        """Say whether all nodes but these, were they free, hold such a gang."""
        others = sum(
            slots >= shape.slots_per_node
            for node, slots in self._slots_of.items()
            if node not in nodes
        )
        return others >= shape.num_nodes

    def holds(self, shape: Shape) -> bool:
        """Whether these nodes, all of them free, hold such a gang."""
        least = shape.slots_per_node
        if least not in self._num_nodes:
            self._num_nodes[least] = sum(slots >= least for slots in self._slots_of.values())
        return self._num_nodes[least] >= shape.num_nodes

    def are_unused(self, nodes: Iterable[str]) -> bool:
        """Whether nobody holds anything of these nodes."""
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
        """A gang starts on these nodes. Raises ValueError when they are not free for it: no slot is ever given twice."""
        if key in self._held:
            raise ValueError(f"gang {key} holds nodes already: {', '.join(self._held[key].nodes)}")
        if len(set(nodes)) != shape.num_nodes:
            raise ValueError(
                f"gang {key} needs {shape.num_nodes} nodes, not {len(set(nodes))}: {', '.join(nodes)}"
            )
        held = _Held(shape=shape, nodes=tuple(nodes), exclusive=exclusive, ends_at=ends_at)
        levels = self._levels(held, -1)
        room = [
            node
            for (before, after), some in levels.items()
            if before >= shape.slots_per_node and after >= 0
            for node in some
        ]
        if len(room) != shape.num_nodes:
            short = next(node for node in nodes if node not in room)
            raise ValueError(
                f"gang {key} needs {shape.slots_per_node} free slots on {short}, which has {self._free.get(short, 0)}"
            )
        self._move(levels)
        self._held[key] = held
        self._emptied[key] = self._emptied_by(held)
        insort(self._ends, (ends_at, key))

    def give_back(self, key: int) -> None:
        """A gang has ended."""
        held = self._held.pop(key)
        del self._emptied[key]
        del self._ends[bisect_left(self._ends, (held.ends_at, key))]
        self._move(self._levels(held, +1))

    def next_start(
        self,
        waiting: Sequence[WaitingGang],
        *,
        now: float,
        free_on_nodes: Mapping[str, FreeOnNode] = MappingProxyType({}),
    ) -> Start | None:
        """The gang to start now, or None: nothing fits without delaying the one that has the reservation.

        A gang is placed first where an agent with room for it stands, and nowhere that is too narrow; of a node without an entry in `rooms`
        all that is free is one room.
        """
        if not any(gang.shape.num_slots <= self._num_free for gang in waiting):
            return None
        order = sorted(
            range(len(waiting)), key=lambda index: _precedence(waiting[index], len(waiting))
        )
        order = [
            index for index in order if self.holds(waiting[index].shape)
        ]  # others wait for nodes, and hold up nobody
        reserved: frozenset[str] = frozenset()
        num_reserved: dict[int, int] = {}  # slots -> reserved nodes that have at least so many free
        starts_at = inf
        for index in order:
            gang = waiting[index]
            least, without = (
                gang.shape.slots_per_node,
                reserved if now + gang.seconds > starts_at else frozenset[str](),
            )
            if without and least not in num_reserved:
                num_reserved[least] = self._num_among(reserved, least)
            num_open = self._num_with(least) - (num_reserved[least] if without else 0)
            # Most have no room, and are asked again and again.
            nodes = (
                self._place(gang, free_on_nodes, without=without)
                if num_open >= gang.shape.num_nodes
                else None
            )
            if nodes is not None:
                return Start(index=index, nodes=tuple(sorted(nodes)))
            if index == order[0]:
                reserved, starts_at = self._reserve(gang, now, free_on_nodes)
                if _is_overdue(gang, len(waiting)):
                    starts_at = -inf  # not even by one that is predicted to end in time: predictions have failed it for long
        return None

    def place_elsewhere(
        self,
        gang: WaitingGang,
        without: Collection[str],
        *,
        free_on_nodes: Mapping[str, FreeOnNode],
    ) -> tuple[str, ...] | None:
        """Nodes that have room for the gang now, none of these among them; None: there are not enough."""
        nodes = self._place(gang, free_on_nodes, without=frozenset(without))
        return None if nodes is None else tuple(sorted(nodes))

    def _place(
        self, gang: WaitingGang, free_on_nodes: Mapping[str, FreeOnNode], *, without: frozenset[str]
    ) -> tuple[str, ...] | None:
        """Nodes that have room now: where agents with room stand, then those that it leaves the fewest free slots on."""
        num_nodes, wanted = gang.shape.num_nodes, gang.shape.slots_per_node
        roomy = self._roomy(gang, without)
        if free_on_nodes:
            standing: list[str] = []
            others: list[str] = []
            for node in roomy:
                room = free_on_nodes.get(node)
                if room is None or room.widest >= wanted:
                    (others if room is None or room.standing < wanted else standing).append(node)
            roomy = chain(standing, others)
        found = tuple(islice(roomy, num_nodes))
        return found if len(found) == num_nodes else None

    def _num_with(self, least: int) -> int:
        """Nodes that have at least so many slots free."""
        if least not in self._num_roomy:
            self._num_roomy[least] = sum(
                len(nodes) for free, nodes in self._by_free.items() if free >= least
            )
        return self._num_roomy[least]

    def _num_among(self, nodes: Collection[str], least: int) -> int:
        """Count those of these nodes that have at least so many slots free."""
        return sum(
            sum(map(level.__contains__, nodes))
            for free, level in self._by_free.items()
            if free >= least
        )

    def _roomy(self, gang: WaitingGang, without: Collection[str]) -> Iterator[str]:
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
        """The nodes on which a gang that does not fit now will fit first, if all end when predicted, and when that is.

        Of nodes that will do by then, those that are free last: what is free now stays open to others. Free slots in pieces too small for it
        become one room when the next gang there ends, as far as that can be foreseen.
        """
        wanted, least = gang.shape.num_nodes, gang.shape.slots_per_node
        # Slots that will be free on nodes that several gangs hold.
        freed = {
            node: room.widest
            for node, room in free_on_nodes.items()
            if room.widest < least <= self._free.get(node, 0)
        }
        is_simple = not gang.exclusive and not freed
        roomy = [] if is_simple else [node for node in self._roomy(gang, ()) if node not in freed]
        num_roomy = self._num_with(least) if is_simple else len(roomy)
        later: list[str] = []  # nodes that will do, in the order in which they are free
        starts_at = inf
        for ends_at, key in self._ends:
            if ends_at > starts_at:
                break
            emptied = self._emptied[key]
            if emptied is None:
                later += self._freed_by(self._held[key], gang, freed)
            elif gang.exclusive or emptied >= gang.shape.slots_per_node:
                later += self._held[key].nodes
            if num_roomy + len(later) >= wanted:
                starts_at = max(ends_at, now)
        if len(later) < wanted:
            later = [*(self._roomy(gang, ()) if is_simple else roomy), *later]
        return frozenset(later[-wanted:]), starts_at

    def _freed_by(self, held: _Held, gang: WaitingGang, freed: dict[str, int]) -> list[str]:
        """The nodes that will do for a waiting gang once this one has ended too, and did not before."""
        found = []
        for node in held.nodes:
            if node not in self._free:
                continue
            before = freed.get(node, self._free[node])
            freed[node] = after = max(before, self._free[node]) + self._taken(held, node)
            if (
                before
                < (self._slots_of[node] if gang.exclusive else gang.shape.slots_per_node)
                <= after
            ):
                found.append(node)
        return found

    def _emptied_by(self, held: _Held) -> int | None:
        """The slots of each of its nodes, where they have equally many and it holds all of them: no other gang matters there."""
        if set(map(self._free.get, held.nodes)) != {0}:
            return None
        slots = (
            set(map(self._slots_of.__getitem__, held.nodes))
            if self._slots_of_all is None
            else {self._slots_of_all}
        )
        whole = slots.pop()
        return (
            whole if not slots and (held.exclusive or held.shape.slots_per_node == whole) else None
        )

    def _taken(self, held: _Held, node: str) -> int:
        return self._slots_of[node] if held.exclusive else held.shape.slots_per_node

    def _count(self) -> None:
        self._by_free, self._num_nodes, self._num_roomy = {}, {}, {}
        self._num_free = sum(self._free.values())
        sizes = set(self._slots_of.values())
        self._slots_of_all = sizes.pop() if len(sizes) == 1 else None
        for node, free in self._free.items():
            if free > 0:
                self._by_free.setdefault(free, {})[node] = None

    def _move(self, levels: Mapping[tuple[int, int], Sequence[str]]) -> None:
        """Have nodes with so many free slots have so many: level by level, since gangs may have thousands of nodes."""
        self._num_roomy = {}
        for (before, after), nodes in levels.items():
            self._num_free += (after - before) * len(nodes)
            self._free.update(dict.fromkeys(nodes, after))
            if before > 0:
                was = self._by_free[before]
                for node in nodes:
                    del was[node]
            if after > 0:
                self._by_free.setdefault(after, {}).update(dict.fromkeys(nodes))

    def _levels(self, held: _Held, sign: int) -> Mapping[tuple[int, int], Sequence[str]]:
        """A gang's nodes by the slots that they have free before and after it takes them (-1), or gives them back (+1)."""
        per_node = sign * held.shape.slots_per_node
        free = set(map(self._free.get, held.nodes))
        if not held.exclusive and len(free) == 1 and (before := free.pop()) is not None:
            return {
                (before, before + per_node): held.nodes
            }  # as nearly all large gangs do: whole nodes
        levels: dict[tuple[int, int], list[str]] = {}
        for node in held.nodes:
            if (before := self._free.get(node)) is not None:
                after = before + (sign * self._slots_of[node] if held.exclusive else per_node)
                levels.setdefault((before, after), []).append(node)
        return levels


def _precedence(gang: WaitingGang, num_waiting: int) -> tuple[float, ...]:
    """Suspected gangs come last. The others: first those passed over for too long, then by turns where cells share a budget.

    Else first trials, the cheapest first, since they teach the dearer ones; then the largest, and of equals the longest.
    """
    if _is_overdue(gang, num_waiting):
        return gang.is_suspected, 0, -gang.passed_over
    if gang.turn:
        return gang.is_suspected, 1, *gang.turn
    if gang.is_first:
        return gang.is_suspected, 1, gang.shape.num_slots, -gang.seconds
    return gang.is_suspected, 2, -gang.shape.num_slots, -gang.seconds


def _is_overdue(gang: WaitingGang, num_waiting: int) -> bool:
    return gang.passed_over >= PATIENCE * num_waiting
