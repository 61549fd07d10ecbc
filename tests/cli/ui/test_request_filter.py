"""Bad requests are refused in a short plain answer, and every answer has its safe headers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from db.store import Store
from orchestrator.cli.ui.hosts import LOOPBACK, hosts_of
from tests.cli.cli_store import Filled
from tests.cli.ui.served import Answer, Visitor, served

TOKEN = "a-token-of-this-test"


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A request that must be refused. Of a form, `body` follows its CSRF token."""

    why: str
    method: str = "GET"
    target: str = "/"
    headers: Mapping[str, str | None] = field(default_factory=dict)
    status: int
    body: bytes | None = None
    has_csrf: bool = True


def bad_form(
    why: str,
    *,
    target: str = "/cancel",
    headers: Mapping[str, str | None] | None = None,
    body: bytes = b"",
    has_csrf: bool = True,
    status: int = 403,
) -> Bad:
    """A form as a person sends it, except for one thing that is wrong."""
    return Bad(
        why=why,
        method="POST",
        target=target,
        headers=headers or {},
        body=body,
        has_csrf=has_csrf,
        status=status,
    )


BAD = (
    Bad(why="rebound name", headers={"Host": "evil.example"}, status=400),
    Bad(why="rebound name with the port", headers={"Host": "evil.example:80"}, status=400),
    Bad(why="name that ends like ours", headers={"Host": "127.0.0.1.evil.example"}, status=400),
    Bad(why="user before a name", headers={"Host": "127.0.0.1@evil.example"}, status=400),
    Bad(why="empty name", headers={"Host": ""}, status=400),
    Bad(why="no name", headers={"Host": None}, status=400),
    Bad(why="another address", headers={"Host": "10.0.0.1"}, status=400),
    Bad(why="method DELETE", method="DELETE", status=405),
    Bad(why="method PUT", method="PUT", target="/cancel", status=405),
    Bad(why="method PATCH", method="PATCH", target="/sql", status=405),
    Bad(why="method OPTIONS", method="OPTIONS", status=405),
    Bad(why="method TRACE", method="TRACE", status=405),
    Bad(why="unknown method", method="BREW", status=405),
    bad_form("form to a page", target="/", status=405),
    bad_form("form to the events", target="/events", status=405),
    Bad(why="unknown page", target="/admin", status=404),
    Bad(why="way out of the assets", target="/assets/../live.py", status=404),
    Bad(why="encoded way out", target="/assets/%2e%2e%2flive.py", status=404),
    Bad(why="way out of the pictures", target="/pictures/../../etc/passwd", status=404),
    Bad(why="encoded absolute path", target="/pictures/%2fetc%2fpasswd", status=404),
    Bad(why="code as an asset", target="/assets/report_folder.py", status=404),
    Bad(why="trial of another sweep", target="/trial/OTHER", status=404),
    Bad(why="trial that is no number", target="/trial/1e3", status=400),
    Bad(why="trial with SQL", target="/trial/1%20or%201=1", status=400),
    Bad(why="trial below one", target="/trial/-1", status=400),
    Bad(why="trial of forty digits", target=f"/trial/{'9' * 40}", status=400),
    Bad(why="unknown table", target="/table?name=sqlite_master", status=404),
    Bad(why="unknown order", target="/table?name=trials&sort=random()", status=400),
    Bad(why="unknown parameter", target="/table?name=trials&debug=1", status=400),
    Bad(why="parameter twice", target="/table?name=trials&name=queue", status=400),
    Bad(why="version that is no number", target="/events?after=now", status=400),
    Bad(why="bytes that are not UTF-8", target="/table?name=%ff%fe", status=400),
    Bad(why="half an escape", target="/table?name=%2", status=400),
    Bad(why="control character", target="/table?name=trials&matching=%00", status=400),
    Bad(why="long parameter", target=f"/table?name=trials&matching={'x' * 500}", status=413),
    Bad(why="long query", target=f"/table?matching={'x' * 5000}", status=414),
    Bad(why="long headers", headers={"X-Long": "x" * 20_000}, status=431),
    Bad(why="long path", target=f"/{'x' * 500}", status=414),
    Bad(
        why="script of another site",
        target="/events",
        headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
        status=403,
    ),
    Bad(
        why="script of a neighbour",
        target="/table?name=trials",
        headers={"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
        status=403,
    ),
    bad_form("form without origin", headers={"Origin": None}),
    bad_form("form of another site", headers={"Origin": "http://evil.example"}),
    bad_form("form of a file", headers={"Origin": "null"}),
    bad_form("form of another port", headers={"Origin": "http://127.0.0.1:1"}),
    bad_form("form without token", has_csrf=False),
    bad_form("wrong token", body=b"csrf=0000", has_csrf=False),
    bad_form("token twice", body=b"&csrf=1"),
    bad_form("form without cookie", headers={"Cookie": None}),
    bad_form("made-up cookie", headers={"Cookie": "sweep-ui-PORT=1.2"}),
    bad_form("JSON", headers={"Content-Type": "application/json"}, body=b"{", status=415),
    bad_form("upload", headers={"Content-Type": "multipart/form-data; boundary=x"}, status=415),
    bad_form("large form", body=b"&x=" + b"x" * 40_000, status=413),
    bad_form("form that says to be large", headers={"Content-Length": "99999999999"}, status=413),
    bad_form("unknown field", body=b"&sweep=other", status=400),
    bad_form("retry of no trial", target="/retry", status=400),
    bad_form("retry of another sweep's trial", target="/retry", body=b"&trial=OTHER", status=404),
    bad_form("no layout", target="/enqueue", body=b"&layout=+&cell=x", status=400),
)


@pytest.fixture(scope="module")
def other_trial(shown_url: str, shown: Filled) -> str:
    with Store.open(shown_url, to_read=True) as store:
        return str(store.trials(store.sweep_named("other").id)[0].id)


def sent(visitor: Visitor, bad: Bad, other_trial: str) -> Answer:
    """Send a bad request, which is right but for what it says."""
    headers = dict(bad.headers)
    if cookie := headers.get("Cookie"):
        headers["Cookie"] = cookie.replace("PORT", str(visitor.port))
    body = bad.body
    if body is not None:
        headers = {**visitor.form_headers(), **headers}
        csrf = f"csrf={visitor.csrf}".encode() if bad.has_csrf else b""
        body = csrf + body.replace(b"OTHER", other_trial.encode())
    target = bad.target.replace("OTHER", other_trial)
    return visitor.ask(bad.method, target, headers, body)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.why)
