"""Secrets are removed from text in every likely form, and ordinary words stay."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.node_report import NodeReport, RankOutcome
from orchestrator.core.trial.protocol import RankResult
from orchestrator.core.trial.redaction import MASK, Secrets, SecretStream, redacted

SECRET = "pä ss/w@rd+1-c4nary"
TOKEN = "hf_aB3dE6gH9jK"


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        json.dumps({"key": SECRET}),
        json.dumps({"key": SECRET}, ensure_ascii=False),
        repr([SECRET]),
        quote(SECRET),
        quote(SECRET, safe=""),
        quote_plus(SECRET),
        quote(SECRET, safe="").lower(),
        SECRET.encode().hex(),
        SECRET[:6] + "\n" + SECRET[6:],
        SECRET[:6] + "\r\n" + SECRET[6:],
        repr(SECRET[:6] + "\n" + SECRET[6:]),
        *(
            base64.b64encode(f"{before}{SECRET}{behind}".encode()).decode()
            for before in ("", "a", "ab")
            for behind in ("", "a", "ab")
        ),
        base64.urlsafe_b64encode(SECRET.encode()).decode(),
        base64.encodebytes(f"user:{SECRET * 4}".encode()).decode(),
    ],
)
def test_a_secret_is_found_in_every_form(form: str) -> None:
    shown = Secrets({"KEY": SECRET}).redact(f"it said: {form} and died")
    assert MASK in shown
    assert shown.startswith("it said: ") and shown.endswith(" and died")
    assert not any(part in shown for part in ("c4nary", "YzRuYXJ5", "63346e617279"))


ODD = "pä\"s's\t\\c4nary"


@pytest.mark.parametrize(
    ("value", "text", "shown"),
    [
        (ODD, json.dumps({"key": ODD}), '{"key": "***"}'),
        (ODD, json.dumps({"key": ODD}, ensure_ascii=False), '{"key": "***"}'),
        (ODD, repr([ODD]), "['***']"),
        (ODD, f"<{quote(ODD)}>", "<***>"),
        (ODD, f"<{quote(ODD, safe='').lower()}>", "<***>"),
        (ODD, f"<{ODD.encode().hex()}>", "<***>"),
        (ODD, f"<{ODD.encode().hex().upper()}>", "<***>"),
        ("a b c4nary", "<a+b+c4nary>", "<***>"),
        # For printf, and as a program decodes it.
        ("50% c4nary", "<50%% c4nary>", "<***>"),
        ("p%40 c4nary", "<p@ c4nary>", "<***>"),
    ],
)
def test_nothing_but_the_secret_is_removed(value: str, text: str, shown: str) -> None:
    assert Secrets({"KEY": value}).redact(text) == shown


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [TOKEN, f"{TOKEN}x", f"{TOKEN}xy"])
def test_in_base64_the_characters_that_encode_the_secret_alone_are_removed(
    value: str, num_before: int
) -> None:
    """They are those that do not depend on the bytes around it."""
    num_behind = -(num_before + len(value)) % 3 or 3
    low, high = (
        base64.b64encode(byte * num_before + value.encode() + byte * num_behind).decode()
        for byte in (b"\x00", b"\xff")
    )
    own = [place for place, (one, other) in enumerate(zip(low, high, strict=True)) if one == other]
    expected = f"{low[: own[0]]}***{low[own[-1] + 1 :]}"
    assert Secrets({"KEY": value}).redact(low) == expected


@pytest.mark.parametrize(
    ("value", "text", "shown"),
    [
        # One letter masks no words: only where it is a value, or the password of a URL.
        ("e", "connection refused; PW=e PW='e' \"PW\": \"e\" password=e PW=ex u:e@h", "connection "
        "refused; PW=*** PW='***' \"PW\": \"***\" password=*** PW=ex u:***@h"),
        ("x1", "x1 of x12: PW: x1", "x1 of x12: PW: ***"),
        # A short one as a word of its own.
        ("rust", "trust rust, rusty 'rust' u:rust@h rust_ok", "trust ***, rusty '***' u:***@h "
        "***_ok"),
        ("a@b#", "a%40b%23 a@b#", "*** ***"),
        # A long one everywhere.
        (TOKEN, f"x{TOKEN}y{TOKEN}", "x***y***"),
        ("", "nothing to hide", "nothing to hide"),
    ],
)  # fmt: skip
def test_the_shorter_a_value_the_more_must_speak_for_it(value: str, text: str, shown: str) -> None:
    assert Secrets({"PW": value}).redact(text) == shown


def test_each_line_of_a_key_is_a_secret() -> None:
    key = "-----BEGIN KEY-----\nMIIEowIBAAKCAQEA\nq83vEjRWeJ0BI0Vn\n-----END KEY-----"
    assert (
        Secrets({"KEY": key}).redact("read q83vEjRWeJ0BI0Vn, then MIIEowIBAAKCAQEA")
        == "read ***, then ***"
    )


TEXT = (
    f"héllo {TOKEN} world\ncan {TOKEN[:5]}\n{TOKEN[5:]} rust trust K=e L='rust'\r\n hf_ "
    f"hf_aB{TOKEN} end abababababababababab abababa\nbab hf_aB3"
).encode()


@given(
    cuts=st.lists(st.integers(0, len(TEXT)), max_size=12),
    values=st.sampled_from(
        [(TOKEN,), (TOKEN, "rust"), (TOKEN, "rust", "e"), ("rust",), ("ababababa", TOKEN)]
    ),
)
def test_a_stream_in_pieces_reads_as_the_whole(cuts: list[int], values: tuple[str, ...]) -> None:
    secrets = Secrets(dict(zip("TLK", values, strict=False)))
    stream = SecretStream(secrets)
    places = [0, *sorted(cuts), len(TEXT)]
    said = (
        b"".join(stream.take(TEXT[start:end]) for start, end in pairwise(places)) + stream.close()
    )
    assert said == secrets.redact_bytes(TEXT)


def test_what_cannot_become_a_secret_is_not_held_back() -> None:
    stream = SecretStream(Secrets({"TOKEN": TOKEN}))
    assert stream.take(b"step 1 of 10\n") == b"step 1 of 10\n"
    assert stream.take(b"loading hf") == b"loading "
    assert stream.take(b"_datasets") == b"hf_datasets"


def test_a_secret_that_has_come_whole_is_not_held_back() -> None:
    stream = SecretStream(Secrets({"TOKEN": TOKEN}))
    assert stream.take(TOKEN.encode()) == b"***"
    assert stream.take(f"; {TOKEN}; done".encode()) == b"; ***; done"


def test_a_word_is_a_secret_once_the_next_character_is_none_of_a_word() -> None:
    secrets = Secrets({"PW": "rust", "TOKEN": TOKEN})
    for behind, shown in ((b"y", b"rusty"), (b".", b"***.")):
        stream = SecretStream(secrets)
        assert stream.take(b"no rust") == b"no "
        assert stream.take(behind) == shown
    # The next one is held back since it may begin the other secret.
    stream = SecretStream(secrets)
    assert stream.take(b"rusth") + stream.take(b"y") == b"rusthy"


@pytest.mark.parametrize("line_break", ["\r\n", "\n", "\\n", "\\r\\n"])
def test_a_secret_with_a_line_break_behind_each_character_is_held_back_whole(
    line_break: str,
) -> None:
    """Wherever a piece ends: in an escaped line break as well."""
    broken = line_break.join(TOKEN).encode()
    for end in range(1, len(broken)):
        stream = SecretStream(Secrets({"TOKEN": TOKEN}))
        assert stream.take(broken[:end]) == b""
        assert stream.take(broken[end:]) == b"***"


def test_a_secret_is_not_cut_where_another_may_begin() -> None:
    """The last four characters of the one are the first of the other."""
    one, other = "Xk3mPq9vLw2z7Rt5", "7Rt5Hn8cYb4dFg6s"
    stream = SecretStream(Secrets({"ONE": one, "OTHER": other}))
    assert stream.take(f"it is {one}".encode()) == b"it is "
    assert stream.take(b" and no more") == b"*** and no more"


def test_every_text_of_a_report_is_redacted_and_nothing_else_changes() -> None:
    result = RankResult(
        step_seconds=[1.0],
        peak_flops=1e12,
        peak_flops_source=f"measured: {TOKEN}",
        memory_bytes_by_part={TOKEN: 1},
    )
    failure = Failure(
        kind=FailureKind.USER_ERROR,
        message=f"401 {TOKEN}",
        node="host",
        evidence=TOKEN,
        log_tail=f"... {TOKEN}",
    )
    outcome = RankOutcome(
        rank=0, result=result, bad_result=TOKEN, log_path=f"/home/{TOKEN}/log-0.txt", log_tail=TOKEN
    )
    report = NodeReport(
        node="host",
        ranks=(outcome,),
        failure=failure,
        environment={"NCCL_X": TOKEN},
        set_by_launcher=(TOKEN,),
    )
    clean = redacted(report, Secrets({"TOKEN": TOKEN}), but=frozenset({"node", "log_path"}))
    assert TOKEN not in repr(clean).replace(f"/home/{TOKEN}/log-0.txt", "")
    assert clean.ranks[0].log_path == outcome.log_path
    assert (
        clean.failure is not None
        and clean.failure.kind is FailureKind.USER_ERROR
        and clean.failure.message == "401 ***"
    )
    assert clean.ranks[0].result is not None and clean.ranks[0].result.step_seconds == [1.0]
    assert redacted(report, Secrets({})) is report


def test_a_text_never_becomes_longer_so_that_its_bounds_hold() -> None:
    assert redacted("K=e", Secrets({"K": "e"})) == "K=*"


@pytest.mark.parametrize(
    ("value", "in_a_word", "is_held"),
    [
        ("abc", "abc", True),  # three characters need their name
        ("abcd", "***", False),  # four are a word
        ("abcdefg", "***", False),
        ("abcdefgh", "***", False),
    ],
)
def test_a_value_is_judged_by_its_length(value: str, in_a_word: str, is_held: bool) -> None:
    secrets = Secrets({"PW": value})
    assert secrets.redact(f"({value})") == f"({in_a_word})"
    everywhere = len(value) >= 8
    assert secrets.redact(f"x{value}x") == ("x***x" if everywhere else f"x{value}x")
    # The end of a line shows whether the line names it.
    assert SecretStream(secrets).take(b"step 1 of 2.") == (b"" if is_held else b"step 1 of 2.")


def test_a_line_of_a_key_is_a_secret_from_eight_characters_on() -> None:
    secrets = Secrets({"KEY": "-----BEGIN-----\n12345678\n1234567"})
    assert secrets.redact("a 12345678 b") == "a *** b"
    assert secrets.redact("a 1234567 b") == "a 1234567 b"


def test_a_line_without_an_end_is_held_back_up_to_64_kib() -> None:
    """Three characters are a secret behind their name, which may be anywhere in the line."""
    stream = SecretStream(Secrets({"PW": "abc"}))
    assert stream.take(b"." * 65_536) == b""
    assert stream.take(b".") == b"."
    assert stream.close() == b"." * 65_536


def test_an_empty_value_is_no_secret_and_holds_nothing_back() -> None:
    secrets = Secrets({"PW": "", "TOKEN": TOKEN})
    assert SecretStream(secrets).take(b"step 1 of 2.") == b"step 1 of 2."
