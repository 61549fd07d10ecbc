"""Which interface has an address, asked of this machine's kernel, and what ranks are told."""

from __future__ import annotations

import socket

import pytest

from orchestrator.node.interfaces import interface_of, rank_interfaces


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("127.0.0.1", "lo"),
        ("192.0.2.77", None),  # RFC 5737: documentation addresses
        ("2001:db8::77", None),  # RFC 3849: likewise
        ("localhost", None),  # no address
    ],
)
def test_an_address_is_looked_for_on_every_interface(address: str, name: str | None) -> None:
    assert interface_of(address) == name


def test_an_address_of_ipv6_is_found_where_the_machine_has_one() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 on this machine's loopback")
    assert interface_of("::1") == "lo"


def test_ranks_that_share_a_node_stay_on_loopback() -> None:
    assert rank_interfaces(None, {}) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_ranks_of_several_nodes_use_the_interface_that_holds_the_nodes_address() -> None:
    assert rank_interfaces("127.0.0.1", {}) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }


def test_an_interface_that_somebody_named_is_left_alone() -> None:
    assert rank_interfaces("127.0.0.1", {"NCCL_SOCKET_IFNAME": "ib0"}) == {
        "GLOO_SOCKET_IFNAME": "lo"
    }
    assert rank_interfaces(None, {"GLOO_SOCKET_IFNAME": "eth0"}) == {}


def test_an_address_that_no_interface_holds_leaves_the_choice_to_the_libraries() -> None:
    assert rank_interfaces("192.0.2.77", {}) == {}
