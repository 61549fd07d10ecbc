"""Starts the process that mirrors a sweep, passes its warnings on, and says what it left."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from layout_sweep import start
from orchestrator.cli.mirror.process import DEADLINE_SECONDS, END_SECONDS
from orchestrator.cli.mirror.targets import mirror_secrets, missing_packages
from orchestrator.cli.terminal.output import plain

if TYPE_CHECKING:
    from orchestrator.core.sweepfile.mirror_section import MirrorSection

logger = logging.getLogger(__name__)

# A process that does not end by itself is killed then.
KILL_SECONDS = 5.0


class MirrorWorker:
    """The process, or none if the file has no `mirror`. Use it as a context manager."""

    def __init__(
        self, mirror: MirrorSection | None, sweep: str, db: str | None, say: Callable[[str], None]
    ) -> None:
        """`say` shows a line to the person."""
        self._mirror, self._sweep, self._db, self._say = mirror, sweep, db, say
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._left: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        """Start the process. Raises UsageInvalid if a variable is not set."""
        mirror = self._mirror
        mirror_secrets(mirror)
        if mirror is None:
            return self
        for line in missing_packages(mirror):
            self._say(f"{line}. The sweep runs; afterwards: sweep mirror {self._sweep}")
        if len(missing_packages(mirror)) == sum(
            place is not None for place in (mirror.mlflow, mirror.wandb)
        ):
            return self
        from db.connection import url  # SQLAlchemy

        store = url.resolve(self._db).render_as_string(hide_password=False)
        try:
            self._process = subprocess.Popen(
                start.command(
                    "orchestrator.cli.mirror.process", self._sweep, mirror.model_dump_json()
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # In no argument, which others see.
                env={**os.environ, "SWEEP_DB": store},
                text=True,
                # Ctrl-C is for the sweep: what it measured is still mirrored.
                start_new_session=True,
            )
        except OSError as exc:
            self._say(f"mirror does not start: {exc.strerror}. The sweep runs")
            return self
        assert self._process.stdout is not None
        self._thread = threading.Thread(
            target=self._listen, args=(self._process.stdout,), daemon=True, name="mirror"
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        process, thread = self._process, self._thread
        if process is None or thread is None or process.stdin is None:
            return
        process.stdin.close()
        by = time.monotonic() + END_SECONDS + DEADLINE_SECONDS + KILL_SECONDS
        try:
            process.wait(max(by - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        thread.join(1.0)
        later = f"Later: sweep mirror {self._sweep}"
        if self._left is None:
            self._say(f"It is not known whether all trials were mirrored. {later}")
        for tracker, (num, why) in (self._left or {}).items():
            self._say(f"Not mirrored to {plain(tracker)}: {num:,} trials ({plain(why)}). {later}")

    def _listen(self, stdout: IO[str]) -> None:
        for line in stdout:
            try:
                told = json.loads(line)
            except ValueError:
                continue
            if "warning" in told:
                logger.warning("%s", plain(told["warning"]), extra={"action": "mirror_failed"})
            if "left" in told:
                self._left = told["left"]
