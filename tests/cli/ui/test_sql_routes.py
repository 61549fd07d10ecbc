"""Questions in SQL from a page: answered, bounded, and as read-only as `sweep sql`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.cli.ui import sql_routes
from orchestrator.cli.ui.own_command import Done
from tests.cli.cli_store import Filled, fill
from tests.cli.forked_commands import ForkedCommands, forked_commands
from tests.cli.ui.served import Visitor, served


@pytest.fixture(scope="module")
def commands() -> Iterator[ForkedCommands]:
    with forked_commands() as found:
        yield found


@pytest.fixture
def forked(commands: ForkedCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the page fork `sweep sql`, which otherwise takes a second of imports."""

    async def run(
        module: str, arguments: Sequence[str], *, db: str | None, most_bytes: int
    ) -> Done:
        assert module == "orchestrator.cli" and db is not None
        done = await asyncio.to_thread(commands.run, arguments, {"SWEEP_DB": db})
        output = done.out.encode()
        assert len(output) <= most_bytes
        return Done(exit_code=done.exit_code, output=output, is_cut=False)

    monkeypatch.setattr(sql_routes, "run_command", run)


def test_a_statement_is_answered_with_hostile_text_as_text(visitor: Visitor, shown: Filled) -> None:
    answer = visitor.form(
        "/sql",
        statement="select trial_id, failure_message, null as unknown from v_failure order by 1",
    )
    assert answer.status == 200 and '<table id="answer">' in answer.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in answer.text
    assert "<td>-</td>" in answer.text and "<script>alert" not in answer.text
    assert not set(answer.text) & set("\x1b\x9b\x07\u202e")


def test_a_named_query_is_about_the_sweep_of_the_page(visitor: Visitor, shown: Filled) -> None:
    page = visitor.get("/sql?statement=@best")
    assert ">@best</textarea>" in page.text and "<table id" not in page.text
    answer = visitor.form("/sql", statement="@best", values="")
    assert answer.status == 200 and '<table id="answer">' in answer.text
    refused = visitor.form("/sql", statement="@cheapest", values="within=much")
    assert refused.status == 422 and "is not a number" in refused.text


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("delete from trial", "only reading is possible"),
        ("select 1; drop table trial", "more than one statement"),
        ("attach database '/etc/passwd' as x", "only reading is possible"),
        ("select load_extension('x')", "not authorized"),
        ("select * from v_bets", "did you mean v_best"),
        ("--help", ""),
        ("-- @best", ""),
        ("@nothing", "no query is named"),
        ("   ", "Write a statement"),
    ],
)
def test_what_only_changes_or_is_wrong_is_refused_in_words(
    visitor: Visitor, forked: None, shown_url: str, statement: str, said: str
) -> None:
    answer = visitor.form("/sql", statement=statement)
    assert answer.status in (200, 422) and said in answer.text
    assert "Traceback" not in answer.text and "usage" not in answer.text.lower()
    with Store.open(shown_url, to_read=True) as store:
        assert len(store.sweeps()) == 2


def test_a_large_answer_is_cut(visitor: Visitor) -> None:
    series = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 2000)"
    answer = visitor.form("/sql", statement=f"{series} select i from n")
    assert answer.text.count("<tr>") == 501 and "Only the first 500 rows" in answer.text
    wide = visitor.form(
        "/sql", statement=f"{series} select replace(printf('%5000d', i), ' ', 'x') from n limit 450"
    )
    assert wide.status == 422 and "more than 2 MB" in wide.text


def test_a_store_on_postgresql_is_asked_in_the_same_way(
    postgresql_url: str, tmp_path: Path
) -> None:
    with Store.open(postgresql_url) as store:
        found = fill(store, tmp_path)
    with served(postgresql_url) as visitor:
        visitor.enter()
        assert f'href="trial/{found.measured}"' in visitor.get("/").text
        assert visitor.get(f"/trial/{found.failed}").status == 200
        assert '<table id="answer">' in visitor.form("/sql", statement="@best").text
        counted = visitor.form("/sql", statement="select count(*) from v_trial")
        assert "<td>10</td>" in counted.text
        refused = visitor.form("/sql", statement="delete from trial")
        assert refused.status == 422 and "only reading is possible" in refused.text
