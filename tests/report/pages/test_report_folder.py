"""A report opens from files, shows hostile text as text, and has a page for every trial."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from orchestrator import cli
from orchestrator.core.errors import UsageInvalid
from orchestrator.report.pages import report_folder
from orchestrator.report.pages.report_folder import POLICY, Written, write_report
from orchestrator.report.pages.script_data import compressed_script, json_for_script
from orchestrator.report.sweep_rows import SweepRows
from tests.cli.cli_store import FORMULA, HOSTILE

PAYLOADS = (
    HOSTILE,
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\0\x1b[31m",
)


class Scripts(HTMLParser):
    """The scripts of a page, and the handlers of its elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sources: list[str | None] = []
        self.handlers: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "script":
            self.sources.append(given.get("src"))
        self.handlers += [name for name in given if name.startswith("on")]
        self.links += [value for name in ("href", "src") if (value := given.get(name))]


def value_of(file: Path) -> Any:
    """What a compressed script gives to the page."""
    found = re.fullmatch(
        r'sweepReport\.takeCompressed\("[\w-]+", "([\w+/=]*)"\);\n', file.read_text()
    )
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


@pytest.fixture(scope="module")
def written(
    tiny: SweepRows, scaling: SweepRows, tmp_path_factory: pytest.TempPathFactory
) -> Written:
    return write_report([tiny, scaling], tmp_path_factory.mktemp("out") / "report")


def test_pages_have_no_script_of_their_own_and_name_local_files_only(written: Written) -> None:
    pages = sorted(written.index.parent.glob("*.html"))
    assert [page.name for page in pages] == ["index.html", "trial.html", "trials.html"]
    for page in pages:
        text = page.read_text()
        assert POLICY.replace("'", "&#39;") in text
        found = Scripts(text)
        assert not found.handlers
        assert None not in found.sources
        for link in found.links:
            local = link.split("#")[0]
            assert link == "data:," or (written.index.parent / local).is_file() or local == ""


def test_hostile_text_is_shown_as_text(written: Written) -> None:
    for page in written.index.parent.glob("*.html"):
        text = page.read_text()
        assert "<script>alert" not in text
        assert "\x1b" not in text
    for file in (written.index.parent / "data").iterdir():
        assert not re.search(r"[<>\x00-\x09\x0b-\x1f\x7f]", file.read_text())


@pytest.mark.parametrize("payload", PAYLOADS)
def test_values_in_a_script_hold_no_markup_and_no_control_character(payload: str) -> None:
    text = json_for_script({payload: [payload]})
    assert not re.search(r"[<>&\x00-\x1f\x7f-\x9f\u2028\u2029\u202e]", text)
    assert json.loads(text) == {payload: [payload]}


def test_every_trial_has_its_document(
    written: Written, tiny: SweepRows, scaling: SweepRows
) -> None:
    data = written.index.parent / "data"
    table = value_of(data / "trials.js")
    every = [one for sweep in (tiny, scaling) for one in sweep.trials]
    assert [row[0] for row in table["rows"]] == [str(one.trial.id) for one in every]
    documents: dict[str, Any] = {}
    for file in data.glob("trials-*.js"):
        documents |= value_of(file)
    for one in every:
        found = documents[str(one.trial.id)]
        assert table["files"][str(one.trial.id)] == 0
        assert len(found["attempts"]) == len(one.attempts)
        assert len(found["events"]) == len(one.events)
        assert ["layout", one.trial.layout.key] in found["facts"]
    failed = next(it for it in documents.values() if it["state"] == "failed")
    assert HOSTILE.splitlines()[1] in failed["attempts"][0]["log"]


def test_a_report_is_written_again_over_an_older_one(scaling: SweepRows, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "trials-99.js").write_text(compressed_script("trials-99", {}))
    (tmp_path / "data" / "trials-mine.js").write_text("kept")
    (tmp_path / "mine.txt").write_text("kept")
    write_report([scaling], tmp_path)
    assert not (tmp_path / "data" / "trials-99.js").exists()
    assert (tmp_path / "mine.txt").read_text() == "kept"
    assert (tmp_path / "data" / "trials-mine.js").read_text() == "kept"
    write_report([scaling], tmp_path)


def test_the_index_of_another_site_is_not_replaced(scaling: SweepRows, tmp_path: Path) -> None:
    index = tmp_path / "index.html"
    index.write_text("<h1>Mine</h1>")
    with pytest.raises(UsageInvalid, match=r"index\.html is not a report; name another folder"):
        write_report([scaling], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert index.read_text() == "<h1>Mine</h1>"


def test_a_folder_that_cannot_be_written_is_a_mistake_in_one_line(
    scaling: SweepRows, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageInvalid, match="cannot write the report to"):
        write_report([scaling], tmp_path / "file")


def test_a_missing_package_is_named_with_its_fix(
    scaling: SweepRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_folder, "find_spec", lambda name: None)
    fix = r"pip install '\.\[report\]' in the cloned folder, before a sweep begins or in"
    with pytest.raises(UsageInvalid, match=rf"needs plotly, which is not installed: {fix}"):
        write_report([scaling], tmp_path)


def test_the_command_writes_pages_and_markdown(
    report_url: str, scaling: SweepRows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert cli.main(["report", "scaling", "-o", str(folder), "--db", report_url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["index"] == str(folder / "index.html")
    assert told["num_trials"] == len(scaling.trials)
    assert told["pictures"]["scaling"]["num_marks"] == len(scaling.trials)
    assert cli.main(["report", "tiny", "--format", "md", "--db", report_url]) == 0
    text = capsys.readouterr().out
    assert "| trial | tokens/s/GPU |" in text
    assert "<script>" not in text and "\x1b" not in text
    assert FORMULA not in text.splitlines()
