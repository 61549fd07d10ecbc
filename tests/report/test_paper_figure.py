"""The files of `sweep plot` have the marks of the pages' pictures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from matplotlib.collections import PathCollection

from orchestrator import cli
from orchestrator.core.errors import UsageInvalid
from orchestrator.report.paper_figure import paper_figure
from orchestrator.report.pictures.all_pictures import PICTURES
from orchestrator.report.sweep_rows import SweepRows


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_is_drawn_with_as_many_marks(
    name: str, tiny: SweepRows, scaling: SweepRows, tmp_path: Path
) -> None:
    sweeps = [scaling] if name in ("memory-timeline", "step-split") else [scaling, tiny]
    figure = PICTURES[name](sweeps).figure
    assert figure is not None
    drawn = paper_figure(figure, title="a <b> $x$")
    drawn.savefig(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size > 2_000
    points = sum(
        len(found.get_offsets())  # type: ignore[arg-type]  # an array
        for axes in drawn.axes
        for found in axes.collections
        if isinstance(found, PathCollection)
    )
    for axes in drawn.axes:
        for found in axes.collections:
            if isinstance(found, PathCollection):
                inside = axes.transData.transform(found.get_offsets())
                assert axes.bbox.padded(1).count_contains(inside) == len(inside)
    markers = [t for t in figure["data"] if "markers" in t.get("mode", "")]
    assert points == sum(len(trace["x"]) for trace in markers)
    bars = sum(len(axes.patches) for axes in drawn.axes)
    expected = sum(len(trace["x"]) for trace in figure["data"] if trace["type"] == "bar")
    # Shaded phases are patches, too.
    spans = sum(shape["type"] == "rect" for shape in figure["layout"].get("shapes", ()))
    assert bars == expected + spans


def test_the_command_writes_the_same_file_twice(
    report_url: str, scaling: SweepRows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["plot", "scaling", "scaling", "--db", report_url]
    assert cli.main([*common, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_marks"] == len(scaling.trials)
    assert cli.main([*common, "--svg", "-o", "again.svg"]) == 0
    ids = re.compile(r'(id|xlink:href|clip-path)="[^"]*"')
    first, again = (ids.sub("", Path(name).read_text()) for name in ("scaling.svg", "again.svg"))
    assert first == again
    assert cli.main([*common, "--png"]) == 0
    assert Path("scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scalin", "scaling"], "did you mean"),
        (["scaling", "scaling", "-o", "x.pdf"], "neither .svg nor .png"),
        (["scaling", "scaling", "--png", "-o", "x.svg"], "contradict"),
        (["memory-timeline", "tiny"], "memory-timeline: No profile has the memory"),
    ],
)
def test_mistakes_are_said_in_one_line(
    report_url: str,
    scaling: SweepRows,
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plot", *arguments, "--db", report_url]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_matplotlib_is_named_with_its_fix(
    scaling: SweepRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    figure = PICTURES["scaling"]([scaling]).figure
    assert figure is not None
    with pytest.raises(UsageInvalid, match=r"pip install '\.\[report\]'"):
        paper_figure(figure)
