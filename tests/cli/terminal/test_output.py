"""What commands write: no secret, and nothing that a terminal or a spreadsheet would obey."""

from __future__ import annotations

import csv
import io
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import cli
from orchestrator.cli.best import command as best
from orchestrator.cli.terminal.console_log import LogFormat, Redactor, configure_logging
from orchestrator.cli.terminal.output import (
    Column,
    Format,
    StyledText,
    csv_text,
    output_format,
    plain,
    shortened,
    write_rows,
    write_table,
)
from orchestrator.core.errors import SweepInUse, UsageInvalid
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report.json_text import json_text
from tests.cli.cli_store import HOSTILE
from tests.kept_loggers import kept_loggers

CANARY = "c4nary%Secret"


@pytest.fixture(autouse=True)
def _loggers() -> Iterator[None]:
    with kept_loggers():
        yield


def test_a_long_word_and_a_long_line_of_a_message_are_cut_in_the_middle_and_others_stay() -> None:
    text = shortened(
        "short\nno file " + "a" * 20_000 + "z" * 8_000 + "\n" + "word " * 5_000 + "\nthe rule"
    )
    first, word, line, last = text.split("\n")
    assert (first, last) == ("short", "the rule")
    assert word.startswith("no file aaa")
    assert word.endswith("zzz")
    assert "characters] ..." in word
    assert len(word) < 255
    assert line.startswith("word ")
    assert "characters] ..." in line
    assert 700 < len(line) < 1_000
    for stays in ("x" * 255, "word " * 200):
        assert shortened(stays) == stays


def test_an_argument_of_100_kb_is_searched_for_passwords_at_once() -> None:
    for long in (
        "x" * 100_000,
        "x:" * 50_000,
        "x://a:" * 16_000,
        "?" + "pass" * 25_000,
        " pass" * 20_000,
    ):
        # The thread's own time: what others do on the machine does not count.
        began = time.thread_time()
        assert Redactor([long])(long)
        # Milliseconds to half a second; it took minutes.
        assert time.thread_time() - began < 5.0


def test_secrets_of_the_environment_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    redact = Redactor.of_this_process([])
    redact.add_values({"MINE": "another-one"})
    assert redact(f"a {CANARY} b another-one c") == "a *** b *** c"
    assert (
        Redactor(["password='hunter2x' host=h"])("hunter2x, host=h password=hunter3 ")
        == "***, host=h password=*** "
    )


@given(
    st.text(
        st.sampled_from(list("\x1b\x9b\x9d\x07[]0;m2J\\Pab\r\n\t\u202e\u200f\x00\x7f")), max_size=30
    )
)
def test_no_control_character_is_left_in_plain_text(text: str) -> None:
    kept = plain(text, lines=True)
    assert all(
        character == "\n" or (character.isprintable() and character not in "\u202e\u200f")
        for character in kept
    )
    assert "\n" not in plain(text)


def test_escape_sequences_go_with_their_arguments() -> None:
    assert (
        plain(
            "\x1b[31mred\x1b[0m \x1b]0;title\x07rest \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\"
            " \x9b2Jend \x1bcreset"
        )
        == "red rest link end reset"
    )


def test_a_table_shows_markup_in_data_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(
        [Column("[red]a[/nope]", wrap=True)],
        [[HOSTILE], [StyledText("[/bold]", "green")]],
    )
    out = capsys.readouterr().out
    assert "[/bold] [link=x]y" in out
    assert "[red]a[/nope]" in out
    assert "\x1b" not in out


def test_a_narrow_terminal_loses_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = [Column(f"number {i}", right=True) for i in range(6)]
    write_table(
        [*columns, Column("layout", wrap=True)],
        [[*(f"{i},234,567" for i in range(6)), "dp8 mbs2 ga4 selective_ops bf16"]],
    )
    out = capsys.readouterr().out
    assert all(f"{i},234,567" in out for i in range(6))
    assert "layout" in out
    assert "…" not in out


def test_csv_keeps_numbers_and_disarms_formulas() -> None:
    cells = [
        -1.5,
        -3,
        "=cmd()",
        "+1",
        "@x",
        " =x",
        "\x00=y",
        "-5",
        "-dash",
        None,
        True,
        {"a": [1]},
        "two\nlines",
    ]
    rows = list(csv.reader(io.StringIO(csv_text(["=name"], [cells]))))
    assert rows[0] == ["'=name"]
    assert rows[1] == [
        "-1.5",
        "-3",
        "'=cmd()",
        "+1",
        "'@x",
        "' =x",
        "'=y",
        "-5",
        "'-dash",
        "",
        "true",
        '{"a": [1]}',
        "two\nlines",
    ]


