"""Any program as a workload: what it is told, how its numbers come back, how its end is judged."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.sweepfile.template import TEMPLATE_NAMES, fill, text_of
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.node.launcher import NodeLauncher
from tests.node.launching import order
from tests.workloads.command.running import run, trial_ids
from workloads.command.program import ProgramPlace, template_values


def test_a_result_file_of_rank_0_is_enough(launcher: NodeLauncher) -> None:
    report = run(
        launcher,
        """
        import json, os
        if os.environ["RANK"] == "0":
            result = {"step_seconds": [0.5, 0.6], "loss_last": 2.5}
            json.dump(result, open(os.environ["SWEEP_RESULT_FILE"], "w"))
        """,
    )
    assert report.failure is None, report.failure
    first, second = report.ranks
    assert first.result is not None and (first.result.step_seconds, first.result.loss_last) == (
        [0.5, 0.6],
        2.5,
    )
    assert second.result is not None and second.exit_code == 0
    # Other ranks tell their memory, and no steps.
    assert second.result.step_seconds == [] and second.result.loss_last is None
    assert second.result.peak_memory_resident_bytes is not None


def test_steps_are_timed_once_the_lines_of_the_warm_up_have_come(
    launcher: NodeLauncher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[bool] = []

    def count(_: object, timed: bool) -> None:
        told.append(timed)
        if timed:
            (tmp_path / "timed").touch()

    monkeypatch.setattr("orchestrator.node.launcher.GpuMonitor.count", count)
    program = """
        import json, os, sys, time
        if os.environ["RANK"] == "0":
            with open(os.environ["SWEEP_METRICS_FILE"], "w", buffering=1) as file:
                for step in range(int(sys.argv[1])):
                    file.write(json.dumps({"step_seconds": 0.1}) + "\\n")
        until = time.monotonic() + float(sys.argv[2])
        while time.monotonic() < until and not os.path.exists(sys.argv[3]):
            time.sleep(0.02)
        """
    for lines, is_timed, seconds in (("1", False, "1"), ("2", True, "20")):
        told.clear()
        plan = order().request.measurement.model_copy(update={"warmup_steps": 2})
        run(launcher, program, lines, seconds, str(tmp_path / "timed"), plan=plan)
        assert any(told) is is_timed


def test_metrics_may_come_line_by_line_and_the_warm_up_is_dropped(launcher: NodeLauncher) -> None:
    report = run(
        launcher,
        """
        import json, os, time
        if os.environ["RANK"] == "0":
            with open(os.environ["SWEEP_METRICS_FILE"], "w", buffering=1) as file:
                for step in range(4):
                    print("a line that is no metric", file=file)
                    print(json.dumps({"step_seconds": 0.5 + step, "loss": 2.0}), file=file)
                    time.sleep(0.02)
                print('{"step_seconds": 9.5}', end="", file=file)
        """,
        world_size=2,
    )
    assert report.failure is None, report.failure
    result = report.ranks[0].result
    assert result is not None
    assert (result.warmup_seconds, result.step_seconds) == (
        [0.5],
        [1.5, 2.5, 3.5, 9.5],
    )  # one step of warm-up
    assert report.ranks[0].step == 5


def test_the_layout_comes_as_arguments_and_as_environment(launcher: NodeLauncher) -> None:
    report = run(
        launcher,
        """
        import json, os, sys
        names = "SWEEP_MICRO_BATCH_SIZE SWEEP_RECOMPUTE MINE"
        print(sys.argv[1:], *(os.environ[name] for name in names.split()), os.getcwd())
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR"
        print(*(os.environ[name] for name in names.split()))
        json.dump({"step_seconds": [1]}, open(sys.argv[3], "w"))
        """,
        "--mbs={micro_batch_size}",
        "{{literally}}",
        "{result_file}",
        "{world_size}/{sequence_length}/{global_batch_size}",
        env={"MINE": "dp{data_parallel_size}"},
        world_size=1,
    )
    assert report.failure is None, report.failure
    log = report.ranks[0].log_tail
    assert "'--mbs=1', '{literally}'" in log and "'1/128/1'" in log
    assert "1 none dp1 " in log and "node-0" in log
    assert "0 0 1 1 127.0.0.1" in log


@pytest.mark.parametrize(
    "template",
    [
        "{seed.__class__}",
        "{0}",
        "{}",
        "{micro_batch_size!r}",
        "{micro_batch_size:>9999999}",
        "{run_dir[0]}",
        "{",
        "}",
        "{nobody}",
    ],
)
def test_only_plain_known_names_are_filled_in(template: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        fill(template, {"seed": "1", "micro_batch_size": "2", "run_dir": "/r"})


def place(run_dir: Path) -> ProgramPlace:
    return ProgramPlace(
        run_dir=run_dir,
        rank=0,
        local_rank=0,
        gpus_per_node=2,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=29500,
    )


def test_every_name_that_the_door_knows_is_filled_in_by_a_rank(tmp_path: Path) -> None:
    assert tuple(template_values(order().request, place(tmp_path))) == tuple(TEMPLATE_NAMES)


def test_options_that_vary_are_names_too(tmp_path: Path) -> None:
    request = order().request
    layout = replace(request.layout, options=(("fused", True), ("kernel", "flash"), ("threads", 2)))
    told = template_values(request.model_copy(update={"layout": layout}), place(tmp_path))
    texts = {name: text_of(value) for name, value in told.items()}
    assert (
        fill("--kernel={kernel} --fused={fused} -t {threads}", texts)
        == "--kernel=flash --fused=true -t 2"
    )


def test_a_variable_named_by_env_from_reaches_the_program_and_one_that_did_not_is_told(
    launcher: NodeLauncher,
) -> None:
    program = """
        import json, os
        result = {"step_seconds": [float(os.environ["SECONDS_FROM_AFAR"])]}
        json.dump(result, open(os.environ["SWEEP_RESULT_FILE"], "w"))
    """
    report = run(
        launcher,
        program,
        env_from=["SECONDS_FROM_AFAR"],
        world_size=1,
        environment={"SECONDS_FROM_AFAR": "0.75"},
    )
    assert report.failure is None, report.failure
    result = report.ranks[0].result
    assert result is not None and result.step_seconds == [0.75]
    report = run(launcher, program, env_from=["SECONDS_FROM_AFAR"], world_size=1)
    assert report.failure is not None and report.failure.kind is FailureKind.CONFIG_REJECTED
    assert (
        "env_from names SECONDS_FROM_AFAR, which did not reach this rank" in report.failure.log_tail
    )


def test_a_template_that_names_nothing_known_refuses_the_layout(launcher: NodeLauncher) -> None:
    report = run(launcher, "", "{micro_batch}")
    assert report.failure is not None and report.failure.kind is FailureKind.CONFIG_REJECTED
    assert "micro_batch_size" in report.failure.evidence


@pytest.mark.parametrize(
    ("program", "kind", "signal"),
    [
        ("raise SystemExit(3)", FailureKind.USER_ERROR, None),
        ("raise ValueError('no')", FailureKind.USER_ERROR, None),
        ("import os; os.kill(os.getpid(), 11)", FailureKind.SEGFAULT, 11),
        ("import os; os.kill(os.getpid(), 9)", FailureKind.KILLED, 9),
        (
            "import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to "
            "allocate 2.00 GiB')",
            FailureKind.OOM_GPU,
            None,
        ),
        (
            "import os; open(os.environ['SWEEP_RESULT_FILE'], "
            "'w').write('{\"step_seconds\": [-1]}')",
            FailureKind.BAD_RESULT,
            None,
        ),
        ("pass", FailureKind.BAD_RESULT, None),
        ("import time; time.sleep(100)", FailureKind.HUNG, None),
    ],
)
def test_it_is_judged_as_the_program_ended(
    launcher: NodeLauncher, program: str, kind: FailureKind, signal: int | None
) -> None:
    # The others end by themselves, on a busy machine after seconds.
    limits = {"first_step": 1.0} if kind is FailureKind.HUNG else {}
    report = run(launcher, program, world_size=1, limits=limits)
    assert report.failure is not None
    assert (report.failure.kind, report.failure.signal) == (kind, signal), report.failure


def test_a_hung_program_is_judged_so_where_stacks_cannot_be_read_from_outside(
    launcher: NodeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without py-spy, or without the right to look into a process, the rank is asked for them."""
    monkeypatch.setattr("orchestrator.node.stacks.shutil.which", lambda *_, **__: None)
    report = run(launcher, "import time; time.sleep(100)", world_size=1, limits={"first_step": 1.0})
    assert report.failure is not None
    assert (report.failure.kind, report.failure.signal) == (FailureKind.HUNG, None)
    assert "most recent call first" in report.failure.log_tail


