"""The documents match the program: generated parts are current, examples run, links resolve."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from db.sql import readonly
from db.store import Store
from docs.committed_results import newest
from docs.generate import DOCS, documents, generated
from docs.key_tables import SECTIONS
from docs.kill_figures import chaos_lacks
from docs.store_tables import view_columns
from orchestrator.core import errors
from orchestrator.core.frameworks.framework import Framework
from orchestrator.core.frameworks.translation import TABLES
from orchestrator.core.search.planner import plan_cell
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.spec_yaml import load
from orchestrator.core.sweepfile.template import TEMPLATE_NAMES
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.lifecycle import mermaid
from orchestrator.core.trial.limits import resolve_limits
from orchestrator.core.trial.protocol import Device, TrialRequest
from orchestrator.node.launcher import NodeLauncher
from tests.cli.cli_store import fill
from tests.node.launching import order
from workloads.command.program import ProgramPlace, template_values

PROJECT = DOCS.parent
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    for document in documents():
        for found, text in _FENCE.findall(document.read_text()):
            if found == language:
                yield document, text


def named(pairs: Iterator[tuple[Path, str]]) -> list[Any]:
    return [
        pytest.param(text, id=f"{path.name}-{number}")
        for number, (path, text) in enumerate(pairs, 1)
    ]


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_generated_parts_are_those_of_the_code(document: Path) -> None:
    text = document.read_text()
    assert generated(text) == text, "run: python -m docs.generate"


def test_every_row_of_a_generated_table_is_one_line() -> None:
    for document in documents():
        for block in re.findall(
            r"<!-- generated: .*?-->\n(\|.*?)<!-- end", document.read_text(), re.S
        ):
            table = block.split("\n\n")[0].splitlines()
            assert [line for line in table if line[0] != "|"] == [], document.name


def test_the_published_kills_are_complete_and_without_complaints() -> None:
    published = newest("chaos")
    assert published is not None
    name, result = published
    assert chaos_lacks(result) == [], name


def test_a_wrong_winner_is_at_most_one_of_a_hundred_on_every_kind_of_drift() -> None:
    published = newest("drift")
    assert published is not None
    name, result = published
    now = {drift: rules["now"] for drift, rules in result["drifts"].items()}
    assert len(now) == 6
    for drift, found in now.items():
        assert found["runs"] >= 200 and found["wrong"] <= 0.01 * found["runs"], f"{name}: {drift}"


def test_bands_hold_for_75_to_85_of_100_published_runs() -> None:
    published = newest("prediction")
    assert published is not None
    name, result = published
    for what in ("step_time", "memory"):
        found = result["all_files"]["uncalibrated"][what]
        assert found["rows"] > 1000
        assert 0.75 <= found["within"] / found["rows"] <= 0.85, f"{name}: {what}"


def test_the_picture_of_the_states_is_the_table_of_the_code() -> None:
    assert mermaid() in (DOCS / "architecture.md").read_text()


@pytest.mark.parametrize("framework", [it for it in Framework if TABLES[it].tried is not None])
def test_the_page_of_a_framework_says_which_versions_were_tried(framework: Framework) -> None:
    tried = TABLES[framework].tried
    assert tried is not None
    before_table = (
        (DOCS / "recipes.md").read_text().split(f"<!-- generated: framework {framework} ")
    )
    sentence = before_table[0].rpartition("\nTried: ")[2].partition("\n")[0]
    assert tried.oldest in sentence and tried.newest in sentence


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    for target, anchor in _LINK.findall(document.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file = (document.parent / target) if target else document
        assert file.exists(), f"{document.name}: {target}"
        if anchor:
            assert anchor[1:] in anchors(file), (
                f"{document.name}: {target}{anchor}; there are {sorted(anchors(file))}"
            )


def anchors(file: Path) -> set[str]:
    """The anchors that GitHub makes from headings."""
    titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def filled_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a store with a trial in every state, for all queries: none may change it."""
    folder = tmp_path_factory.mktemp("queries")
    url = f"sqlite:///{folder}/sweep.sqlite"
    if request.param == "postgresql":
        server: str = request.getfixturevalue("postgresql_server")
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute("DROP DATABASE IF EXISTS documents WITH (FORCE)")
            connection.execute("CREATE DATABASE documents")
        url = server.replace("/postgres?", "/documents?")
    with Store.open(url) as store:
        fill(store, folder)
    return url


@pytest.mark.parametrize("statement", named(blocks("sql")))
def test_every_query_in_the_documents_runs(statement: str, filled_url: str) -> None:
    assert readonly.query(filled_url, statement).columns


@pytest.mark.parametrize(
    "text",
    named(
        (path, text) for path, text in blocks("yaml") if re.search(r"^name:", text, re.MULTILINE)
    ),
)
def test_every_sweep_file_in_the_documents_has_layouts(text: str) -> None:
    spec = load(text, source="document")
    for cell in spec.cells():
        assert (
            len(plan_cell(spec, cell, hardware=None, gpus_per_node=8, device=Device.CPU).candidates)
            > 0
        ), cell.key