def test_markdown_cells_cannot_leave_their_column(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Format.MD, ["a", "b"], [["x | y\nz", "<b>`code`"]])
    assert capsys.readouterr().out.splitlines()[2] == "| x \\| y z | &lt;b&gt;\\`code\\` |"


def test_json_has_neither_nan_nor_raw_escapes_and_times_are_utc() -> None:
    text = json_text(
        {
            "a": float("nan"),
            "b": "\x1b[2J",
            "c": datetime(2026, 1, 2, tzinfo=UTC),
            "d": TrialState.FAILED,
            TrialState.QUEUED: 1,
        }
    )
    assert "\x1b" not in text
    assert json.loads(text) == {
        "a": None,
        "b": "\x1b[2J",
        "c": "2026-01-02T00:00:00Z",
        "d": "failed",
        "queued": 1,
    }


def test_json_and_another_format_contradict_each_other() -> None:
    assert output_format(None, as_json=False) is Format.TABLE
    assert output_format(Format.JSON, as_json=True) is Format.JSON
    with pytest.raises(UsageInvalid, match="contradict"):
        output_format(Format.CSV, as_json=True)


@pytest.mark.parametrize(
    "text",
    [
        f"connecting to postgresql://me:{CANARY}@host/db failed",
        f'invalid percent-encoded token: "{CANARY}"',
        f"postgresql://host/db?sslpassword={CANARY}&x=1",
        f"password={CANARY} host=h",
        "secret c4narySecret said decoded",
    ],
)
def test_a_password_is_taken_out_wherever_it_stands(text: str) -> None:
    redact = Redactor(
        ["--db", f"postgresql://me:{CANARY}@host/db", "postgresql://me:c4narySecret@host/db"]
    )
    assert "Secret" not in redact(text)
    assert "***" in redact(text)


