"""Measures `sweep ui` on a sweep of 10,000 trials: first paint, memory, updates, and what it costs.

python -m benchmarks.ui --out benchmarks/results/ui_cpu-2core_DATE.json

The server is a process, as a user starts it, and 50 clients follow its events in another. A loop
writes trials at the pace of a busy sweep. What pages cost it is taken from blocks that alternate:
in every second one the server and its clients are stopped (SIGSTOP).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, parser_of, write_result
from benchmarks.write_path import FILLED_AT_ONCE, Writer
from db.store import Store
from tests.report.pages.chromium import chromium

SWEEP = Path(sys.executable).parent / "sweep"
NAME = "many"
NUM_UPDATES, NUM_PAINTS = 20, 5
# One commit of so many trials in so many seconds: 32 trials each second, a tenth of what the loop
# can write. A real sweep has one in seconds.
BATCH, PACE_SECONDS = 8, 0.25
BLOCK_BATCHES = 12
UPDATE_SECONDS = 30.0
TARGETS = {
    "first_paint_ms": 1000.0,
    "server_bytes": 150e6,
    "update_seconds": 2.0,
    "slower": 1.02,
}


@contextmanager
def server(url: str) -> Iterator[tuple[int, str]]:
    """`sweep ui` with its port."""
    process = subprocess.Popen(
        [SWEEP, "ui", NAME],
        env={**os.environ, "SWEEP_DB": url},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        found = re.fullmatch(r"http://([^/]+)/", address)
        if found is None:
            raise SystemExit(f"sweep ui printed {address!r}")
        yield process.pid, found[1]
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()


@contextmanager
def clients(address: str, number: int) -> Iterator[int]:
    """A process with clients that read the events; its id."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.ui", "--follow", address, "--clients", str(number)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "all follow\n":
            raise SystemExit("the clients could not connect")
        yield process.pid
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()


