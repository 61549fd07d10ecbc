"""Notices of a sweep reach webhooks and commands; one that fails, hangs or floods hurts nothing."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.run import notifier
from orchestrator.cli.run.checks import rank_environment
from orchestrator.cli.run.notifier import MOST_SENT, Notifier, notifier_of, secrets_of
from orchestrator.cli.terminal.console_log import Redactor
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.sweepfile.notify_section import NotifyTarget
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.sweep.notices import Notice, NoticeEvent
from tests.acceptance.command import CommandHere, write_sweep

SECRET = "T0-B0-verysecret"


class Webhook(ThreadingHTTPServer):
    """A server on 127.0.0.1 that notes what is posted to it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.posted: list[tuple[str, str, Any]] = []
        self.status, self.hangs = 200, threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/services/{SECRET}"


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        kind = self.headers["Content-Type"]
        self.server.posted.append((self.path, kind, json.loads(body)))
        self.server.hangs.wait(30.0)
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.posted.append((self.path, "GET", None))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    server = Webhook()
    server.hangs.set()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HOOK", server.address)
    yield server
    server.hangs.set()
    server.shutdown()
    server.server_close()
    thread.join()


def spec(*targets: NotifyTarget) -> SweepSpec:
    return SweepSpec.model_validate(
        {
            "name": "t",
            "model": "llama-tiny",
            "gpus": 2,
            "sequence_length": 64,
            "global_batch_size": 8,
            "notify": targets,
        }
    )


def notice(text: str = "Sweep t: ended") -> Notice:
    return Notice(event=NoticeEvent.END, text=text)


HOOK = NotifyTarget(url="${HOOK}")


def opened(*targets: NotifyTarget, redact: Redactor | None = None) -> Notifier:
    return notifier_of(spec(*targets), redact or Redactor([]))


def test_a_notice_is_posted_as_slack_takes_it(webhook: Webhook) -> None:
    with opened(HOOK) as sender:
        sender.send(notice("Sweep t: <!channel> a & b\x1b[31m \u202e /x"), is_last=True)
    assert webhook.posted == [
        (
            f"/services/{SECRET}",
            "application/json",
            {"text": "Sweep t: &lt;!channel&gt; a &amp; b  /x"},
        )
    ]


def test_a_command_gets_the_same_on_its_input(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    program = f"import sys; open({str(kept)!r}, 'w').write(sys.stdin.read())"
    with opened(NotifyTarget(command=(sys.executable, "-c", program))) as sender:
        sender.send(notice())
    assert json.loads(kept.read_text()) == {"text": "Sweep t: ended"}


def test_no_secret_is_sent(webhook: Webhook) -> None:
    with opened(HOOK, redact=Redactor([], values={"TOKEN": "swordfish-and-more"})) as sender:
        sender.send(notice("rank 0: swordfish-and-more is refused"))
    assert webhook.posted[0][2] == {"text": "rank 0: *** is refused"}


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_webhook_that_refuses_is_said_once(
    webhook: Webhook, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    webhook.status = status
    with caplog.at_level(logging.WARNING), opened(HOOK) as sender:
        for _ in range(3):
            sender.send(notice())
    assert len(webhook.posted) == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"notify 1 (${{HOOK}}) does not work: it answered {status}. The sweep goes on"
    ]


def test_a_webhook_that_is_not_there_is_said_without_its_address(
    webhook: Webhook, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:9/{SECRET}")
    with caplog.at_level(logging.WARNING), opened(HOOK) as sender:
        sender.send(notice())
    assert "Connection refused" in caplog.text and SECRET not in caplog.text


def test_a_webhook_that_hangs_delays_neither_notices_nor_the_end(
    webhook: Webhook, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "CLOSE_SECONDS", 0.3)
    webhook.hangs.clear()
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), opened(HOOK) as sender:
        for _ in range(1000):
            sender.send(notice())
        assert time.monotonic() - began < 0.5
    assert time.monotonic() - began < 2.0
    assert len(webhook.posted) <= 1 and len(caplog.records) == 1


def test_a_command_that_hangs_is_ended_with_its_children(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "TIMEOUT_SECONDS", 1.0)
    pids = tmp_path / "pids"
    script = f"sleep 300 & echo $$ $! > {pids}.part; mv {pids}.part {pids}; wait"
    with caplog.at_level(logging.WARNING), opened(NotifyTarget(command=("sh", "-c", script))) as it:
        it.send(notice())
    assert "did not end within 1 s" in caplog.text
    for pid in map(int, pids.read_text().split()):
        by = time.monotonic() + 10.0
        while _is_alive(pid):
            assert time.monotonic() < by
            time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("/no/such/program",), "cannot be started: No such file or directory"),
        (("false",), "it ended with 1"),
    ],
)
def test_a_command_that_fails_is_said(
    caplog: pytest.LogCaptureFixture, command: tuple[str, ...], said: str
) -> None:
    with caplog.at_level(logging.WARNING), opened(NotifyTarget(command=command)) as sender:
        sender.send(notice())
        sender.send(notice())
    assert said in caplog.text and len(caplog.records) == 1


