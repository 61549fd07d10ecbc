"""The sweep file and the script of one trial."""

from __future__ import annotations

from orchestrator.core.sweepfile.spec_yaml import load
from orchestrator.report.sweep_rows import SweepRows
from orchestrator.report.trial_file import TrialFiles


def test_a_replayed_trial_has_a_sweep_file_that_loads(scaling: SweepRows) -> None:
    spec = load(
        "name: mine\nmodel: llama-tiny\ngpus: 2\nsequence_length: 128\nglobal_batch_size: 64\n"
        "axes: {micro_batch_size: [1, 2, 4], zero_stage: [0, 1]}\nsearch: {max_trials: 3}\n"
        "notify: {url: '${SLACK_URL}'}\n",
        source="test",
    )
    one = scaling.trials[1]
    text = TrialFiles.of(spec.model_dump_json()).sweep_file(one)
    assert text is not None
    again = load(text, source="trial.yaml")
    assert again.name == f"scaling-trial-{one.trial.id}"
    assert again.cells()[0] == one.cell.cell
    assert again.axes.micro_batch_size == (one.trial.layout.micro_batch_size,)
    assert again.axes.grad_accum_steps == (one.trial.layout.grad_accum_steps,)
    assert spec.notify and not again.notify


def test_the_program_of_a_trial_is_a_script_with_its_layout(scaling: SweepRows) -> None:
    spec = load(
        "name: mine\nmodel: llama-tiny\ngpus: 2\nsequence_length: 128\nglobal_batch_size: 64\n"
        "workload: {name: command, options: {argv: [python, t.py, '--mbs={micro_batch_size}']}}\n",
        source="test",
    )
    one = scaling.trials[1]
    script = TrialFiles.of(spec.model_dump_json()).program_script(one)
    assert script is not None
    assert f"python t.py --mbs={one.trial.layout.micro_batch_size}" in script
    assert TrialFiles.of("{}").program_script(one) is None