def test_a_rank_that_writes_its_stack_late_is_waited_for(
    launcher: NodeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it may get no core for a while. Here it is stopped for two seconds."""
    monkeypatch.setattr("orchestrator.node.stacks.shutil.which", lambda *_, **__: None)
    program = (
        "import os, signal, time; os.kill(os.getppid(), signal.SIGSTOP); time.sleep(2);"
        " os.kill(os.getppid(), signal.SIGCONT); time.sleep(100)"
    )
    report = run(launcher, program, world_size=1, limits={"first_step": 1.0})
    assert report.failure is not None
    assert (report.failure.kind, report.failure.signal) == (FailureKind.HUNG, None)
    assert "most recent call first" in report.failure.log_tail


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("pass", "the program wrote 0 steps, warm-up included; expected more than 1"),
        (
            "print({})",
            "to the file that SWEEP_METRICS_FILE names, or set metrics: {log: PATTERN}",
        ),
        (
            'print(\'{"step_seconds": 0.07, "loss": 9.1}\\n\' * 10)',
            "append such lines to the file that SWEEP_METRICS_FILE names, or set metrics: "
            "{log: '\"step_seconds\": (-?\\d[\\d.eE+-]*)', unit: s}",
        ),
        # Only the end of the output is searched.
        (
            "print('x\\n' * 600_000); print('step_seconds=0.07\\n' * 10)",
            "its steps are in what it prints, which is not read",
        ),
        (
            "print('{\"loss\": 9.1}\\n' * 10)",
            "it prints JSON lines, which are not read: if these are its steps, append them to",
        ),
        (
            "import os; os.environ['SWEEP_NUM_STEPS']",
            "than 1; report each of the 9 steps that it is asked for: append",
        ),
        (
            "import os; open(os.environ['SWEEP_METRICS_FILE'], 'w').write('fast\\n-1\\n')",
            "2 lines were no steps, the first: fast",
        ),
        (
            "import os; open(os.environ['SWEEP_METRICS_FILE'], 'w').write("
            '\'{"step_time": 0.07, "loss": 9.1}\\n\' * 10)',
            "than 1; 10 lines came, none has step_seconds; they have: loss, step_time",
        ),
        (
            "import os; open(os.environ['SWEEP_RESULT_FILE'], "
            "'w').write('{\"step_seconds\": [-1]}')",
            "program-result.json: result is not valid",
        ),
    ],
)
def test_why_there_is_no_result_is_the_message_and_not_only_in_the_log(
    launcher: NodeLauncher, program: str, said: str
) -> None:
    report = run(launcher, program, world_size=1)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.BAD_RESULT
    assert said in report.failure.message


def test_each_line_is_progress_and_silence_after_it_a_hang(launcher: NodeLauncher) -> None:
    program = """
        import os, time
        for step in range(8):
            if os.environ["RANK"] == "0":
                open(os.environ["SWEEP_METRICS_FILE"], "a").write('{"step_seconds": 0.2}\\n')
            time.sleep(0.2 if step < 7 else 100)
    """
    report = run(launcher, program, limits={"steady": 5.0})
    assert report.failure is not None
    assert (report.failure.kind, report.failure.phase, report.failure.step) == (
        FailureKind.HUNG,
        "steady",
        8,
    )


def test_a_program_that_does_not_exist_is_named(launcher: NodeLauncher, tmp_path: Path) -> None:
    options = {"argv": [str(tmp_path / "no-such-program")]}
    report = launcher.run(
        order("workloads.command", trial_id=next(trial_ids), options=options, world_size=1)
    )
    assert report.failure is not None and report.failure.kind is FailureKind.USER_ERROR
    assert "no-such-program" in report.failure.log_tail


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"argv": [sys.executable, "-u", "/nowhere/train.py"]},
            "/nowhere/train.py does not exist",
        ),
        ({"argv": ["pyhton"]}, "'pyhton' is in none of the folders of PATH"),
        ({"argv": ["true"], "cwd": "/nowhere"}, "cwd '/nowhere' is missing"),
        ({"argv": [sys.executable, "train.py"]}, "each rank starts in its own run directory"),
    ],
)
def test_what_a_program_cannot_start_without_is_the_message(
    launcher: NodeLauncher, options: dict[str, Any], said: str
) -> None:
    """Python alone would end with exit code 2, and the reason only in its log."""
    report = launcher.run(
        order("workloads.command", trial_id=next(trial_ids), options=options, world_size=1)
    )
    assert report.failure is not None and report.failure.kind is FailureKind.USER_ERROR
    assert said in report.failure.message


def test_a_script_that_the_sweep_writes_is_found(launcher: NodeLauncher) -> None:
    source = (
        'import os; open(os.environ["SWEEP_RESULT_FILE"], "w").write(\'{{"step_seconds": [1]}}\')'
    )
    options = {"argv": [sys.executable, "train.py"], "files": {"train.py": source}}
    report = launcher.run(
        order("workloads.command", trial_id=next(trial_ids), options=options, world_size=1)
    )
    assert report.failure is None, report.failure


def test_a_program_whose_interpreter_is_gone_is_told(
    launcher: NodeLauncher, tmp_path: Path
) -> None:
    program = tmp_path / "accelerate"
    program.write_text("#!/gone/.venv/bin/python\n")
    program.chmod(0o755)
    options = {"argv": [str(program)]}
    report = launcher.run(
        order("workloads.command", trial_id=next(trial_ids), options=options, world_size=1)
    )
    assert report.failure is not None
    assert "its first line (#!) names a program that does not exist" in report.failure.message


def test_an_argument_that_no_program_can_be_given_is_told(launcher: NodeLauncher) -> None:
    asked = order(
        "workloads.command",
        trial_id=next(trial_ids),
        options={"argv": ["true", "{kernel}"]},
        world_size=1,
    )
    layout = replace(asked.request.layout, options=(("kernel", "a\0b"),))
    report = launcher.run(
        replace(asked, request=asked.request.model_copy(update={"layout": layout}))
    )
    assert report.failure is not None and report.failure.kind is FailureKind.USER_ERROR
    assert (
        "cannot start 'true'" in report.failure.log_tail
        and "embedded null byte" in report.failure.log_tail
    )
    assert "Traceback" not in report.failure.log_tail


NAN = [
    # As Python's json writes them.
    'json.dump({"step_seconds": [0.5] * 6, "loss_first": 9.0, "loss_last": float("nan")}, '
    'open(os.environ["SWEEP_RESULT_FILE"], "w"))',
    # As orjson writes it.
    'json.dump({"step_seconds": [0.5] * 6, "loss_first": 9.0, "loss_last": None}, '
    'open(os.environ["SWEEP_RESULT_FILE"], "w"))',
    'json.dump({"step_seconds": [0.5] * 6, "gradient_norm": float("inf")}, '
    'open(os.environ["SWEEP_RESULT_FILE"], "w"))',
    'open(os.environ["SWEEP_METRICS_FILE"], "w").write("".join(json.dumps({"step_seconds": '
    '0.5, "loss": loss}) + chr(10) for loss in'
    ' [9.0, 8.0, float("nan"), float("nan")]))',
    'open(os.environ["SWEEP_METRICS_FILE"], "w").write(\'{"step_seconds": 0.5}\\n\' * 5 + '
    '\'{"step_seconds": 0.5, "loss": "NaN"}\')',
    'open(os.environ["SWEEP_METRICS_FILE"], "w").write(\'{"step_seconds": 0.5, "loss": '
    "-Infinity}\\n'); time.sleep(600)",
    'open(os.environ["SWEEP_METRICS_FILE"], "w").write(\'{"step_seconds": 0.5, "grad_norm": '
    "NaN}\\n' * 5)",
    'open(os.environ["SWEEP_METRICS_FILE"], "w").write(\'{"step_seconds": 0.5, "loss": '
    "NaN}\\n'); sys.exit(3)",
]


@pytest.mark.parametrize("ends", NAN)
def test_a_program_whose_loss_is_no_number_has_diverged(launcher: NodeLauncher, ends: str) -> None:
    report = run(launcher, f"import json, os, sys, time\nif os.environ['RANK'] == '0': {ends}")
    assert report.failure is not None
    assert (report.failure.kind, report.failure.rank) == (FailureKind.NOT_FINITE, 0), report.failure
    assert "lower the learning rate" in report.failure.message


def test_the_step_of_a_loss_that_is_no_number_is_named(launcher: NodeLauncher) -> None:
    report = run(launcher, f"import json, os\nif os.environ['RANK'] == '0': {NAN[3]}")
    assert report.failure is not None and "the loss of step 3 is nan" in report.failure.message


@pytest.mark.parametrize("loss", ["9.5", "null", '"unknown"', "1e30"])
def test_a_loss_that_is_a_number_or_not_told_is_measured(launcher: NodeLauncher, loss: str) -> None:
    line = f'{{"step_seconds": 0.5, "loss": {loss}, "grad_norm": 2.0}}'
    overflown = '{"step_seconds": 0.5, "grad_norm": Infinity}'  # skipped by a loss scaler
    program = f"""
        import os
        if os.environ["RANK"] == "0":
            text = {overflown!r} + chr(10) + ({line!r} + chr(10)) * 5
            open(os.environ["SWEEP_METRICS_FILE"], "w").write(text)
        """
    report = run(launcher, program)
    assert report.failure is None, report.failure
