"""A PostgreSQL of a test's own that can be killed and started again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.node.processes import descendants, start_time
from tests import new_postgresql

PATIENCE_SECONDS = 60.0


CONNECTIONS_APART = 5.0


class Server:
    """Runs from the start; `kill` and `start` may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self._server = new_postgresql.server(folder)
        self.url: str = self._server.get_uri()
        self._dead: list[tuple[int, int | None]] = []
        self.num_ended = 0  # connections that `ending_connections` has ended

    def kill(self) -> None:
        """SIGKILL the server; its backends see that and end."""
        pid = self._server.get_pid()
        assert pid is not None
        self._dead = [(process, start_time(process)) for process in (pid, *descendants(pid))]
        os.kill(pid, signal.SIGKILL)

    def start(self) -> None:
        """Let it recover, once the dead one's last backend is gone. Does nothing if it runs."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(
            started is not None and start_time(pid) == started for pid, started in self._dead
        ):
            assert time.monotonic() < deadline, "backends of the dead server are left"
            time.sleep(0.02)
        # A zombie, for which nobody has waited, looks alive.
        if self._dead:
            for lock in (
                self._server.pgdata / "postmaster.pid",
                *self._server.pgdata.glob(".s.PGSQL.*.lock"),
            ):
                lock.unlink(missing_ok=True)
        self._dead = []
        self._server.ensure_postgres_running()

    @contextmanager
    def ending_connections(self, *, most_seconds: float, seed: int) -> Iterator[None]:
        """Meanwhile end all our connections again and again, up to so many seconds apart.

        On a busy machine, longer: else no new connection would get to its first statement.
        """
        import psycopg

        over, chance = threading.Event(), random.Random(seed)
        ours = "application_name = 'layout-sweep' AND pid <> pg_backend_pid()"

        def work() -> None:
            apart = most_seconds
            while not over.wait(chance.uniform(0.0, apart)):
                try:
                    began = time.monotonic()
                    with psycopg.connect(self.url, autocommit=True) as connection:
                        connection.execute("SELECT 1")
                        apart = max(most_seconds, CONNECTIONS_APART * (time.monotonic() - began))
                        while not over.wait(chance.uniform(0.0, apart)):
                            statement = (
                                "SELECT pg_terminate_backend(pid) FROM "
                                f"pg_stat_activity WHERE {ours}"
                            )
                            self.num_ended += connection.execute(statement).rowcount
                except psycopg.OperationalError:
                    continue  # the server itself was killed

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        self._server.cleanup()


@contextmanager
def server() -> Iterator[Server]:
    """One that is gone afterwards, with its files."""
    folder = Path(tempfile.mkdtemp(prefix="sweep-pg-"))  # a socket's path: 107 characters
    try:
        opened = Server(folder)
        try:
            yield opened
        finally:
            opened.start()  # only a running one can stop
            opened.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
