"""Ranks run near their GPUs, by a /sys of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.node.gang_environment import rank_places
from orchestrator.node.numa import as_list, cores_near
from tests.node.launching import order

FIRST, SECOND = "0000:3b:00.0", "0000:af:00.0"
ALL = frozenset(range(8))


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    for address, cores in ((FIRST, "0-1,4-5"), (SECOND, "2-3,6-7")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(f"{cores}\n")
    return tmp_path


def test_each_gpu_has_the_cores_of_its_node(two_sockets: Path) -> None:
    near = cores_near([SECOND.upper(), FIRST], pci_devices=two_sockets, allowed=ALL)
    assert near == [(2, 3, 6, 7), (0, 1, 4, 5)]
    assert [as_list(cores) for cores in near] == ["2-3,6-7", "0-1,4-5"]
    assert as_list([7, 3]) == "3,7"


def test_only_cores_that_this_process_may_use_count(two_sockets: Path) -> None:
    allowed = frozenset({1, 2, 3})
    assert cores_near([FIRST, SECOND], pci_devices=two_sockets, allowed=allowed) == [(1,), (2, 3)]


@pytest.mark.parametrize(
    ("addresses", "allowed"),
    [
        # A container has none of the second GPU's cores: then no rank is bound.
        ([FIRST, SECOND], frozenset({0, 1})),
        ([FIRST, None], ALL),
        ([FIRST, "0000:00:00.0"], ALL),
        ([], ALL),
    ],
)
def test_where_the_cores_of_one_gpu_are_unknown_no_rank_is_bound(
    two_sockets: Path, addresses: list[str | None], allowed: frozenset[int]
) -> None:
    near = cores_near(addresses, pci_devices=two_sockets, allowed=allowed)
    assert near == [() for _ in addresses]


def test_on_a_machine_with_one_node_there_is_nothing_to_bind(tmp_path: Path) -> None:
    (tmp_path / FIRST).mkdir()
    (tmp_path / FIRST / "local_cpulist").write_text("0-7")
    assert cores_near([FIRST], pci_devices=tmp_path, allowed=ALL) == [()]


def test_ranks_get_the_cores_of_their_gpus_unless_the_order_names_some() -> None:
    near = [(2, 3), (0, 1)]
    assert [place["cpus"] for place in rank_places(order(), near)] == [[2, 3], [0, 1]]
    pinned = order(cpus=[4, 5, 6, 7])
    assert [place["cpus"] for place in rank_places(pinned, near)] == [[4, 5], [6, 7]]
    assert [place["cpus"] for place in rank_places(order())] == [[], []]
    # One process starts all ranks of the node, wherever they are to run.
    (alone,) = rank_places(order(one_rank_per_node=True), near)
    assert alone["cpus"] == []
