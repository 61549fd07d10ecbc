"""What a program returns by printing, by lines and by a document, and what is seen of it."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.sweepfile.workload_section import CommandWorkload, reports_on_last_node
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import MeasurementPlan, RankResult
from orchestrator.node.launcher import NodeLauncher
from orchestrator.node.probe import cpu_name
from tests.workloads.command.running import command, python, run

TIME_MS = {"log": r"time ([\d.]+) ms", "unit": "ms"}
MIB = 1 << 20


def printing(
    launcher: NodeLauncher,
    program: str,
    *,
    metrics: dict[str, Any],
    plan: MeasurementPlan | None = None,
    **known: Any,
) -> NodeReport:
    options = {"argv": python(program), "metrics": metrics}
    return launcher.run(command(options, plan=plan, **known))


def result_of(report: NodeReport, rank: int = 0) -> RankResult:
    assert report.failure is None, (report.failure, report.ranks[0].log_tail)
    result = report.ranks[rank].result
    assert result is not None
    return result


def test_the_rank_that_prints_gives_the_steps_and_any_rank_its_memory(
    launcher: NodeLauncher,
) -> None:
    program = """
        import os, sys
        if os.environ["RANK"] == "0":
            sys.stderr.write("memory max 300 MiB | reserved 400\\n")
        else:
            for step in range(4):
                print(f"step {step} | time {100.0 + step} ms | loss {9 - step} | tflops {step}.5")
    """
    also = {
        "loss": r"loss (\S+)",
        "tflops": r"tflops (\S+)",
        "peak_memory": {"log": r"max (\d+)", "unit": "MiB"},
        "peak_memory_reserved": {"log": r"reserved (\d+)", "unit": "MiB"},
    }
    report = printing(launcher, program, metrics={**TIME_MS, "also": also})
    result = result_of(report)
    assert result.warmup_seconds == pytest.approx([0.1])
    assert result.step_seconds == pytest.approx([0.101, 0.102, 0.103])
    assert (result.loss_first, result.loss_last, result.extra) == (9, 6, {"tflops": 3.5})
    assert result.peak_memory_allocated_bytes == 300 * MIB
    assert result.peak_memory_reserved_bytes == 400 * MIB
    assert "step 3 | time 103.0 ms | loss 6 | tflops 3.5" in report.ranks[1].log_tail
    assert report.ranks[0].step == 4


def test_rank_0_waits_for_what_another_rank_prints_after_it_has_ended(
    launcher: NodeLauncher,
) -> None:
    program = """
        import os, time
        if os.environ["RANK"] == "1":
            time.sleep(0.7)
            for step in range(4):
                print(f"time {100.0 + step} ms")
    """
    report = printing(launcher, program, metrics=TIME_MS)
    assert len(result_of(report).step_seconds) == 3


def test_a_line_of_several_steps_is_one_sample_and_the_warm_up_is_as_many_lines_as_it_takes(
    launcher: NodeLauncher,
) -> None:
    program = "for line in range(6): print(f'time {100 + line} ms')"
    plan = MeasurementPlan(warmup_steps=15, min_steps=8, max_steps=45, relative_confidence=0.01)
    report = printing(launcher, program, metrics={**TIME_MS, "every": 10}, plan=plan, world_size=1)
    # Two lines of ten cover the warm-up of 15.
    result = result_of(report)
    assert result.warmup_seconds == pytest.approx([0.1, 0.101])
    assert result.step_seconds == pytest.approx([0.102, 0.103, 0.104, 0.105])


def test_a_program_that_prints_without_end_is_ended_when_its_numbers_are_enough(
    launcher: NodeLauncher,
) -> None:
    program = """
        import time
        while True:
            print("time 100 ms", flush=True)
            time.sleep(0.01)
    """
    report = printing(launcher, program, metrics=TIME_MS)
    assert len(result_of(report).step_seconds) == 8
    assert report.has_enough


def test_a_printed_loss_that_is_no_number_means_that_the_training_diverged(
    launcher: NodeLauncher,
) -> None:
    program = """
        import time
        print("time 100 ms loss 9.5", flush=True)
        print("time 100 ms loss nan", flush=True)
        time.sleep(60)
    """
    metrics = {**TIME_MS, "also": {"loss": r"loss (\S+)"}}
    report = printing(launcher, program, metrics=metrics, world_size=1)
    assert report.failure is not None and report.failure.kind is FailureKind.NOT_FINITE
    assert "the loss of step 2 is nan" in report.failure.message


@pytest.mark.parametrize(
    ("program", "kind", "said"),
    [
        ("pass", FailureKind.BAD_RESULT, "rank 0 printed nothing"),
        (
            "print('step took 5 s')",
            FailureKind.BAD_RESULT,
            "rank 0 printed 1 line, and workload.options.metrics.log found a number in none; the"
            " last: step took 5 s",
        ),
        (
            "print('time 5 ms')",
            FailureKind.BAD_RESULT,
            'more than 1; let it run 9 steps (write "{num_steps}" in argv where it takes that'
            " number, or have it read SWEEP_NUM_STEPS), and report each",
        ),
        ("print('time 5 ms'); raise SystemExit(3)", FailureKind.USER_ERROR, "3"),
    ],
)
def test_why_printed_lines_gave_no_result_is_told(
    launcher: NodeLauncher, program: str, kind: FailureKind, said: str
) -> None:
    report = printing(launcher, program, metrics=TIME_MS, world_size=1)
    assert report.failure is not None
    assert report.failure.kind is kind and said in report.failure.message


def test_a_pattern_that_never_ends_is_rejected_and_named(launcher: NodeLauncher) -> None:
    program = "import time; print('a' * 4000, flush=True); time.sleep(60)"
    metrics = {"log": r"((?:a+)+)b", "unit": "ms"}
    report = printing(launcher, program, metrics=metrics, world_size=1)
    assert report.failure is not None and report.failure.kind is FailureKind.CONFIG_REJECTED
    assert "the patterns in workload.options.metrics took more than 1 s" in report.failure.message


LINES_AND_DOCUMENT = """
    import json, os, sys
    if os.environ["RANK"] == "0":
        with open(os.environ["SWEEP_METRICS_FILE"], "w") as file:
            for step in range(4):
                line = {"step_seconds": 0.5, "loss": 9 - step, "mine": step, "both": "line",
                        "peak_memory_allocated_bytes": 1000 - step}
                print(json.dumps(line), file=file)
        json.dump(json.loads(sys.argv[1]), open(os.environ["SWEEP_RESULT_FILE"], "w"))
    """


@pytest.mark.parametrize(
    ("script", "argument", "knows"),
    [("", "10", False), ("", "{num_steps}", True), ("# SWEEP_NUM_STEPS", "10", True)],
)
def test_a_program_may_not_know_how_many_steps_are_asked_for(
    launcher: NodeLauncher, tmp_path: Path, script: str, argument: str, knows: bool
) -> None:
    source = "json.dump({'step_seconds': [1]}, open(os.environ['SWEEP_RESULT_FILE'], 'w'))"
    (tmp_path / "train.py").write_text(f"import json, os\n{source}\n{script}\n")
    options = {"argv": [sys.executable, "train.py", argument], "cwd": str(tmp_path)}
    report = launcher.run(command(options, world_size=1))
    seen = result_of(report).seen
    assert seen is not None and seen.knows_num_steps is knows


def test_lines_and_document_are_merged_and_the_document_has_precedence(
    launcher: NodeLauncher,
) -> None:
    document = '{{"step_seconds": [0.7, 0.8], "loss_last": 2.5, "extra": {{"both": "document"}}}}'
    result = result_of(run(launcher, LINES_AND_DOCUMENT, document))
    assert result.step_seconds == [0.7, 0.8]
    assert (result.loss_first, result.loss_last) == (9, 2.5)
    assert result.peak_memory_allocated_bytes == 1000
    assert result.extra == {"mine": 3, "both": "document"}
    assert result.phase_seconds


def test_a_document_without_steps_adds_to_those_of_the_lines(launcher: NodeLauncher) -> None:
    document = '{{"device_memory_bytes": 5000, "extra": {{"kernel": "flash"}}}}'
    result = result_of(run(launcher, LINES_AND_DOCUMENT, document))
    assert (result.warmup_seconds, result.step_seconds) == ([0.5], [0.5] * 3)
    assert (result.device_memory_bytes, result.extra["kernel"]) == (5000, "flash")


def test_a_document_that_is_wrong_is_told_whatever_the_lines_have(launcher: NodeLauncher) -> None:
    report = run(launcher, LINES_AND_DOCUMENT, '{{"step_seconds": [-1]}}')
    assert report.failure is not None and report.failure.kind is FailureKind.BAD_RESULT


def test_every_rank_may_tell_its_memory_by_lines_or_by_a_document(launcher: NodeLauncher) -> None:
    program = """
        import json, os
        rank = int(os.environ["RANK"])
        lines, document = os.environ["SWEEP_METRICS_FILE"], os.environ["SWEEP_RESULT_FILE"]
        with open(lines, "w") as file:
            for step in range(4):
                told = {"peak_memory_allocated_bytes": 100 * rank + step, "loss": 1.0}
                if rank == 0:
                    told["step_seconds"] = 0.5
                print(json.dumps(told), file=file)
        if rank == 2:
            json.dump({"peak_memory_reserved_bytes": 999}, open(document, "w"))
    """
    report = run(launcher, program, world_size=3)
    results = [result_of(report, rank) for rank in range(3)]
    assert [r.peak_memory_allocated_bytes for r in results] == [3, 103, 203]
    assert [r.peak_memory_reserved_bytes for r in results] == [None, None, 999]
    assert [len(r.step_seconds) for r in results] == [3, 0, 0]
    assert [r.loss_last for r in results] == [1.0, None, None]


def test_without_a_word_the_memory_is_that_of_the_largest_process(launcher: NodeLauncher) -> None:
    program = """
        import json, os, subprocess, sys
        subprocess.run([sys.executable, "-c", "held = bytearray(400 << 20)"], check=True)
        if os.environ["RANK"] == "0":
            json.dump({"step_seconds": [0.5]}, open(os.environ["SWEEP_RESULT_FILE"], "w"))
    """
    report = run(launcher, program)
    for rank in range(2):
        resident = result_of(report, rank).peak_memory_resident_bytes
        assert resident is not None and resident >= 400 * MIB
        assert result_of(report, rank).peak_memory_allocated_bytes is None


def test_memory_counts_that_is_told_or_seen_after_the_last_step_that_is_needed(
    launcher: NodeLauncher,
) -> None:
    program = """
        import json, os, time
        lines = open(os.environ["SWEEP_METRICS_FILE"], "a", buffering=1)
        for step in range(9):
            print(json.dumps({"step_seconds": 0.01}), file=lines)
            time.sleep(0.01)
        while not os.path.exists(os.environ["SWEEP_STOP_FILE"]):
            time.sleep(0.01)
        print(json.dumps({"peak_memory_allocated_bytes": 123}), file=lines)
    """
    report = run(launcher, program, world_size=1)
    assert report.has_enough
    result = result_of(report)
    assert result.peak_memory_allocated_bytes == 123
    assert result.peak_memory_resident_bytes is not None


def test_the_launcher_reports_the_programs_own_python_and_this_processor(
    launcher: NodeLauncher, tmp_path: Path
) -> None:
    info = tmp_path / "my_package-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.5\n")
    program = (
        "import json, os; json.dump({'step_seconds': [1]}, open(os.environ['SWEEP_RESULT_FILE'],"
        " 'w'))"
    )
    report = run(launcher, program, world_size=1, env={"PYTHONPATH": str(tmp_path)})
    assert ("my-package", "1.5") in report.software.packages
    assert report.software.stack.device_name == cpu_name()
    assert report.software.stack.torch == dict(report.software.packages)["torch"]


def test_the_python_that_a_shell_starts_is_seen_among_its_processes(
    launcher: NodeLauncher, tmp_path: Path
) -> None:
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(Path(sys.executable).resolve())
    (tmp_path / "env" / "pyvenv.cfg").write_text(
        f"home = {Path(sys.executable).resolve().parent}\ninclude-system-site-packages = false\n"
    )
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    info = tmp_path / "env" / "lib" / version / "site-packages" / "seen-2.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seen\nVersion: 2.5\n")
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "for step in range(6):\n"
        "    time.sleep(0.2)\n"
        "    with open(os.environ['SWEEP_METRICS_FILE'], 'a') as file:\n"
        "        file.write('{\"step_seconds\": 0.2}\\n')\n"
    )
    options = {"argv": ["sh", "-c", f"{folder}/python {tmp_path}/train.py; exit 0"]}
    for _ in range(2):
        report = launcher.run(command(options, world_size=1))
        assert report.failure is None, report.failure
        assert dict(report.software.packages).get("seen") == "2.5"
        assert "numpy" not in dict(report.software.packages)


def test_the_last_rank_of_two_nodes_may_print_the_steps(tmp_path: Path) -> None:
    program = """
        import os, time
        if os.environ["RANK"] == "1":
            for step in range(1 << 30):
                print(f"time {100.0 + step} ms", flush=True)
                time.sleep(0.01)
        time.sleep(60)
    """
    options = {"argv": python(program), "metrics": {**TIME_MS, "node": "last"}}
    assert reports_on_last_node(
        CommandWorkload.model_validate({"name": "command", "options": options})
    )
    asked = command(options, limits={"first_step": 2.0})
    asked = replace(asked, request=asked.request.model_copy(update={"reports_on_last_node": True}))
    launchers = [NodeLauncher(tmp_path / name, node=name) for name in ("node-a", "node-b")]
    try:
        first, last = run_on_both(launchers, asked)
        assert last.failure is None and last.has_enough, last.failure
        result = last.ranks[0].result
        assert result is not None and len(result.step_seconds) == 8
        # The scheduler ends the gang as soon as the numbers are in.
        assert first.failure is not None and first.failure.kind is FailureKind.CANCELLED
    finally:
        for launcher in launchers:
            launcher.close()


def test_rank_0_needs_no_steps_if_another_node_reports(tmp_path: Path) -> None:
    program = """
        import os
        if os.environ["RANK"] == "1":
            for step in range(4):
                print(f"time {100.0 + step} ms | memory 5")
        else:
            print("memory 9")
    """
    also = {"peak_memory": {"log": r"memory (\d+)", "unit": "MiB"}}
    metrics = {**TIME_MS, "node": "last", "also": also}
    asked = command({"argv": python(program), "metrics": metrics})
    asked = replace(asked, request=asked.request.model_copy(update={"reports_on_last_node": True}))
    launchers = [NodeLauncher(tmp_path / name, node=name) for name in ("node-a", "node-b")]
    try:
        first, last = run_on_both(launchers, asked)
        assert (first.failure, last.failure) == (None, None)
        results = [report.ranks[0].result for report in (first, last)]
        assert [r is not None and len(r.step_seconds) for r in results] == [0, 3]
        assert [r is not None and r.peak_memory_allocated_bytes for r in results] == [
            9 * MIB,
            5 * MIB,
        ]
    finally:
        for launcher in launchers:
            launcher.close()


def run_on_both(launchers: list[NodeLauncher], asked: LaunchOrder) -> list[NodeReport]:
    """Run one rank on each of two nodes, and end the gang when one has enough."""
    port = launchers[0].rendezvous()
    reports: dict[int, NodeReport] = {}

    def run_one(number: int) -> None:
        share = replace(
            asked, local_world_size=1, master_port=port, first_rank=number, node_rank=number
        )
        reports[number] = launchers[number].run(share)
        if reports[number].failure is not None or reports[number].has_enough:
            launchers[1 - number].kill(asked.request.tag)

    threads = [threading.Thread(target=run_one, args=[number]) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [reports[0], reports[1]]


def test_other_ranks_of_a_program_per_node_tell_their_memory_in_files_beside(
    launcher: NodeLauncher,
) -> None:
    program = """
        import json, os
        lines = os.environ["SWEEP_METRICS_FILE"]
        for rank in range(3):
            with open(f"{lines}.{rank}" if rank else lines, "w") as file:
                for step in range(4):
                    told = {"peak_memory_allocated_bytes": 100 * rank + step, "mine": rank}
                    print(json.dumps(told | ({} if rank else {"step_seconds": 0.5})), file=file)
    """
    options = {"argv": python(program), "processes": "per_node"}
    result = result_of(launcher.run(command(options, one_rank_per_node=True, world_size=2)))
    assert (result.peak_memory_allocated_bytes, result.extra) == (203, {"mine": 0})
    assert result.step_seconds == [0.5] * 3
