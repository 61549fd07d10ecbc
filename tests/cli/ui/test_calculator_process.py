"""The process that calculates: begun by a question, begun again if it died, ended if idle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from orchestrator.cli.ui import calculator_process
from orchestrator.cli.ui.calculator_process import NO_ANSWER, CalculatorProcess
from orchestrator.cli.ui.refusal import Refusal
from tests.cli.test_calculator import measure

SECONDS = 60.0
# Answers each question with its fields: for what is the same whoever answers. To begin the
# calculator takes a second.
ECHO = """
import json, sys
for line in sys.stdin:
    value = {"refusal": None, "fields": json.loads(line)["fields"]}
    print(json.dumps({"status": 200, "value": value}), flush=True)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = f"sqlite:///{tmp_path_factory.mktemp('process')}/sweep.sqlite"
    measure(found, "8b.yaml")
    return found


def run(process: Callable[[], CalculatorProcess], use: Callable[..., Awaitable[None]]) -> None:
    """Use a process in a loop of its own, and end it; nothing of it is left."""

    async def used() -> None:
        made = process()
        try:
            await use(made)
        finally:
            await made.close()
            assert made.pid is None

    asyncio.run(asyncio.wait_for(used(), SECONDS))


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_it_begins_with_the_first_question_and_answers_many(url: str) -> None:
    async def use(process: CalculatorProcess) -> None:
        assert process.pid is None
        page = await process.ask("page", None, {})
        first = process.pid
        assert first is not None
        sizes = [str(2**power) for power in range(6)]
        found = await asyncio.gather(
            *(process.ask("result", page["cell"], {"micro_batch_size": size}) for size in sizes)
        )
        assert [one["fields"]["micro_batch_size"] for one in found] == sizes
        assert process.pid == first
        await process.close()
        assert not is_alive(first)

    run(lambda: CalculatorProcess(url, "8b"), use)


def test_a_bad_question_is_refused_and_the_next_is_answered(url: str) -> None:
    async def use(process: CalculatorProcess) -> None:
        with pytest.raises(Refusal) as refused:
            await process.ask("result", None, {"micro_batchsize": "1"})
        assert refused.value.status == 400
        assert "did you mean micro_batch_size" in refused.value.text
        assert (await process.ask("result", None, {}))["refusal"] is None

    run(lambda: CalculatorProcess(url, "8b"), use)


def test_a_process_that_died_is_begun_again(url: str) -> None:
    async def use(process: CalculatorProcess) -> None:
        before = await process.ask("result", None, {})
        first = process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert await process.ask("result", None, {}) == before
        assert process.pid != first

    run(lambda: CalculatorProcess(url, "8b"), use)


@pytest.mark.parametrize(
    "program",
    [
        "import time; time.sleep(60)",
        "import sys; sys.stdin.readline(); print('no JSON', flush=True); sys.stdin.read()",
        "raise SystemExit(3)",
        "import sys; sys.stdin.readline(); print('1' * (2 << 20), flush=True); sys.stdin.read()",
    ],
    ids=["silent", "no JSON", "ended", "too long"],
)
def test_what_does_not_answer_is_ended_and_said(program: str) -> None:
    async def use(process: CalculatorProcess) -> None:
        with pytest.raises(Refusal) as refused:
            await process.ask("page", None, {})
        assert (refused.value.status, refused.value.text) == (503, NO_ANSWER)
        assert process.pid is None

    run(lambda: CalculatorProcess(None, program, module="-c", seconds=1.0), use)


def test_a_visitor_who_leaves_does_not_shift_the_answers() -> None:
    async def use(process: CalculatorProcess) -> None:
        await process.ask("page", None, {})
        left = asyncio.create_task(process.ask("result", None, {"micro_batch_size": "2"}))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        found = await process.ask("result", None, {"micro_batch_size": "8"})
        assert found["fields"]["micro_batch_size"] == "8"

    run(lambda: CalculatorProcess(None, ECHO, module="-c"), use)


def test_without_questions_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calculator_process, "IDLE_SECONDS", 0.2)

    async def use(process: CalculatorProcess) -> None:
        await process.ask("page", None, {})
        pid = process.pid
        while process.pid is not None:
            await asyncio.sleep(0.05)
        assert pid is not None
        while is_alive(pid):
            await asyncio.sleep(0.05)
        assert (await process.ask("result", None, {}))["refusal"] is None

    run(lambda: CalculatorProcess(None, ECHO, module="-c"), use)
