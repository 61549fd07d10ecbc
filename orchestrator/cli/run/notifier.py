"""Sends notices of a sweep to webhooks and commands, each in a thread of its own.

Nothing here may hurt or slow a sweep: a notice that cannot be sent is dropped, each target warns
once, and the end of a sweep waits a few seconds at most.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from orchestrator.cli.terminal.output import plain, shortened
from orchestrator.core.errors import UsageInvalid

if TYPE_CHECKING:
    from orchestrator.core.sweepfile.notify_section import NotifyTarget
    from orchestrator.core.sweepfile.spec import SweepSpec
    from orchestrator.sweep.notices import Notice

logger = logging.getLogger(__name__)

# For one notice; a webhook answers within a second, or is not there.
TIMEOUT_SECONDS = 10.0
# At the end of a sweep, for all targets together.
CLOSE_SECONDS = 5.0
# Notices that wait for a target. A target that takes longer than a sweep writes gets no more.
MOST_WAITING = 32
# Notices of one call to one target, so that no sweep floods a channel. The end comes in any case.
MOST_SENT = 100
MOST_CHARACTERS = 3_000  # Slack cuts longer texts

Send = Callable[[bytes], None]


class _NotSent(Exception):
    """A target did not take a notice. The message says why, and names no address."""


class Notifier:
    """Sends notices. Use it as a context manager, which starts and ends its threads."""

    def __init__(self, senders: Sequence[_NoticeSender], redact: Callable[[str], str]) -> None:
        self._senders, self._redact = senders, redact

    def __enter__(self) -> Self:
        for sender in self._senders:
            sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, notice: Notice, *, is_last: bool = False) -> None:
        """Give a notice to the threads that send it. It returns at once."""
        if self._senders:
            body = _body(notice, self._redact)
            for sender in self._senders:
                sender.put(body, is_last=is_last)

    def close(self) -> None:
        """Wait a few seconds for what is being sent, and leave the rest."""
        by = time.monotonic() + CLOSE_SECONDS
        for sender in self._senders:
            sender.finish()
        for sender in self._senders:
            sender.wait(by)


def secrets_of(spec: SweepSpec) -> dict[str, str]:
    """The addresses of webhooks, by the names of their environment variables.

    Raises UsageInvalid, without the value, if one is not set or is no address.
    """
    names = [target.variable for target in spec.notify if target.variable is not None]
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise UsageInvalid(
            f"notify names {', '.join(missing)}, not set in this environment:"
            f" export {' '.join(missing)}, and run again"
        )
    for name in names:
        if not _is_address(os.environ[name]):
            raise UsageInvalid(
                f"notify: {name} holds no address that begins with https:// or http://"
            )
    return {name: os.environ[name] for name in names}


def notifier_of(spec: SweepSpec, redact: Callable[[str], str]) -> Notifier:
    """The notifier of a sweep file; without `notify` it sends nothing."""
    addresses = secrets_of(spec)
    senders = [
        _NoticeSender(number, *_sender(target, addresses))
        for number, target in enumerate(spec.notify, 1)
    ]
    return Notifier(senders, redact)


class _NoticeSender:
    """One address with the notices that wait for it, and the thread that sends them."""

    def __init__(self, number: int, name: str, send: Send, stop: Callable[[], None]) -> None:
        self._name, self._send, self._stop = f"notify {number} ({name})", send, stop
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._num_taken, self._has_warned = 0, False
        # A daemon: a target that hangs does not keep the process.
        self._thread = threading.Thread(target=self._send_on, daemon=True, name=self._name)

    def start(self) -> None:
        """Begin to send what waits."""
        self._thread.start()

    def put(self, body: bytes, *, is_last: bool) -> None:
        if self._num_taken >= MOST_SENT and not is_last:
            self._warn(f"more than {MOST_SENT} notices: the next is the one of the end")
            return
        self._num_taken += 1
        try:
            self._waiting.put_nowait(body)
        except queue.Full:
            self._warn(f"{MOST_WAITING} notices wait: others are dropped")

    def finish(self) -> None:
        """Send nothing more than what waits."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)

    def wait(self, by: float) -> None:
        self._thread.join(max(by - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._warn("it does not answer: what waits for it is dropped")
            self._stop()

    def _send_on(self) -> None:
        while (body := self._waiting.get()) is not None:
            try:
                self._send(body)
            except _NotSent as exc:
                self._warn(str(exc))
            except Exception as exc:  # noqa: BLE001  # no notice may hurt a sweep
                self._warn(type(exc).__name__)

    def _warn(self, why: str) -> None:
        """Say once that a target does not work: a sweep may have hundreds of notices."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s does not work: %s. The sweep goes on", self._name, why)


def _body(notice: Notice, redact: Callable[[str], str]) -> bytes:
    text = shortened(plain(redact(notice.text), lines=True))[:MOST_CHARACTERS]
    # In Slack's texts these three are control characters: <!channel> would call everybody.
    for character, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, escaped)
    return json.dumps({"text": text}).encode()


def _sender(
    target: NotifyTarget, addresses: Mapping[str, str]
) -> tuple[str, Send, Callable[[], None]]:
    """The name of a target for people, how to send to it, and how to end that."""
    if target.command is not None:
        command = _Command(target.command)
        return plain(target.command[0])[:80], command.send, command.stop
    assert target.variable is not None, "checked by the section"
    address = addresses[target.variable]
    return target.url or "", lambda body: _post(address, body), lambda: None


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and text.isprintable()
    except ValueError:
        return False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: an answer may not choose where notices go."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(address: str, body: bytes) -> None:
    request = urllib.request.Request(
        address, data=body, method="POST", headers={"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        # The body of the answer is not read: it may never end.
        opener.open(request, timeout=TIMEOUT_SECONDS).close()
    except HTTPError as exc:
        exc.close()
        raise _NotSent(f"it answered {exc.code}") from None
    except (URLError, OSError, http.client.HTTPException, ValueError) as exc:
        reason = exc.reason if isinstance(exc, URLError) else exc
        if isinstance(reason, TimeoutError):
            raise _NotSent(f"no answer within {TIMEOUT_SECONDS:.0f} s") from None
        # The text of other errors may quote the address.
        what = reason.strerror if isinstance(reason, OSError) else None
        raise _NotSent(what or type(reason).__name__) from None


class _Command:
    """A program that takes each notice on its standard input."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, body: bytes) -> None:
        try:
            self._process = process = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, ValueError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else None
            raise _NotSent(f"it cannot be started: {why or type(exc).__name__}") from None
        try:
            process.communicate(body, timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.stop()
            process.wait()
            raise _NotSent(f"it did not end within {TIMEOUT_SECONDS:.0f} s") from None
        if process.returncode:
            raise _NotSent(f"it ended with {process.returncode}")

    def stop(self) -> None:
        """End the program and the processes of its session's group."""
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
