"""The process that mirrors a sweep while `sweep run` works on it.

It has a connection of its own to the store, so that no tracker can slow or end a sweep. It ends
when its standard input does, also if `sweep run` was killed.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.cli.mirror.targets import alone, mirrorings

if TYPE_CHECKING:
    from db.read.rows import SweepRow
    from db.store import Store
    from orchestrator.report.mirrors.mirroring import Mirroring, Pass

POLL_SECONDS = 5.0
# Between two tries of a tracker that did not answer.
RETRY_SECONDS = 30.0
# For the last pass, once `sweep run` has ended.
END_SECONDS = 20.0
# A tracker that hangs is left behind then.
DEADLINE_SECONDS = 10.0

Tell = Callable[[dict[str, Any]], None]


def main() -> int:
    """Mirror the sweep that the first argument names, with the section that the second holds."""
    tell = _teller()
    from orchestrator.core.sweepfile.mirror_section import MirrorSection

    name, mirror = sys.argv[1], MirrorSection.model_validate_json(sys.argv[2])
    passes = _MirrorPasses(name, mirror, tell)
    passes.go_on()
    # Threads of a tracker may not end.
    os._exit(0)


def _teller() -> Tell:
    """Return a function that writes lines to stdout, and keep all others from writing there."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)

    def tell(line: dict[str, Any]) -> None:
        try:
            own.write(json.dumps(line) + "\n")
            own.flush()
        except OSError:  # `sweep run` is gone
            pass

    return tell


class _MirrorPasses:
    """Passes over a sweep until its end."""

    def __init__(self, name: str, mirror: Any, tell: Tell) -> None:
        self._name, self._mirror, self._tell = name, mirror, tell
        self._has_ended, self._warned = False, set[str]()
        # The newest event of the last pass.
        self._seen = -1
        self._tried_at = 0.0

    def go_on(self) -> None:
        """Mirror until the standard input ends, and then once more."""
        from db.store import Store
        from orchestrator.core.errors import SweepError

        while True:
            try:
                with Store.open(None, to_read=True) as store:
                    self._follow(store)
                    return
            except SweepError as exc:
                self._warn("the store", str(exc))
                if self._has_ended:
                    return
                self._wait()

    def _follow(self, store: Store) -> None:
        while (sweep := self._sweep(store)) is None:
            if self._has_ended:
                return
            self._wait()
        while True:
            with alone(sweep) as is_alone:
                if is_alone:
                    self._pass_on(store, sweep)
                    return
            if self._has_ended:
                return
            self._wait()

    def _pass_on(self, store: Store, sweep: SweepRow) -> None:
        trackers = mirrorings(self._mirror, sweep)
        passes: Sequence[Pass] = ()
        while not self._has_ended:
            newest = store.newest_event_id(sweep.id)
            is_due = time.monotonic() - self._tried_at > RETRY_SECONDS
            if newest != self._seen or (is_due and any(one.num_left for one in passes)):
                passes = self._pass(store, sweep, trackers, is_late=lambda: self._ends_within(0.0))
                self._seen = newest
            self._wait()
        # What hangs now is left behind.
        limit = threading.Timer(END_SECONDS + DEADLINE_SECONDS, os._exit, [1])
        limit.daemon = True
        limit.start()
        by = time.monotonic() + END_SECONDS
        passes = self._pass(store, sweep, trackers, is_late=lambda: time.monotonic() > by)
        left = {one.tracker: [one.num_left, one.why] for one in passes if one.num_left or one.why}
        self._tell({"left": left})
        for tracker in trackers:
            tracker.close()

    def _pass(
        self,
        store: Store,
        sweep: SweepRow,
        trackers: Sequence[Mirroring],
        *,
        is_late: Callable[[], bool],
    ) -> list[Pass]:
        from orchestrator.report.mirrors.mirroring import read_runs

        runs = read_runs(store, sweep)
        passes = [tracker.catch_up(runs, is_late) for tracker in trackers]
        self._tried_at = time.monotonic()
        for one in passes:
            if one.why is not None and not self._has_ended:
                self._warn(f"mirror.{one.tracker}", one.why)
        return passes

    def _sweep(self, store: Store) -> SweepRow | None:
        return next((row for row in store.sweeps() if row.name == self._name), None)

    def _warn(self, what: str, why: str) -> None:
        """Tell once that something does not work."""
        if what not in self._warned:
            self._warned.add(what)
            self._tell({"warning": f"{what} does not work: {why}. It is tried again"})

    def _wait(self) -> None:
        self._ends_within(POLL_SECONDS)

    def _ends_within(self, seconds: float) -> bool:
        if not self._has_ended:
            readable, _, _ = select.select([0], [], [], seconds)
            self._has_ended = bool(readable) and not os.read(0, 1024)
        return self._has_ended
