"""What `sweep run` says at its end."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from orchestrator.cli.run.ending import EXIT_SOME_FAILED, exit_code, print_ending
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report.software_change import SoftwareChange
from orchestrator.sweep.progress import FailedTrials, StopReason, SweepResult

SPEC = SweepSpec.model_validate(
    {
        "name": "mine",
        "model": "llama-tiny",
        "gpus": 1,
        "sequence_length": 64,
        "global_batch_size": 8,
    }
)
(CELL,) = SPEC.cells()


def ending(counts: Mapping[TrialState, int], *, interrupted: bool = False) -> SweepResult:
    return SweepResult(
        sweep_id=1,
        counts=counts,
        stopped={CELL: StopReason.EXHAUSTED},
        interrupted=interrupted,
        nothing_feasible=(),
        nothing_fits={},
        tied={},
        untried={CELL: 0},
    )


@pytest.mark.parametrize("strict", [False, True])
def test_failed_trials_have_their_fix_and_with_strict_the_code_its_reason(
    capsys: pytest.CaptureFixture[str], strict: bool
) -> None:
    result = ending({TrialState.MEASURED: 3, TrialState.FAILED: 1})
    print_ending(SPEC, result, "sqlite:///s", None, strict=strict)
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("1 trial failed")
    ]
    assert ("(exit code 3)" in line) is strict
    assert (exit_code(result, None, strict=strict) == EXIT_SOME_FAILED) is strict
    assert "`sweep trials mine --state failed` shows how" in line
    assert line.endswith("sweep invalidate --sweep mine --where \"state = 'failed'\" --yes")


@pytest.mark.parametrize(("later_seconds", "is_said"), [(60.0, True), (-60.0, False)])
def test_a_program_that_was_changed_after_its_failures_is_named_with_what_tries_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], later_seconds: float, is_said: bool
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    failed_at = datetime.fromtimestamp(script.stat().st_mtime - later_seconds, UTC)
    options = {"argv": ["python", "train.py"], "cwd": str(tmp_path)}
    fields = SPEC.model_dump() | {"workload": {"name": "command", "options": options}}
    failed = FailedTrials(num=1, last_id=1, last="user_error: no", last_at=failed_at)
    result = replace(
        ending({TrialState.FAILED: 1}), nothing_feasible=(CELL,), failed={CELL: failed}
    )
    print_ending(SweepSpec.model_validate(fields), result, "sqlite:///s", None)
    told = capsys.readouterr().err
    assert (f"{script} was changed after they failed" in told) is is_said
    assert "sweep invalidate --sweep mine --where \"state = 'failed'\" --yes" in told


CHANGE = SoftwareChange(text="5 are older", command="sweep invalidate", is_of_code=True)


@pytest.mark.parametrize(("code_has_changed", "changes"), [(True, []), (False, [CHANGE])])
def test_code_that_changed_is_said_with_the_files_that_may_have(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    code_has_changed: bool,
    changes: list[SoftwareChange],
) -> None:
    (tmp_path / "probe.py").touch()
    options = {"argv": ["python", "train.py"], "cwd": str(tmp_path)}
    fields = SPEC.model_dump() | {"workload": {"name": "command", "options": options}}
    result = replace(ending({TrialState.MEASURED: 3}), code_has_changed=code_has_changed)
    print_ending(SweepSpec.model_validate(fields), result, "sqlite:///s", None, changes=changes)
    assert f"the last written are {tmp_path / 'probe.py'}; keep" in capsys.readouterr().err
    print_ending(SPEC, result, "sqlite:///s", None, changes=changes)
    assert "last written" not in capsys.readouterr().err


def test_a_package_that_changed_names_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "probe.py").touch()
    options = {"argv": ["python", "train.py"], "cwd": str(tmp_path)}
    fields = SPEC.model_dump() | {"workload": {"name": "command", "options": options}}
    change = replace(CHANGE, text="5 are older (torch 2.9 -> 2.10)", is_of_code=False)
    result = ending({TrialState.MEASURED: 9})
    print_ending(SweepSpec.model_validate(fields), result, "sqlite:///s", None, changes=[change])
    told = capsys.readouterr().err
    assert "torch 2.9 -> 2.10" in told and "last written" not in told


def test_only_kept_apart_repeats_of_new_code_are_not_called_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = replace(ending({TrialState.MEASURED: 3}), code_has_changed=True)
    apart = replace(CHANGE, text="3 repeats were kept apart", is_apart=True)
    print_ending(SPEC, result, "sqlite:///s", None, changes=[apart])
    told = capsys.readouterr().err
    assert "3 repeats were kept apart" in told and "nothing was measured again" not in told


def test_numbers_that_cannot_be_true_are_told_from_failures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = FailedTrials(num=2, last_id=4, last="user_error: no", last_at=datetime.now(UTC))
    result = replace(
        ending({TrialState.MEASURED: 2, TrialState.FAILED: 2}),
        nothing_feasible=(CELL,),
        launched={CELL: 4},
        failed={CELL: failed},
        implausible={CELL: {1: "faster than its peak", 2: "faster than its peak"}},
    )
    print_ending(SPEC, result, "sqlite:///s", None)
    told = capsys.readouterr().err
    assert f"No layout of {CELL.key} can be ranked: 2 measured, 2 failed. Left out," in told
    assert "cannot be true: trials 1 and 2; faster than its peak. See `sweep show 1`" in told
    assert "Nothing could be measured" not in told


def test_failures_of_a_table_that_is_replayed_have_no_fix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    replayed = SPEC.model_copy(
        update={"workload": SPEC.workload.model_copy(update={"name": "replay"})}
    )
    print_ending(replayed, ending({TrialState.FAILED: 2}), "sqlite:///s", None)
    told = capsys.readouterr().err
    assert (
        "2 trials failed: `sweep trials mine --state failed` shows how. The replayed table has"
        in told
    )
    assert "invalidate" not in told


def test_a_cell_whose_nodes_are_gone_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    lost = replace(ending({}), stopped={CELL: StopReason.NODES}, nothing_feasible=(CELL,))
    print_ending(SPEC, lost, "sqlite:///s", None)
    told = capsys.readouterr().err
    assert f"Nothing was measured for {CELL.key}: the nodes that are left cannot hold" in told
    assert "The same command continues when enough nodes are back." in told
    unconfirmed = replace(ending({TrialState.MEASURED: 4}), stopped={CELL: StopReason.NODES})
    print_ending(SPEC, unconfirmed, "sqlite:///s", None)
    told = capsys.readouterr().err
    assert f"{CELL.key} is not finished: the nodes that are left cannot hold" in told
    assert "The same command continues when enough nodes are back." in told


def test_a_cell_whose_trials_all_ran_for_nothing_does_not_blame_the_layouts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    marked = replace(
        ending({TrialState.MEASURED: 4}),
        stopped={CELL: StopReason.EXHAUSTED},
        nothing_feasible=(CELL,),
        launched={CELL: 4},
    )
    print_ending(SPEC, marked, "sqlite:///s", None)
    err = capsys.readouterr().err
    assert "can be ranked: 4 trials ran, and none has numbers that count" in err
    assert "not legal" not in err


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_the_exit_code_is_that_of_the_signal_whenever_it_came(is_interrupted: bool) -> None:
    result = ending({TrialState.MEASURED: 3}, interrupted=is_interrupted)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert exit_code(result, number, strict=False) == 128 + number


def test_a_signal_after_the_last_trial_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    print_ending(SPEC, ending({TrialState.MEASURED: 3}), "sqlite:///s", signal.SIGTERM)
    told = capsys.readouterr().err
    assert "SIGTERM came after that (exit code 143): nothing is lost." in told


def test_without_failures_and_after_a_stop_no_fix_is_offered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_ending(SPEC, ending({TrialState.MEASURED: 3}), "sqlite:///s", None, strict=True)
    stopped = ending({TrialState.FAILED: 3}, interrupted=True)
    print_ending(SPEC, stopped, "sqlite:///s", None, strict=True)
    assert "invalidate" not in capsys.readouterr().err