def follow(address: str, number: int) -> None:
    """Follow the events with so many connections until somebody ends this process."""
    host, _, port = address.partition(":")
    selector = selectors.DefaultSelector()
    waiting = set()
    for _ in range(number):
        one = socket.create_connection((host, int(port)))
        one.sendall(f"GET /events HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
        selector.register(one, selectors.EVENT_READ)
        waiting.add(one)
    while True:
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            read = key.fileobj.recv(1 << 16)
            if not read:
                raise SystemExit("the server ended a connection")
            if key.fileobj in waiting and b'"version"' in read:
                waiting.discard(key.fileobj)
                if not waiting:
                    print("all follow", flush=True)


def memory(pid: int) -> dict[str, int]:
    """Resident bytes of a process, now and at most."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", text))
    return {
        "server_bytes": int(found["VmRSS"]) << 10,
        "most_server_bytes": int(found["VmHWM"]) << 10,
    }


def first_paints(address: str) -> list[float] | None:
    """Milliseconds until a browser shows something of the page; None: there is no Chromium."""
    with chromium() as browser:
        if browser is None:
            return None
        found = []
        for _ in range(NUM_PAINTS):
            browser.get(f"http://{address}/")
            paint = browser.wait(
                "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            )
            found.append(round(float(paint), 1))
        return found


def page_seconds(address: str) -> list[float]:
    """How long the server takes for the page."""
    found = []
    for _ in range(NUM_PAINTS):
        connection = http.client.HTTPConnection(address, timeout=UPDATE_SECONDS)
        began = time.monotonic()
        connection.request("GET", "/")
        connection.getresponse().read()
        found.append(round(time.monotonic() - began, 3))
        connection.close()
    return found


def update_seconds(address: str, writer: Writer) -> list[float]:
    """From a commit to its event, of commits at random moments."""
    moments = random.Random(1)
    told: dict[int, float] = {}
    arrived = threading.Condition()

    def listen() -> None:
        connection = http.client.HTTPConnection(address, timeout=UPDATE_SECONDS)
        connection.request("GET", "/events")
        answer = connection.getresponse()
        while line := answer.readline():
            # The numbers of trials by their state: each commit changes one of them.
            found = re.search(rb'\["([\d,]+) measured, ([\d,]+) OOM', line)
            if found is not None:
                total = sum(int(one.replace(b",", b"")) for one in found.groups())
                with arrived:
                    told.setdefault(total, time.monotonic())
                    arrived.notify_all()

    threading.Thread(target=listen, daemon=True).start()
    with arrived:
        arrived.wait_for(lambda: bool(told), UPDATE_SECONDS)
    found = []
    for _ in range(NUM_UPDATES):
        time.sleep(moments.uniform(0.5, 2.0))
        writer.write(1)
        committed = time.monotonic()
        with arrived:
            expected = writer.num_trials
            if not arrived.wait_for(lambda: expected in told, UPDATE_SECONDS):  # noqa: B023
                raise SystemExit(f"no event told of a commit within {UPDATE_SECONDS:g} s")
        found.append(round(told[expected] - committed, 3))
    return found


def slowdown(pids: list[int], writer: Writer, num_blocks: int) -> dict[str, Any]:
    """The loop's seconds for a batch, with the pages and without them, in alternating blocks."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * num_blocks):
        is_beside = number % 2 == 0
        for pid in pids:
            os.kill(pid, signal.SIGCONT if is_beside else signal.SIGSTOP)
        for _ in range(BLOCK_BATCHES):
            time.sleep(PACE_SECONDS)
            began, used = time.perf_counter(), time.process_time()
            writer.write(BATCH)
            seconds[is_beside].append(time.perf_counter() - began)
            cpu[is_beside].append(time.process_time() - used)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    wall = {kind: statistics.median(some) for kind, some in seconds.items()}
    # What the loop takes in addition to its pauses, which no page changes.
    longer = (PACE_SECONDS + wall[True]) / (PACE_SECONDS + wall[False])
    return {
        "num_batches": len(seconds[True]),
        "batch_ms": round(1e3 * wall[True], 2),
        "batch_ms_without_pages": round(1e3 * wall[False], 2),
        "batch_cpu_ms": round(1e3 * statistics.median(cpu[True]), 2),
        "batch_cpu_ms_without_pages": round(1e3 * statistics.median(cpu[False]), 2),
        "batch_slower": round(wall[True] / wall[False], 4),
        "loop_slower": round(longer, 4),
    }


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(num_trials: int, num_clients: int, num_blocks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/sweep.sqlite"
        with Store.open(url) as store:
            writer = Writer.on(store, NAME)
            while writer.num_trials < num_trials:
                writer.write(min(FILLED_AT_ONCE, num_trials - writer.num_trials))
            with server(url) as (pid, address), clients(address, num_clients) as others:
                pages = page_seconds(address)
                paints = first_paints(address)
                updates = update_seconds(address, writer)
                used, began = cpu_seconds(pid), time.monotonic()
                cost = slowdown([pid, others], writer, num_blocks)
                used = (cpu_seconds(pid) - used) / (time.monotonic() - began) * 2
                resident = memory(pid)
    return {
        "num_trials": num_trials,
        "num_clients": num_clients,
        "page_seconds": pages,
        "first_paint_ms": paints,
        "update_seconds": updates,
        "median_update_seconds": statistics.median(updates),
        "most_update_seconds": max(updates),
        **resident,
        "server_cores_while_32_trials_a_second_end": round(used, 3),
        "slowdown": cost,
        "targets": TARGETS,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument(
        "--blocks", type=int, default=20, help="with the pages, and as many without"
    )
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.follow:
        follow(arguments.follow, arguments.clients)
    machine = describe_machine()
    result = measure(arguments.trials, arguments.clients, arguments.blocks)
    print(json.dumps(result, indent=1))
    write_result(arguments.out, benchmark="ui", machine=machine, result=result)


if __name__ == "__main__":
    main()
