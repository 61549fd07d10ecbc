"""The command `top`: a sweep in a terminal, refreshed once a second."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from orchestrator.cli.options import Db, SweepArgument
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.core.errors import UsageInvalid
from orchestrator.report.extras import how_to_install


def top(sweep: SweepArgument = None, db: Db = None) -> None:
    """Watch a sweep in the terminal, and act on it.

    Shows the cells with their best so far, what runs on which nodes, the queue, all trials and the
    failures. It reads the store once a second at most, and works over ssh, without a mouse and
    without colours. Needs the extra `tui`.

    Examples:
      sweep top
      sweep top 8b
      NO_COLOR=1 sweep top

    Keys:
      1 to 5   cells, running, queue, trials, failures; Tab goes to the next
      Enter    all that is known of a trial, as `sweep show`
      s, /     sort; show only lines that contain a text
      d, c     drain (let running trials finish), cancel (end them): as `sweep cancel`
      r, e     measure a trial again, measure a layout next: as `sweep retry`, `sweep enqueue`
      q        quit; the sweep goes on
    """
    if find_spec("textual") is None:
        raise UsageInvalid(
            f"sweep top needs textual, {how_to_install('tui')}. Without it: sweep status --watch"
        )
    # Textual writes to stderr.
    if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):
        raise UsageInvalid("sweep top needs a terminal; a program reads: sweep status --json")
    with existing_store(db) as store:
        name = select_sweep(store, sweep).name
    from orchestrator.cli.live.live_store import LiveStore
    from orchestrator.cli.live.sweep_requests import Requests
    from orchestrator.cli.top.app import TopApp  # textual, 0.3 s

    TopApp(LiveStore(db, name), Requests(db, name)).run(mouse=False)
