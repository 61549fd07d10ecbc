"""`sweep profile`: what it refuses, what it prints, and one real profile on a local Ray."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from db.store import Store
from db.write.writes import ProfileEnd
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import Failure, FailureKind, MemoryShortage
from orchestrator.core.trial.kernel_names import Axis
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.memory_timeline import MemoryKind
from orchestrator.core.trial.rank_profile import MemoryMoment
from orchestrator.core.trial.step_part import StepPart
from orchestrator.core.trial.trace_split import Part
from tests.cli.conftest import Sweep
from tests.core.trial.rank_profiles import rank_profile
from tests.db.builders import CONDITIONS, Bench, record_failure

FILE = """\
name: small
model: llama-tiny
gpus: 2
sequence_length: 64
global_batch_size: 8
precision: fp32
device: cpu
axes: {micro_batch_size: [4], recompute: [none]}
measurement: {min_steps: 2, max_steps: 2}
search: {max_trials: 1, confirm: {repeats: 0}}
"""


def file_of(store: Store, bench: Bench, **changes: object) -> int:
    """Give the bench's sweep a real sweep file. Returns the epoch of its owner."""
    spec = SweepSpec.model_validate(
        {
            "name": "tiny",
            "model": "llama-tiny",
            "gpus": 2,
            "sequence_length": 128,
            "global_batch_size": 64,
            **changes,
        }
    )
    store.release(bench.sweep_id, bench.epoch)
    return store.acquire(
        bench.sweep_id,
        host="here",
        pid=1,
        spec_json=spec.model_dump_json(),
        conditions=CONDITIONS,
    )


def test_a_workload_that_trains_nothing_is_refused_in_one_line(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store, "tiny")
    trial_id = bench.measure()
    file_of(store, bench, workload="synthetic")
    _, err = sweep("profile", str(trial_id), code=2)
    said = err.strip().splitlines()[-1]
    assert f"trial {trial_id} cannot be profiled: workload synthetic trains nothing" in said
    assert store.trial(trial_id).profiles == ()


def test_a_profile_does_not_disturb_a_sweep_that_is_being_measured(
    store: Store, sweep: Sweep
) -> None:
    bench = Bench.on(store, "tiny")
    trial_id = bench.measure()
    file_of(store, bench)
    _, err = sweep("profile", str(trial_id), code=5)
    assert "is being measured by pid 1 on here" in err


def test_a_rank_that_the_layout_does_not_have_is_refused(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store, "tiny")
    trial_id = bench.measure()
    store.release(bench.sweep_id, file_of(store, bench))
    _, err = sweep("profile", str(trial_id), "--rank", "2", code=2)
    assert f"--rank: trial {trial_id} has ranks 0 to 1" in err


def test_show_prints_the_last_profile_and_json_has_all(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure()
    for share in (300_000, 400_000):
        found = rank_profile(
            {Part.EXPOSED_DP: share},
            overlapped={**dict.fromkeys(Axis, 0), Axis.DP: 1_000_000},
            memory=[
                MemoryMoment(
                    step=1, part=StepPart.FORWARD, num_bytes={MemoryKind.PARAMETERS: 1 << 20}
                )
            ],
        )
        store.end_profile(
            ProfileEnd(
                trial_id=trial_id,
                number=store.begin_profile(trial_id),
                nodes=("n",),
                gpu_seconds=1.0,
                ranks={0: found},
                advice=("accumulate",),
                failure=None,
            )
        )
    out, _ = sweep("show", str(trial_id))
    assert "Profile 2: done" in out
    assert "exposed communication, DP" in out and "40.0%" in out and "30.0%" not in out
    assert "  - accumulate" in out
    assert "P parameters" in out
    profiles = json.loads(sweep("show", str(trial_id), "--json")[0])["profiles"]
    assert [one["ranks"][0]["fractions"]["exposed_dp"] for one in profiles] == [0.3, 0.4]


def test_show_tells_in_which_part_of_a_step_memory_ran_out(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    trial_id, attempt = bench.start()
    failure = Failure(
        kind=FailureKind.OOM_GPU,
        message="rank 0 ran out of device memory",
        rank=0,
        phase="first_step",
        step=0,
        memory=MemoryShortage(is_reported=True, step_part=StepPart.BACKWARD),
    )
    record_failure(
        store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        failure=failure,
        event=TrialEvent.OUT_OF_MEMORY,
    )
    assert "the backward pass of step 1" in sweep("show", str(trial_id))[0]
    statement = "select failure_step_part from v_failure union select failure_step_part from v_oom"
    assert sweep("sql", statement, "--format", "csv")[0].split() == [
        "failure_step_part",
        "backward",
    ]


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_trial_is_profiled_on_a_local_ray(store: Store, sweep: Sweep, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(FILE)
    sweep("run", str(file), "--quiet")
    (before,) = store.trials(store.sweep_named("small").id)
    out, _ = sweep("profile", str(before.id), "--memory", "--steps", "2", "--json")
    found = json.loads(out)
    assert (found["state"], found["failure_kind"]) == ("done", None)
    for one in found["ranks"]:
        assert sum(one["parts"].values()) == one["window_nanoseconds"]
        trace = Path(one["trace_path"])
        assert trace.parent.parent.name == "profile-1"
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {one["step"] for one in found["memory"]} == {1, 2, 3, 4}
    # Nothing of it counts: the trial is as it was.
    assert store.trials(store.sweep_named("small").id) == [before]
    assert len(store.trial(before.id).attempts) == 1
    assert store.reserved(store.sweep_named("small").id).total.profile > 0