def test_a_bad_request_is_refused(visitor: Visitor, bad: Bad, other_trial: str) -> None:
    answer = sent(visitor, bad, other_trial)
    assert answer.status == bad.status
    assert b"Traceback" not in answer.body and b'File "' not in answer.body
    assert answer.headers.get("set-cookie") is None
    assert answer.headers["content-type"].startswith("text/plain")
    assert len(answer.body) < 300


def test_what_was_refused_has_changed_nothing(
    visitor: Visitor, shown_url: str, shown: Filled, other_trial: str
) -> None:
    assert len(BAD) >= 40
    with Store.open(shown_url, to_read=True) as store:
        before = [store.trials(row.id) for row in store.sweeps()]
    for bad in BAD:
        sent(visitor, bad, other_trial)
    with Store.open(shown_url, to_read=True) as store:
        assert [store.trials(row.id) for row in store.sweeps()] == before
        assert [row.stop_requested for row in store.sweeps()] == [None, None]


def test_a_host_twice_or_a_request_that_is_none_is_refused(visitor: Visitor) -> None:
    for raw in (
        f"GET / HTTP/1.1\r\nHost: {visitor.host}\r\nHost: evil.example\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "NONSENSE\r\n\r\n",
        f"POST / HTTP/1.1\r\nHost: {visitor.host}\r\nContent-Length: -1\r\n\r\n",
    ):
        with socket.create_connection((LOOPBACK, visitor.port), timeout=30) as connection:
            connection.sendall(raw.encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:1", "[::1]:8000"])
def test_a_tunnel_may_have_another_port(visitor: Visitor, host: str) -> None:
    assert visitor.ask("GET", "/", {"Host": host}).status == 200


@pytest.mark.parametrize(
    "target", ["/", "/trial/1", "/sql", "/cancel", "/nope", "/assets/live.js", "/table?name=queue"]
)
def test_every_answer_has_its_safe_headers(visitor: Visitor, target: str) -> None:
    headers = visitor.get(target).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cache-control"] in ("no-store", "no-cache")
    assert "access-control-allow-origin" not in headers and "server" not in headers


def test_a_link_of_another_site_may_be_followed(visitor: Visitor) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert visitor.ask("GET", "/", headers).status == 200


@pytest.fixture
def guarded(shown_url: str, shown: Filled) -> Callable[[], Visitor]:
    """A server with a token."""
    with served(shown_url, token=TOKEN, hosts=hosts_of("0.0.0.0")) as found:
        yield lambda: Visitor(found.port)


def test_with_a_token_nothing_is_shown_without_it(guarded: Callable[[], Visitor]) -> None:
    stranger = guarded()
    for target in ("/", "/events", "/trial/1", "/sql", "/assets/live.js", "/pictures/", "/nope"):
        answer = stranger.get(target)
        assert answer.status == 401 and "set-cookie" not in answer.headers
    for wrong in ("", "x", TOKEN[:-1], f"{TOKEN}x", "%F0%9F%98%80"):
        assert stranger.get(f"/?token={wrong}").status == 403
    assert stranger.get(f"/sql?token={TOKEN}").status == 401
    assert stranger.form("/cancel").status == 401
    assert stranger.cookie is None


def test_the_token_opens_a_session_and_leaves_the_address(guarded: Callable[[], Visitor]) -> None:
    visitor = guarded()
    entered = visitor.get(f"/?token={TOKEN}")
    assert (entered.status, entered.headers["location"]) == (303, ".")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
    assert visitor.get("/").status == 200
    assert visitor.ask("GET", "/", {"Host": "192.168.7.7:80"}).status == 200
    assert visitor.ask("GET", "/", {"Host": "evil.example"}).status == 400
    # The token of one server is none of another's sessions.
    assert guarded().ask("GET", "/", {"Cookie": f"sweep-ui-{visitor.port}=a.b"}).status == 401
