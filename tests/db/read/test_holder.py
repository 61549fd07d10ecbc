"""The owner of a sweep: judged dead only where that is known."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import socket
from dataclasses import replace

from db.read.holder import holder_is_gone, is_worked_on, process_namespace
from db.read.rows import Holder
from db.store import Store
from tests.db.builders import Bench


def _pid_of_nobody() -> int:
    process = multiprocessing.get_context("fork").Process(target=lambda: None)
    process.start()
    process.join()
    assert process.pid is not None
    return process.pid


def test_only_a_process_of_this_machine_and_namespace_is_ever_judged_dead(store: Store) -> None:
    Bench.on(store)
    holder = store.sweep_named("tiny").holder
    assert holder is not None
    gone = replace(holder, pid=_pid_of_nobody())
    assert not holder_is_gone(holder)
    assert holder_is_gone(gone)
    assert not holder_is_gone(replace(gone, host="another"))
    assert not holder_is_gone(replace(gone, namespace="another"))


def test_nobody_works_on_a_sweep_whose_owner_is_dead_or_whose_lease_has_ended(
    store: Store,
) -> None:
    Bench.on(store)
    row = store.sweep_named("tiny")
    assert row.holder is not None
    assert is_worked_on(row)
    assert not is_worked_on(replace(row, holder=replace(row.holder, pid=_pid_of_nobody())))
    assert not is_worked_on(replace(row, holder=None))


def test_a_dead_process_that_its_parent_has_not_reaped_is_gone() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    holder = Holder(
        host=socket.gethostname(),
        pid=pid,
        namespace=process_namespace(),
        since=dt.datetime.now(dt.UTC),
        lease_until=dt.datetime.now(dt.UTC),
    )
    assert holder_is_gone(holder)
    os.waitpid(pid, 0)
