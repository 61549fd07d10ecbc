"""A reserved port, which nobody else gets but the program that listens on it."""

from __future__ import annotations

import socket

import pytest

from orchestrator.node.reserved_port import ReservedPort, reserve_port


def test_nobody_else_can_take_a_reserved_port() -> None:
    with (
        reserve_port() as reserved,
        socket.socket() as thief,
        socket.socket(socket.AF_INET6) as owner,
    ):
        port = reserved.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            thief.bind(("", port))
        owner.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as libuv, under torch's store, does
        owner.bind(("::", port))
        owner.listen()


def is_free(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("", port))
        except OSError:
            return False
        return True


def test_a_new_port_takes_the_place_of_the_one_before() -> None:
    reserved = ReservedPort()
    first, second = reserved.take(), reserved.take()
    assert not is_free(second)
    assert first == second or is_free(first)
    reserved.release()
    assert is_free(second)
    reserved.release()
