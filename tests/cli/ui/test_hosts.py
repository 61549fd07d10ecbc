"""Which names a request may call a server by."""

from __future__ import annotations

import socket

import pytest

from orchestrator.cli.ui.hosts import LOOPBACK, hosts_of, listen, url_of
from orchestrator.core.errors import UsageInvalid


@pytest.mark.parametrize("host", [LOOPBACK, "127.3.2.1", "localhost", "::1"])
def test_loopback_needs_no_token_and_has_local_names(host: str) -> None:
    found = hosts_of(host)
    assert not found.is_open
    for name in ("localhost", "LOCALHOST:80", "127.0.0.1:65535", "[::1]:1"):
        assert found.allow(name)
    for name in (socket.gethostname(), "10.0.0.1", "evil.example", "", ":80", "localhost:", "[::1"):
        assert not found.allow(name)


def test_all_addresses_may_be_called_by_any_address_but_by_no_other_name() -> None:
    found = hosts_of("0.0.0.0")
    assert found.is_open
    for name in ("10.0.0.1:80", "[fe80::1]:80", f"{socket.gethostname()}:80"):
        assert found.allow(name)
    assert not found.allow("evil.example") and not found.allow("10.0.0.1.evil.example")


def test_one_address_is_called_by_it_alone() -> None:
    found = hosts_of("10.0.0.1")
    assert found.is_open and found.allow("10.0.0.1:80") and not found.allow("10.0.0.2:80")


def test_the_address_is_one_that_a_browser_opens() -> None:
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80/"
    assert url_of("::1", 80) == "http://[::1]:80/"
    assert url_of("0.0.0.0", 80) == f"http://{socket.gethostname()}:80/"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "x" * 300, ""])
def test_where_nobody_can_listen_is_a_mistake_in_one_line(host: str) -> None:
    if host == "":
        # It means all addresses, which is never the default.
        assert hosts_of(host).is_open
        return
    with pytest.raises(UsageInvalid, match="cannot listen on") as caught:
        listen(host, 0)
    assert "\n" not in str(caught.value)