def test_your_own_program_is_measured_as_the_document_shows(tmp_path: Path) -> None:
    program = next(
        text
        for path, text in blocks("python")
        if path.name == "workloads.md" and "SWEEP_METRICS_FILE" in text
    )
    spec = load(
        next(
            text for path, text in blocks("yaml") if path.name == "workloads.md" and "argv" in text
        ),
        source="document",
    )
    (tmp_path / "mine.py").write_text(program)
    options = spec.workload.options.as_written() | {"cwd": str(tmp_path)}
    options["argv"] = [sys.executable if word == "python" else word for word in options["argv"]]
    cell = spec.cells()[0]
    layout = plan_cell(
        spec, cell, hardware=None, gpus_per_node=8, device=Device.CPU
    ).candidates.table.layout(0)
    asked = LaunchOrder(
        request=TrialRequest(
            sweep=spec.name,
            trial_id=1,
            attempt=1,
            workload="command",
            options=options,
            model=cell.model,
            sequence_length=cell.sequence_length,
            layout=layout,
            device=Device.CPU,
            measurement=spec.measurement.plan(Device.CPU),
            limits=resolve_limits(
                spec.measurement.limits.asked,
                plan=spec.measurement.plan(Device.CPU),
                num_ranks=1,
                predicted=None,
            ),
            seed=0,
        ),
        program="workloads.command",
        local_world_size=layout.world_size,
    )
    launcher = NodeLauncher(tmp_path / "runs", node="here")
    try:
        report = launcher.run(asked)
    finally:
        launcher.close()
    assert report.failure is None, report.failure
    result = report.ranks[0].result
    # Eight are enough if they are alike.
    assert result is not None and 8 <= len(result.step_seconds) <= spec.measurement.max_steps


def test_a_program_can_use_every_documented_name(tmp_path: Path) -> None:
    place = ProgramPlace(
        run_dir=tmp_path,
        rank=0,
        local_rank=0,
        gpus_per_node=2,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=29500,
    )
    names = template_values(order().request, place)
    assert set(TEMPLATE_NAMES) == set(names)


def test_every_key_and_column_is_explained_somewhere() -> None:
    words = "".join(
        (DOCS / name).read_text()
        for name in ("glossary.md", "sweep-file.md", "sql.md", "workloads.md")
    )
    known = set(re.findall(r"`([a-z_]+)`", words))
    assert {key for section in SECTIONS.values() for key in section.model_fields} <= known
    assert set(view_columns()["v_trial"]) <= known
    assert set(SweepSpec.model_fields) <= known


def test_the_glossary_is_sorted_and_has_each_word_once() -> None:
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert len(words) > 40
    assert words == sorted(set(words), key=str.lower)


def test_the_glossary_names_every_objective() -> None:
    [row] = re.findall(
        r"^\| \*\*objective\*\* .*", (DOCS / "glossary.md").read_text(), re.MULTILINE
    )
    assert {f"`{one}`" for one in Objective} <= set(re.findall(r"`\w+`", row))


def test_every_command_is_in_the_readme() -> None:
    import typer

    app = import_module("orchestrator.cli").app
    commands = set(typer.main.get_command(app).commands)
    readme = (PROJECT / "README.md").read_text()
    assert {command for command in commands if f"`sweep {command}" not in readme} == set()
    named_there = set(
        re.findall(
            r"\bsweep ([a-z]+)\b(?=[ `\n])", "".join(re.findall(r"`sweep [a-z]+[ `]", readme))
        )
    )
    assert named_there <= commands


def test_every_exit_code_is_in_the_table() -> None:
    table = (DOCS / "troubleshooting.md").read_text()
    codes = {
        error.exit_code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.SweepError)
    }
    run = import_module("orchestrator.cli.run.ending")
    for code in codes | {run.EXIT_SOME_FAILED, run.EXIT_NOTHING_FEASIBLE, 0}:
        assert f"| {code} |" in table, code


def test_files_named_in_the_documents_exist() -> None:
    for document in documents():
        for path in re.findall(
            r"`((?:orchestrator|db|workloads|tests|sweeps|benchmarks|docs)/[\w./-]+\.\w+)`",
            document.read_text(),
        ):
            assert (PROJECT / path).exists(), f"{document.name} names {path}"


def test_make_targets_named_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    for document in documents():
        assert set(re.findall(r"`make ([a-z-]+)`", document.read_text())) <= targets, document.name


def test_extras_named_in_the_documents_exist() -> None:
    text = (PROJECT / "pyproject.toml").read_text()
    extras = set(
        re.findall(
            r"^(\w+) = \[",
            text[text.index("[project.optional-dependencies]") : text.index("[project.scripts]")],
            re.MULTILINE,
        )
    )
    for document in documents():
        for group in re.findall(r"(?:layout-sweep|\.)\[([a-z,]+)\]", document.read_text()):
            assert set(group.split(",")) <= extras, f"{document.name}: {group}"


def test_yaml_blocks_are_yaml() -> None:
    found = [text for _, text in blocks("yaml")]
    assert found
    for text in found:
        yaml.safe_load(text)


def test_a_hint_to_measure_again_works_in_a_script() -> None:
    """Without --yes the command asks, and refuses if nobody can answer."""
    sources = [
        *documents(),
        *(path for folder in ("orchestrator", "db") for path in (PROJECT / folder).rglob("*.py")),
    ]
    hints = [
        (path.name, hint)
        for path in sources
        # Some of its examples are for people.
        if path.name != "admin.py"
        for hint in re.findall(r"sweep invalidate [^\n]*--where[^\n]*", path.read_text())
    ]
    assert len(hints) >= 5
    assert [hint for hint in hints if "--yes" not in hint[1]] == []
