"""Questions in SQL from a page: answered, bounded, and as read-only as `sweep sql`."""

from __future__ import annotations

from pathlib import Path

import pytest

from db.store import Store
from tests.cli.cli_store import Filled, fill
from tests.cli.ui.served import Visitor, served


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
    visitor: Visitor, shown_url: str, statement: str, said: str
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
