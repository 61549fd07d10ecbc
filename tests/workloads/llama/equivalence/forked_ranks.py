"""Ranks of one gloo group, forked after the imports, which fail together with their tracebacks."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.node.reserved_port import reserve_port


def run_ranks(
    run: Callable[[int, int, int, Path], None],
    num_ranks: int,
    folder: Path,
    *,
    patience_seconds: float,
    preload: str | None = None,
) -> None:
    """Call `run(rank, num_ranks, port, folder)` in each rank.

    Ranks are forked after the modules `preload`, if any, and that of `run` were imported.
    Raises RuntimeError with the tracebacks that ranks left, or their exit codes.
    """
    # A fork would inherit dead threads of torch.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([*([preload] if preload else []), run.__module__])
    with closing(reserve_port()) as reserved:
        port = reserved.getsockname()[1]
        ranks = [
            server.Process(target=run, args=(rank, num_ranks, port, folder))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + patience_seconds
        for process in ranks:
            process.join(timeout=max(end - time.monotonic(), 0.1))
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    notes = [path.read_text() for path in sorted(folder.glob("failure-*.txt"))]
    if notes or any(process.exitcode for process in ranks):
        raise RuntimeError("\n\n".join(notes) or f"exit codes {[p.exitcode for p in ranks]}")


def join_group(rank: int, num_ranks: int, port: int) -> None:
    """Join the group of all ranks, with one thread."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))


@contextmanager
def ending_at_errors(rank: int, what: str, folder: Path) -> Iterator[None]:
    """Leave the traceback of an error in the folder, and end this rank."""
    try:
        yield
    except Exception:  # noqa: BLE001
        note = f"rank {rank}, {what}\n{traceback.format_exc()}"
        (folder / f"failure-{rank}.txt").write_text(note)
        # Without the other ranks, nothing can be ended in order.
        os._exit(1)
