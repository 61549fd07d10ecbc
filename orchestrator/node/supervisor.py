"""One node's part of one gang, from the fork to the end of its last process.

Reads the files and the output of ranks, and the rank server's messages; ends the gang when one rank
fails. Keeps nothing between attempts.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.core.trial.failures import classify, is_aftermath
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.limits import NOTHING_SEEN, SeenSteps, limit_seconds, passed_message
from orchestrator.core.trial.protocol import LimitName, Phase, log_file
from orchestrator.core.trial.redaction import Secrets
from orchestrator.node.aftermath import Aftermath
from orchestrator.node.machine_watch import MachineWatch
from orchestrator.node.processes import kill
from orchestrator.node.rank_log import RankLog
from orchestrator.node.rank_server import KILL_PATIENCE_SECONDS
from orchestrator.node.rank_server_client import ProcessesStuck, RankServer, ServerLost
from orchestrator.node.rank_watch import RankWatch
from orchestrator.node.stacks import RankStacks, stacks_of

# Importing torch from a cold network file system takes minutes.
SERVER_START_SECONDS = 300.0
# The end of a rank's output that tells whether it lost communication or caused the loss.
FIRST_TAIL_BYTES = 8192
# Time for the stacks of all ranks together.
STACKS_SECONDS = 5.0
# At most, for ranks to write their stacks themselves: a stopped one never does.
ANSWER_SECONDS = 5.0
# Between two looks for such an answer, and how long one that has begun is followed.
ANSWER_POLL_SECONDS = 0.1
# faulthandler begins the stack of each thread so.
STACK_BEGINS = "(most recent call first):"
# Between two checks of heartbeats and limits.
TICK_SECONDS = 0.1


class Cancelled(Exception):
    """The attempt was cancelled."""


class NodeGang:
    """The ranks of one attempt on this node."""

    def __init__(
        self,
        order: LaunchOrder,
        *,
        node: str,
        run_dir: Path,
        wake: int,
        cancelled: Container[str],
        machine: MachineWatch,
    ) -> None:
        """`wake` becomes readable to interrupt a wait, once `cancelled` may have the gang's tag."""
        self._order = order
        self._secrets = Secrets(order.secrets)
        self._node = node
        self._run_dir = run_dir
        self._wake = wake
        self._cancelled, self._machine = cancelled, machine
        self._selector = selectors.DefaultSelector()
        self._forked_at = 0.0  # monotonic, as the two below
        self._next_tick = 0.0
        self._aftermath = Aftermath()
        self.tag = order.request.tag
        self.processes_killed = 0
        self.teardown_seconds: float | None = None
        self.cancelled = False
        self.watches: list[RankWatch] = []
        # The ranks that were alive when a limit had passed, the least advanced first, each with a
        # message about its limit.
        self._suspects: list[tuple[RankWatch, str]] = []
        # The phase and the step of each rank then: while stacks are taken, ranks may go on.
        self._places: dict[int, tuple[Phase, int]] = {}
        self._limit_passed_at: float | None = None  # Unix time
        self._total_limit_passed = False

    def run(
        self, server: RankServer, *, environment: dict[str, str], ranks: Sequence[dict[str, Any]]
    ) -> None:
        """Run the ranks until their last process has ended. Call `finish` afterwards in any case.

        Raises ServerLost if the server ends or does not answer: stop it then, to be sure that
        nothing is left. Raises ProcessesStuck if something does not die.
        """
        self._selector.register(server, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            self._await(server, "ready", SERVER_START_SECONDS)
            self._fork(server, environment, ranks)
            self._supervise(server)
        except Cancelled:
            self.cancelled = True
        self._log_why_ended()
        self._clear(server)

    def finish(self) -> None:
        """Read the last output and files of the ended ranks, and the time since the last result."""
        now = time.monotonic()
        for watch in self.watches:
            if watch.pipe is not None:
                watch.log.copy(watch.pipe)
                self._close_pipe(watch)
            watch.log.close()
            watch.read_last_words(now)
        # Read results only now: a slow rank may have got its result while the stacks were taken.
        for watch, text in self._suspects:
            if not watch.measured:
                watch.limit_passed, watch.ended_at_unix_seconds = text, self._limit_passed_at
                watch.total_limit_passed = self._total_limit_passed
                watch.phase, watch.step = self._places[watch.rank]
                break
        since = [watch.teardown_since for watch in self.watches if watch.measured]
        is_complete = self.has_enough or len(since) == len(self.watches)
        if since and is_complete and None not in since:
            self.teardown_seconds = now - max(at for at in since if at is not None)
        self._selector.close()

    @property
    def has_enough(self) -> bool:
        """True if the gang's numbers have arrived: how other ranks ended does not matter then."""
        return any(watch.has_enough for watch in self.watches)

    @property
    def total_limit_seconds(self) -> float:
        """The limit of the whole attempt, from the steps that were seen here."""
        return limit_seconds(self._order.request, LimitName.TOTAL, self._seen)

    @property
    def _seen(self) -> SeenSteps:
        """The slowest rank's steps."""
        seen = [watch.seen for watch in self.watches if watch.seen is not NOTHING_SEEN]
        return max(seen, key=lambda each: each.step_seconds or 0.0, default=NOTHING_SEEN)

    @property
    def _checks_total_limit(self) -> bool:
        """An automatic limit follows the steps, which only one node sees of other programs."""
        order = self._order
        sees_steps = 0 <= order.reporting_rank - order.first_rank < order.local_world_size
        return sees_steps or LimitName.TOTAL not in order.request.limits.auto

    def least_advanced(self) -> RankWatch | None:
        """The rank that all others wait for: the first suspect in a hang."""
        alive = [watch for watch in self.watches if not watch.ended]
        return min(alive, key=RankWatch.advance, default=None)

    def _await(self, server: RankServer, event: str, patience_seconds: float) -> dict[str, Any]:
        """Handle events until this one arrives. Raises ServerLost, Cancelled."""
        deadline = time.monotonic() + patience_seconds
        if event == "ready" and server.pid is not None:
            return {}
        while time.monotonic() < deadline:
            for message in self._handle_events(server, min(1.0, deadline - time.monotonic())):
                if message["event"] == event:
                    return message
                if message["event"] == "fork_failed":
                    raise ServerLost(f"the rank server cannot fork: {message['reason']}")
            if self.tag in self._cancelled and event != "clear":
                raise Cancelled
        raise ServerLost(f"the rank server was not {event} after {patience_seconds:g} s")

    def _handle_events(self, server: RankServer, timeout_seconds: float) -> list[dict[str, Any]]:
        """One pass of the loop: copy output into logs, note ends; returns the server's messages."""
        messages = []
        for key, _ in self._selector.select(max(0.0, timeout_seconds)):
            if key.fileobj is server:
                message = server.receive()
                messages.append(message)
                if message["event"] == "ended":
                    self._note_end(message)
            elif key.fileobj == self._wake:
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            else:
                self._copy_output(key.data)
        return messages

    def _fork(
        self, server: RankServer, environment: dict[str, str], ranks: Sequence[dict[str, Any]]
    ) -> None:
        writers = []
        try:
            for place in ranks:
                reader, writer = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(reader, False)
                writers.append(writer)
                watch = RankWatch(
                    rank=place["rank"],
                    log=RankLog(self._run_dir / log_file(place["rank"]), secrets=self._secrets),
                    pipe=reader,
                    run_dir=self._run_dir,
                    reporting_rank=self._order.reporting_rank,
                )
                self._selector.register(reader, selectors.EVENT_READ, watch)
                self.watches.append(watch)
            server.fork(run_dir=self._run_dir, environment=environment, ranks=ranks, logs=writers)
        finally:
            for writer in writers:
                os.close(writer)
        # Ranks start meanwhile: to create a file takes about half a millisecond.
        for watch in self.watches:
            watch.log.create()
        self._forked_at = time.monotonic()
        for watch in self.watches:
            watch.phase_since = watch.progress_at = self._forked_at
        pids = self._await(server, "forked", self._order.request.limits.start)["pids"]
        for watch, pid in zip(self.watches, pids, strict=True):
            watch.pid = pid

    def _supervise(self, server: RankServer) -> None:
        """Watch until every rank has ended, or one has failed."""
        while not all(watch.ended for watch in self.watches):
            now = time.monotonic()
            if self.tag in self._cancelled:
                raise Cancelled
            if self._aftermath.is_over(now, self._alive):
                return
            stop_at = self._aftermath.until
            if now >= self._next_tick:
                self._next_tick = now + TICK_SECONDS
                if stop_at is None and self._check_progress(now):
                    return
            wait = self._next_tick if stop_at is None else min(stop_at, self._next_tick)
            self._handle_events(server, wait - now)

    def _note_end(self, message: dict[str, Any]) -> None:
        now = time.monotonic()
        watch = next(watch for watch in self.watches if watch.rank == message["rank"])
        watch.code, watch.ended_at_unix_seconds = message["code"], message["at"]
        self._copy_output(watch)
        watch.read_last_words(now)
        if not watch.measured:
            failure = classify(watch.evidence(self._node, tail_bytes=FIRST_TAIL_BYTES))
            self._aftermath.note_failure(
                now, may_be_innocent=is_aftermath(failure), alive=self._alive
            )

    @property
    def _alive(self) -> list[int]:
        """The processes of the ranks that have not ended."""
        return [one.pid for one in self.watches if one.pid is not None and not one.ended]

    def _check_progress(self, now: float) -> bool:
        """Read heartbeats, check limits. True: the gang has to end."""
        alive = [watch for watch in self.watches if not watch.ended]
        for watch in alive:
            watch.read_heartbeat(now)
        pids, timed_steps_run = [watch.pid for watch in self.watches], all(w.timed for w in alive)
        self._machine.tick(pids, timed_steps_run=timed_steps_run)
        overdue = {watch.rank: text for watch in alive if (text := watch.overdue(self._order, now))}
        if self._checks_total_limit and now - self._forked_at > self.total_limit_seconds:
            text = passed_message(self._order.request, LimitName.TOTAL, self._seen)
            overdue = {watch.rank: text for watch in alive}
            self._total_limit_passed = True
        if not overdue:
            return False
        self._places = {watch.rank: (watch.phase, watch.step) for watch in alive}
        for watch in alive:
            watch.read_last_words(now)
        if all(watch.measured for watch in alive):
            # All ranks have a result: the rest hang in teardown.
            return True
        if all(watch.measured for watch in alive if watch.rank in overdue):
            # Ranks in teardown wait for the others, which have limits of their own.
            return False
        self._limit_passed_at, any_text = time.time(), next(iter(overdue.values()))
        by_advance = sorted(alive, key=RankWatch.advance)
        self._suspects = [(watch, overdue.get(watch.rank, any_text)) for watch in by_advance]
        self._collect_stacks(alive)
        return True

    def _collect_stacks(self, watches: Sequence[RankWatch]) -> None:
        """Write into each living rank's log where its processes hang, and name it in messages."""
        pids = {watch.pid: watch for watch in watches if watch.pid is not None}
        began = time.time() - (time.monotonic() - self._forked_at)
        found = stacks_of(list(pids), seconds=STACKS_SECONDS, began_unix_seconds=began)
        for pid, stacks in found.items():
            pids[pid].log.write(stacks.text.encode())
        self._suspects = [
            (watch, _explained(text, found.get(watch.pid) if watch.pid is not None else None))
            for watch, text in self._suspects
        ]
        asked = []
        for pid, watch in pids.items():
            if not found[pid].has_answered and watch.phase is not Phase.START:
                # faulthandler, which workloads.rank installs, writes the stacks to the log.
                kill(pid, signal.SIGUSR1)
                asked.append(watch)
        self._await_stacks(asked)

    def _await_stacks(self, asked: Sequence[RankWatch]) -> None:
        """Copy the stacks of ranks that were asked to write them, as they come."""
        until = time.monotonic() + ANSWER_SECONDS
        written: dict[int, str] = {}
        while asked and time.monotonic() < until:
            time.sleep(ANSWER_POLL_SECONDS)
            for watch in asked:
                self._copy_output(watch)
            before, written = written, {one.rank: one.log.tail(FIRST_TAIL_BYTES) for one in asked}
            complete = {
                rank
                for rank, text in written.items()
                if STACK_BEGINS in text and text == before.get(rank)
            }
            asked = [one for one in asked if one.pipe is not None and one.rank not in complete]

    def _log_why_ended(self) -> None:
        """Write into the log of each rank that will be killed the reason."""
        alive = [watch for watch in self.watches if not watch.ended]
        reason = "another rank has failed"
        if self.cancelled:
            reason = "the attempt was cancelled"
            if self._order.local_world_size < self._order.request.layout.world_size:
                reason += ", or has ended on another node"
        elif self._suspects:
            reason = "one of its limits has passed (measurement.limits)"
        elif self.has_enough:
            reason = "the numbers of this attempt are enough"
        elif all(watch.measured for watch in alive):
            reason = "the attempt is measured, and it did not end by itself"
        for watch in alive:
            watch.log.write(f"\nended by sweep: {reason}\n".encode())

    def _clear(self, server: RankServer) -> None:
        """Kill what is left. The server adopts all orphans: without a child of it, all is gone."""
        if server.pid is None:
            # The rank server would answer only after its imports.
            raise ServerLost("the rank server was still importing")
        server.clear()
        message = self._await(server, "clear", KILL_PATIENCE_SECONDS + 5)
        self.processes_killed += message["killed"]
        if message["stuck"]:
            raise ProcessesStuck(message["stuck"])

    def _copy_output(self, watch: RankWatch) -> None:
        """The rank's end, in the same batch of events, may have closed its pipe already."""
        if watch.pipe is not None and not watch.log.copy(watch.pipe):
            self._close_pipe(watch)

    def _close_pipe(self, watch: RankWatch) -> None:
        if watch.pipe is not None:
            self._selector.unregister(watch.pipe)
            os.close(watch.pipe)
            watch.pipe = None


def _explained(limit: str, stacks: RankStacks | None) -> str:
    """Return the message of a passed limit, with a fix or the place if the stacks show one."""
    if stacks is None:
        return limit
    if stacks.stale_lock is not None:
        return (
            f"the lock of a build of a torch extension is older than this attempt: rm"
            f" {stacks.stale_lock} unless another process builds there; {limit}"
        )
    return f"in {stacks.place}: {limit}" if stacks.place is not None else limit
