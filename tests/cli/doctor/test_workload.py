"""`sweep doctor --workload` goes through a program's contract, and names what it lacks."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.processes import descendants
from tests.acceptance.command import CommandHere

GOOD = """
    import json, os, sys, time

    mbs, accum, steps = map(int, sys.argv[1:4])
    with open(os.environ["SWEEP_METRICS_FILE"], "a", buffering=1) as file:
        for step in range(steps):
            began = time.perf_counter()
            time.sleep(0.1)
            line = {"step_seconds": (time.perf_counter() - began) * float(os.environ["SCALE"])}
            if os.environ["RANK"] == "0":
                print(json.dumps(line), file=file)
    """
# Rank 0 listens on MASTER_PORT, as torch's store does, and the others stay connected to it.
MEETING = """
    import os, socket
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        server = socket.create_server(place)
        met = server.accept()
    else:
        until = time.monotonic() + 10
        while True:
            try:
                met = socket.create_connection(place)
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.01)
    """

Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def doctor(command: CommandHere, tmp_path: Path) -> Doctor:
    """Checks a program, and returns what was found of each point."""

    def check(
        program: str = GOOD,
        *overrides: str,
        code: int = 0,
        scale: float = 1.0,
        argv: str = '"{micro_batch_size}", "{grad_accum_steps}", "{num_steps}"',
    ) -> dict[str, Any]:
        (tmp_path / "train.py").write_text(textwrap.dedent(program))
        (tmp_path / "mine.yaml").write_text(
            textwrap.dedent(
                f"""
                name: mine
                model: llama-tiny
                gpus: 1
                device: cpu
                sequence_length: 64
                global_batch_size: 8
                axes: {{micro_batch_size: auto, recompute: [none, full]}}
                workload:
                  name: command
                  options:
                    argv: [{sys.executable}, train.py, {argv}]
                    cwd: {tmp_path}
                    env: {{SCALE: "{scale}"}}
                """
            )
        )
        # Tests of other files in this process may have left a helper of multiprocessing.
        before = set(descendants(os.getpid()))
        done = command.run("doctor", "--workload", "mine.yaml", *overrides, "--json")
        assert done.returncode == code, done.stdout + done.stderr
        assert not set(descendants(os.getpid())) - before
        found: dict[str, Any] = json.loads(done.stdout)
        return {"all": found} | {check["name"]: check for check in found["checks"]}

    return check


def test_a_program_that_keeps_its_contract_passes_point_by_point(
    doctor: Doctor, tmp_path: Path
) -> None:
    found = doctor(GOOD, 'workload.options.env={SCALE: "1", RECOMPUTE: "{recompute}"}', scale=1.0)
    assert {name: check["status"] for name, check in found.items() if name != "all"} == {
        "program": "ok",
        "layout": "ok",
        "ranks": "ok",
        "steps": "ok",
        "pace": "ok",
        "numbers": "ok",
        "memory": "ok",
        "MFU": "ok",
        "end": "ok",
        "left over": "ok",
    }
    assert " train.py ... in " in found["program"]["found"]
    assert found["all"]["ok"] and "mbs1" in found["all"]["layout"]
    assert found["steps"]["found"].startswith("10 of 10 steps, the first after ")
    assert "as the kernel saw it" in found["memory"]["found"]
    assert found["memory"]["advice"] == ""
    # No store, no run folder.
    assert not (tmp_path / ".sweep").exists()


def test_a_layout_that_does_not_arrive_is_said(doctor: Doctor) -> None:
    found = doctor()
    assert found["layout"]["status"] == "warn"
    assert "nowhere: recompute (none, full)" in found["layout"]["found"]
    assert "add {recompute}; or read SWEEP_RECOMPUTE" in found["layout"]["advice"]
    read = "import os; os.environ['SWEEP_RECOMPUTE']\n" + textwrap.dedent(GOOD)
    assert doctor(read)["layout"]["status"] == "ok"
    several = doctor(read, "sequence_length=[64, 128]")["layout"]["found"]
    assert several.endswith("; nowhere: sequence_length (64, 128)")


@pytest.mark.parametrize(
    ("scale", "said"),
    [(1000.0, "milliseconds?"), (0.01, "Time from the end of a step to the end of the next")],
)
def test_a_clock_that_tells_another_time_than_passes_fails(
    doctor: Doctor, scale: float, said: str
) -> None:
    found = doctor(scale=scale, code=1)
    told = " ".join(check["found"] + check["advice"] for check in found["all"]["checks"])
    assert said in told and "cuda" not in told
    assert found["numbers"]["status"] == "fail"


HELD_BACK = """
    import json, os, sys, time

    lines = []
    for step in range(int(sys.argv[3])):
        lines.append(json.dumps({"step_seconds": 0.02 + step / 1e6}) + "\\n")
        time.sleep(float(os.environ["SCALE"]))
        if step % EVERY == EVERY - 1:
            with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
                file.writelines(lines)
            lines = []
    with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
        file.writelines(lines)
    """


@pytest.mark.parametrize(
    ("every", "status", "said"),
    [
        (5, "fail", "its lines came 5 at a time"),
        pytest.param(1000, "warn", "all steps arrived at once", marks=pytest.mark.long),
    ],
)
def test_a_clock_that_does_not_wait_is_found_or_warned_of_though_lines_are_held_back(
    doctor: Doctor, every: int, status: str, said: str
) -> None:
    """Each step takes 0.1 s and says 0.02 s: the ten of one attempt are too few."""
    program = HELD_BACK.replace("EVERY", str(every))
    found = doctor(program, scale=0.1, code=int(status == "fail"))
    assert found["pace"]["status"] == status
    assert said in found["pace"]["found"]
    assert "flush" in found["pace"]["found"] + found["pace"]["advice"]


def test_a_line_for_each_micro_batch_fails(doctor: Doctor) -> None:
    program = GOOD.replace("range(steps)", "range(steps * accum)").replace(
        "sleep(0.1)", "sleep(0.02)"
    )
    found = doctor(program, code=1)
    assert "one for each of the 8 micro-batches of a step?" in found["numbers"]["found"]


def test_ranks_that_never_meet_are_said(doctor: Doctor) -> None:
    alone = doctor(GOOD, "gpus=2")
    assert alone["ranks"]["status"] == "warn"
    assert "2 ranks, no rank connected to another" in alone["ranks"]["found"]
    meeting = textwrap.dedent(GOOD).replace("mbs, accum", textwrap.dedent(MEETING) + "mbs, accum")
    met = doctor(meeting, "gpus=2")
    assert (met["ranks"]["status"], met["ranks"]["found"]) == ("ok", "2 ranks met")


PRINTING = """
    import sys, time
    last = time.perf_counter()
    for step in range(1, int(sys.argv[3]) + 1):
        time.sleep(0.1)
        if step % 2 == 0:
            now = time.perf_counter()
            print(f"step {step}: {(now - last) / 2 * 1e3:.4f} ms", flush=True)
            last = now
    """


def test_lines_that_a_program_prints_are_steps_too(doctor: Doctor) -> None:
    pattern = 'workload.options.metrics={log: "step .*: (.+) ms", unit: ms, every: 2}'
    found = doctor(PRINTING, pattern)
    assert found["steps"]["found"].startswith("9 lines of 2 steps each, 18 were asked for")
    assert found["pace"]["status"] == "ok" and "report 1." in found["pace"]["found"]


LAUNCHING = """
    import os, subprocess, sys
    command = [sys.executable, "rank.py", *sys.argv[1:]]
    ranks = [subprocess.Popen(command, env={**os.environ, "RANK": rank}) for rank in ("0", "1")]
    sys.exit(max(rank.wait() for rank in ranks))
    """


def test_ranks_that_a_program_starts_itself_are_seen(doctor: Doctor, tmp_path: Path) -> None:
    met = textwrap.dedent(GOOD).replace("mbs, accum", textwrap.dedent(MEETING) + "mbs, accum")
    (tmp_path / "rank.py").write_text(
        met.replace("MASTER_ADDR", "SWEEP_MASTER_ADDR").replace("MASTER_PORT", "SWEEP_MASTER_PORT")
    )
    found = doctor(LAUNCHING, "gpus=2", "workload.options.processes=per_node")
    assert (found["ranks"]["status"], found["ranks"]["found"]) == ("ok", "2 ranks met")
    assert found["all"]["ok"]


def test_a_program_that_fails_shows_why_and_the_end_of_its_log(doctor: Doctor) -> None:
    found = doctor("raise ValueError('no such data')", code=1)
    # It came to no step: how steps are told does not matter.
    assert "steps" not in found
    assert "ValueError: no such data" in found["end"]["found"]
    assert found["end"]["advice"] == "fix what the last lines of its log show"
    assert found["all"]["log"][-1] == "ValueError: no such data"


def test_steps_under_another_name_are_named(doctor: Doctor) -> None:
    found = doctor(GOOD.replace('"step_seconds"', '"step_time"'), code=1)
    assert (found["steps"]["status"], found["steps"]["found"]) == (
        "fail",
        "no step came; `end` says what did",
    )
    assert '{"step_seconds": 0.52}' in found["steps"]["advice"]
    assert "10 lines came, none has step_seconds; they have: step_time" in found["end"]["found"]


def test_what_a_program_leaves_is_counted_and_gone(doctor: Doctor) -> None:
    leaving = textwrap.dedent(GOOD).replace("mbs, accum", STARTING + "mbs, accum")
    found = doctor(leaving)
    assert found["end"]["found"].startswith("it was ended, since its numbers were enough")
    assert found["left over"]["found"] == "nothing; 1 process that it had started ended with it"
    found = doctor(leaving.replace("range(steps)", "range(steps - 4)"))
    assert found["end"]["found"].startswith("it ended by itself, with exit code 0")
    left = found["left over"]
    assert (left["status"], left["found"]) == ("warn", "1 process, ended after the ranks")


STARTING = "import subprocess; subprocess.Popen(['sleep', '600'])\n"


def test_a_script_that_is_missing_is_found_before_anything_starts(
    doctor: Doctor, tmp_path: Path
) -> None:
    found = doctor(
        GOOD, f'workload.options.argv=["{sys.executable}", tarin.py, "1", "1", "4"]', code=1
    )
    assert [check["name"] for check in found["all"]["checks"]] == ["program"]
    assert f"{tmp_path}/tarin.py ('tarin.py' in argv) does not exist" in found["program"]["found"]


def test_more_gpus_than_this_machine_has_are_refused(command: CommandHere, tmp_path: Path) -> None:
    file = tmp_path / "big.yaml"
    file.write_text(
        "{name: big, model: llama-tiny, gpus: 4096, device: cpu, sequence_length: 64,"
        " global_batch_size: 4096, workload: synthetic}"
    )
    done = command.run("doctor", "--workload", file)
    assert done.returncode == 2 and "add gpus=" in done.stderr
    done = command.run("doctor", "gpus=1")
    assert done.returncode == 2 and "add --workload FILE" in done.stderr


def test_toml_that_cannot_be_written_here_is_found_before_anything_starts(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tomli_w", None)
    needed = doctor(GOOD, "workload.options.files={mine.toml: {a: 1}}", code=1)
    assert [check["name"] for check in needed["all"]["checks"]] == ["program"]
    assert "mine.toml needs the package tomli-w" in needed["program"]["found"]
    text = doctor(GOOD, "workload.options.files={mine.toml: 'a = 1'}")
    assert text["program"]["status"] == "ok"