def test_a_flood_ends_and_the_last_notice_still_comes(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "MOST_WAITING", 10_000)
    monkeypatch.setattr(notifier, "CLOSE_SECONDS", 60.0)
    with opened(HOOK) as sender:
        for _ in range(MOST_SENT + 50):
            sender.send(notice("again"))
        sender.send(notice("the end"), is_last=True)
    assert len(webhook.posted) == MOST_SENT + 1
    assert webhook.posted[-1][2] == {"text": "the end"}


def test_a_target_that_hangs_keeps_no_other_waiting(
    webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "CLOSE_SECONDS", 0.3)
    webhook.hangs.clear()
    kept = tmp_path / "kept"
    with opened(HOOK, NotifyTarget(command=("sh", "-c", f"cat > {kept}"))) as sender:
        sender.send(notice())
        by = time.monotonic() + 10.0
        while not (kept.exists() and kept.read_text()):
            assert time.monotonic() < by
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "notify names HOOK, not set in this environment: export HOOK"),
        ("", "notify names HOOK, not set"),
        (f"file:///{SECRET}", "HOOK holds no address"),
        (SECRET, "HOOK holds no address"),
        (f"https://[{SECRET}", "HOOK holds no address"),
        (f"https://a/\n{SECRET}", "HOOK holds no address"),
    ],
)
def test_a_wrong_address_is_refused_and_not_repeated(
    value: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    if value is not None:
        monkeypatch.setenv("HOOK", value)
    with pytest.raises(UsageInvalid) as mistake:
        secrets_of(spec(HOOK))
    assert said in str(mistake.value) and SECRET not in str(mistake.value)


def test_a_simulated_sweep_tells_its_winners_and_its_end_and_keeps_the_address_secret(
    command: CommandHere, tmp_path: Path, webhook: Webhook
) -> None:
    axes = {"micro_batch_size": [1, 2], "recompute": ["none", "full"]}
    file = write_sweep(tmp_path, axes=axes, notify={"url": "${HOOK}"})
    done = command.ok("run", file, "--simulate", "-vv")
    texts = [posted["text"] for _, _, posted in webhook.posted]
    assert all(text.startswith("Simulated, nothing was measured. Sweep t-simul") for text in texts)
    assert "ended (" in texts[-1] and "tokens/s/GPU" in texts[-1]
    winner = texts[-2]
    assert "the winner, confirmed by" in winner or "tied with" in winner
    # The same command again has nothing to tell.
    again = command.ok("run", file, "--simulate")
    assert len([text for text in texts if "ended (" in text]) == 1
    shown = [command.ok("export", kind, "t-simulated").stdout for kind in ("json", "csv")]
    said = [done.stdout, done.stderr, again.stdout, again.stderr, *shown]
    said.append(command.ok("status", "t-simulated", "--json").stdout)
    assert not any(SECRET in text for text in said)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".sqlite" for path in found)
    assert not any(SECRET.encode() in path.read_bytes() for path in found)
    assert any(b"${HOOK}" in path.read_bytes() for path in found if path.suffix == ".sqlite")


def test_an_end_with_an_error_is_told(
    command: CommandHere, tmp_path: Path, webhook: Webhook
) -> None:
    fault = {"fault": "config_rejected", "at": "init"}
    file = write_sweep(
        tmp_path,
        workload={"name": "synthetic", "options": {"faults": [fault]}},
        axes={"micro_batch_size": [1, 2, 4], "recompute": ["none", "full"]},
        notify={"url": "${HOOK}"},
    )
    assert command.run("run", file, "--simulate").returncode == 2
    last = webhook.posted[-1][2]["text"]
    assert last.startswith(
        "Simulated, nothing was measured. Sweep t-simulated: ended with an error"
    )
    assert "config_rejected" in last


def test_ranks_do_not_get_the_address(webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    given = spec(HOOK).model_dump()
    options = {"argv": ["train"], "pass_env": ["HOOK", "HOOKED"]}
    given["workload"] = {"name": "command", "options": options}
    monkeypatch.setenv("HOOKED", "fish")
    assert rank_environment(SweepSpec.model_validate(given)) == {"HOOKED": "fish"}
