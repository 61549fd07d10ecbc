"""A command in a process of its own: what it prints, up to a bound, and its end with its caller."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from orchestrator.cli.ui.own_command import Done, run_command
from tests.cli.cli_store import Filled

SERIES = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 1000000000)"


def run(
    url: str, statement: str, *options: str, most_bytes: int = 10_000, niceness: int = 0
) -> Done:
    arguments: Sequence[str] = ["sql", "--json", *options, "--", statement]
    return asyncio.run(
        run_command("orchestrator.cli", arguments, db=url, most_bytes=most_bytes, niceness=niceness)
    )


def test_what_it_prints_comes_back_with_its_code(shown_url: str, shown: Filled) -> None:
    done = run(shown_url, "select 1 as one", niceness=5)
    assert (done.exit_code, json.loads(done.output)["rows"]) == (0, [[1]])
    wrong = run(shown_url, "select")
    assert wrong.exit_code == 2 and "error" in json.loads(wrong.output)


def test_more_than_is_wanted_is_cut() -> None:
    # A program that goes on printing, as a command with a large answer does.
    endless = "while True: print('x' * 100, flush=True)"
    done = asyncio.run(run_command("-c", [endless], db=None, most_bytes=1000))
    assert done.is_cut and len(done.output) == 1000


def test_it_ends_with_its_caller(shown_url: str, shown: Filled, tmp_path: Path) -> None:
    before = {one.pid for one in psutil.Process().children(recursive=True)}

    async def ask() -> None:
        statement = f"{SERIES} select count(*) from n"
        words = ["sql", "--timeout", "60", "--", statement]
        asked = asyncio.create_task(
            run_command("orchestrator.cli", words, db=shown_url, most_bytes=1000)
        )
        # The command and the child that asks.
        while len(children() - before) < 2:
            await asyncio.sleep(0.05)
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked

    def children() -> set[int]:
        return {one.pid for one in psutil.Process().children(recursive=True)}

    asyncio.run(asyncio.wait_for(ask(), 60))
    _, alive = psutil.wait_procs(
        [one for one in psutil.Process().children(recursive=True) if one.pid not in before], 10
    )
    assert alive == []