def test_a_log_line_is_one_json_object_with_its_extra_fields_and_no_secret(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(
        verbosity=1,
        log_format=LogFormat.JSON,
        redact=Redactor([f"postgresql://me:{CANARY}@host/db"]),
    )
    logging.getLogger("orchestrator.test").info(
        "measured %s %s", HOSTILE, CANARY, extra={"action": "measured", "trial_id": 3}
    )
    logging.getLogger("orchestrator.test").debug("not shown")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert (line["action"], line["trial_id"], line["level"]) == ("measured", 3, "info")
    assert CANARY not in lines[0]
    assert "\x1b" not in lines[0]


def test_what_a_driver_says_of_a_lost_connection_is_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(verbosity=0, log_format=LogFormat.TEXT, redact=Redactor([]))
    try:
        raise OSError("the connection is lost")
    except OSError:
        logging.getLogger("sqlalchemy.pool.impl.QueuePool").error(
            "Exception during reset or similar", exc_info=True
        )
    logging.getLogger("psycopg").warning("error ignored terminating")
    assert capsys.readouterr().err == ""


def test_a_plain_log_line_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(verbosity=0, log_format=LogFormat.TEXT, redact=Redactor([]))
    logging.getLogger("db.test").warning(HOSTILE)
    logging.getLogger("db.test").info("not shown")
    err = capsys.readouterr().err
    assert "warning" in err
    assert "not shown" not in err
    assert "\x1b" not in err


def test_a_foreseen_error_is_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def held(*_: object) -> object:
        raise SweepInUse("sweep 'tiny' is held by \x1b[31mhost a")

    monkeypatch.setattr(best, "existing_store", held)
    assert cli.main(["best"]) == 5
    assert capsys.readouterr().err == "error: sweep 'tiny' is held by host a\n"


def test_an_unforeseen_error_is_one_line_and_a_saved_traceback_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError(f"could not open {CANARY}\nsecond line")

    monkeypatch.setattr(best, "existing_store", broken)
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SWEEP_DB", f"postgresql://me:{CANARY}@host/db")
    assert cli.main(["best"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: unexpected RuntimeError: could not open *** ")
    assert captured.err.count("\n") == 1
    (saved,) = (tmp_path / "home").glob("traceback-*.txt")
    assert str(saved) in captured.err
    assert "in broken" in saved.read_text()
    assert CANARY not in saved.read_text()
    assert saved.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(best, "existing_store", interrupted)
    assert cli.main(["best"]) == 130


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["statsu"], "Did you mean 'status'"),
        (["best", "--top", "0"], "'0' should be greater than or equal to 1"),
        (["best", "--json", "--format", "csv"], "contradict"),
        (["trials", "--state", "fialed"], "did you mean failed?"),
        (["run"], "FILE"),
        (["show"], "TRIAL"),
        (["show", "x"], "'TRIAL': 'x' should be a valid integer; see sweep show"),
        (["--db", "x", "status"], "--db; options of a command follow its name; see sweep --help"),
        (["sql"], "give one statement"),
        (["status", "--watch", "--json"], "--watch"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert bool(captured.out) == ("--json" in arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["best", "--json"],
        ["best", "--format", "json"],
        ["best", "--format=json"],
        ["statsu", "--json"],
        ["show", "x", "--json"],
        ["sql", "--json"],
        ["export", "csv", "--json"],
        ["cancel", "--json"],
        ["invalidate", "--where", "true", "--json"],
        ["db", "upgrade", "--db", "nothing://x", "--json"],
        ["plan", "nothing.yaml", "--json"],
        ["run", "nothing.yaml", "--json"],
        ["validate", "nothing.yaml", "--json"],
    ],
)
def test_who_asks_for_json_is_told_of_an_error_in_json(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SWEEP_DB", raising=False)
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert (error["kind"], error["exit_code"]) == ("usage_invalid", 2)
    assert err == f"error: {error['message']}\n"


def test_a_mistake_in_a_sweep_file_a_bug_and_ctrl_c_are_told_in_json_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    (tmp_path / "s.yaml").write_text("name: s\n")

    def ends_with(exc: BaseException) -> dict[str, object]:
        def ended(*_: object) -> object:
            raise exc

        monkeypatch.setattr(best, "existing_store", ended)
        code = cli.main(["best", "--json"])
        error: dict[str, object] = json.loads(capsys.readouterr().out)["error"]
        assert error["exit_code"] == code
        return error

    assert cli.main(["validate", str(tmp_path / "s.yaml"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "spec_invalid"
    assert ends_with(SweepInUse("held by a"))["kind"] == "sweep_in_use"
    assert ends_with(KeyboardInterrupt())["kind"] == "interrupted"
    assert ends_with(RuntimeError("\x1b[31mno"))["kind"] == "bug"


def test_a_word_after_two_dashes_asks_for_no_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["best", "--db", f"sqlite:///{tmp_path}/none.sqlite", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_logging_options_are_taken_before_and_after_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = f"sqlite:///{tmp_path}/none.sqlite"
    assert cli.main(["-v", "best", "--db", missing]) == 2
    assert cli.main(["best", "-vv", "--db", missing, "--log-format=json"]) == 2
    assert logging.getLogger("orchestrator").level == logging.DEBUG
    assert cli.main(["best", "--log-format", "xml"]) == 2
    assert "--log-format" in capsys.readouterr().err


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out.split("Commands:")[1].split("Examples:")[0]
    commands = [
        line.split()[0] for line in listed.splitlines() if line[:2] == "  " and line[2:3].strip()
    ]
    assert {
        "status",
        "best",
        "trials",
        "show",
        "logs",
        "sql",
        "export",
        "cancel",
        "invalidate",
        "doctor",
        "db",
        "run",
    } <= set(commands)
    for command in commands:
        assert cli.main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert command == "db" or "Example" in text, command


def test_every_line_of_the_list_of_commands_is_a_whole_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out.split("Commands:")[1].split("Examples:")[0]
    assert "..." not in listed


def test_a_sweep_file_that_is_not_there_has_a_neighbour(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").touch()
    assert cli.main(["validate", "quickstrat.yaml"]) == 2
    assert "did you mean quickstart.yaml?" in capsys.readouterr().err


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("sweep ")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from orchestrator.cli import main; main(['--help']);"
        "heavy = 'sqlalchemy ray optuna numpy torch pydantic alembic rich.table'.split();"
        "print(sorted({*heavy} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_passed_over_in_silence(tmp_path: Path) -> None:
    # 20,000 lines do not fit into a pipe: the program is still writing when the reader is gone.
    program = (
        "import sys; from orchestrator.cli import main, app\n"
        "from orchestrator.cli.terminal.output import write\n"
        "@app.command()\ndef talk() -> None:\n    for _ in range(20000): write('line')\n"
        "sys.exit(main(['talk']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=30) == 141
