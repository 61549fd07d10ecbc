"""The bars of memory add up to the peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.sweepfile.spec_yaml import load
from orchestrator.report.pictures import memory_bars
from orchestrator.report.pictures.memory_bars import Side
from orchestrator.report.sweep_rows import SweepRows


def test_the_parts_of_memory_add_up_to_the_peak(scaling: SweepRows, tiny: SweepRows) -> None:
    for bar in memory_bars.bars([scaling, tiny]):
        assert bar.measured_bytes is not None
        assert sum(bar.measured_parts.values()) == pytest.approx(bar.measured_bytes, rel=0.02)
        assert sum(bar.predicted_parts.values()) == pytest.approx(bar.predicted_bytes)


def test_a_sweep_with_a_file_has_the_parts_of_its_predictions(scaling: SweepRows) -> None:
    spec = load(
        "name: mine\nmodel: llama-tiny\ngpus: 2\nsequence_length: 128\nglobal_batch_size: 64\n",
        source="test",
    )
    row = replace(scaling.sweep, spec_json=spec.model_dump_json())
    for bar in memory_bars.bars([replace(scaling, sweep=row)]):
        assert {"parameters", "gradients", "optimizer", "activations"} <= set(bar.predicted_parts)
        assert sum(bar.predicted_parts.values()) == pytest.approx(bar.predicted_bytes)


def test_a_part_of_any_name_is_shown_as_its_program_wrote_it(scaling: SweepRows) -> None:
    (bar, *_) = memory_bars.bars([scaling])
    name = "a\"b'c<i>&lt;"
    trace = memory_bars._trace([replace(bar, measured_parts={name: 1})], Side.MEASURED, [name])
    # Plotly knows no `&quot;`: it would show the entity.
    assert trace["hovertemplate"].endswith("<extra>a\"b'c&lt;i&gt;&amp;lt;, measured</extra>")
