"""What a person asks for on a page: a question first, then the same change as by the command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from db.store import Store
from tests.acceptance.command import CommandHere, write_sweep
from tests.cli.ui.served import Visitor, served
from tests.db.builders import Bench


@pytest.fixture
def command(tmp_path: Path, sqlite_url: str) -> CommandHere:
    return CommandHere(tmp_path, sqlite_url)


@pytest.mark.parametrize(
    ("action", "request_name", "said"),
    [
        ("drain", "drain", "running trials may finish"),
        ("cancel", "cancel", "running trials are ended"),
    ],
)
def test_a_sweep_is_stopped_after_a_question(
    either_store: Store, store_url: str, action: str, request_name: str, said: str
) -> None:
    Bench.on(either_store)
    with served(store_url) as visitor:
        visitor.enter()
        question = visitor.get(f"/{action}").text
        assert f'<form class="actions" action="{action}" method="post">' in question
        assert either_store.sweep_named("tiny").stop_requested is None
        answer = visitor.form(f"/{action}")
        assert answer.status == 200 and said in answer.text
    assert str(either_store.sweep_named("tiny").stop_requested) == request_name


def test_a_trial_is_measured_again(either_store: Store, store_url: str) -> None:
    bench = Bench.on(either_store)
    trial = bench.measure(1)
    either_store.release(bench.sweep_id, bench.epoch)
    with served(store_url) as visitor:
        visitor.enter()
        question = visitor.get(f"/retry?trial={trial}").text
        assert f"Measure trial {trial} again?" in question and f'value="{trial}"' in question
        assert "will be measured again" in visitor.form("/retry", trial=str(trial)).text
        assert either_store.trial(trial).trial.state == "queued"
        again = visitor.form("/retry", trial=str(trial))
        assert "nothing was changed" in again.text


def test_a_layout_is_enqueued_and_an_illegal_one_refused(
    command: CommandHere, tmp_path: Path, sqlite_url: str
) -> None:
    axes = {"micro_batch_size": [1, 2], "recompute": ["none", "full"]}
    search = {"max_trials": 1, "confirm": {"repeats": 0}}
    command.ok("run", write_sweep(tmp_path, axes=axes, search=search), "--simulate")
    ((tried,),) = command.sql("select micro_batch_size from v_trial")
    with served(sqlite_url, "t-simulated") as visitor:
        visitor.enter()
        cell = re.findall(r"<option>([^<]+)</option>", visitor.get("/").text)[0]
        question = visitor.get(f"/enqueue?layout=mbs%3D{3 - tried}+recompute%3Dfull&cell={cell}")
        assert f"mbs={3 - tried} recompute=full in {cell}" in question.text
        answer = visitor.form("/enqueue", layout=f"mbs={3 - tried} recompute=full", cell=cell)
        assert answer.status == 200 and "Asked for trial 2" in answer.text
        refused = visitor.form("/enqueue", layout="mbs=3", cell=cell)
        assert refused.status == 409 and "is not legal" in refused.text
        unknown = visitor.form("/enqueue", layout="mbs=1", cell="9gpu")
        assert unknown.status == 409 and "contains it" in unknown.text
    assert command.sql("select state from v_trial where trial_id = 2") == [["queued"]]


def test_a_question_with_markup_is_shown_as_text(visitor: Visitor) -> None:
    page = visitor.get("/enqueue?layout=%3Cscript%3Ealert(1)%3C/script%3E%60&cell=%22x%3D")
    assert page.status == 200 and "<script>alert" not in page.text
    assert "&lt;script&gt;alert(1)" in page.text


def test_a_form_of_another_session_changes_nothing(sqlite_store: Store, sqlite_url: str) -> None:
    Bench.on(sqlite_store)
    with served(sqlite_url) as visitor:
        visitor.enter()
        other = Visitor(visitor.port)
        other.enter()
        assert visitor.csrf != other.csrf
        visitor.csrf = other.csrf
        assert visitor.form("/cancel").status == 403
    assert sqlite_store.sweep_named("tiny").stop_requested is None
