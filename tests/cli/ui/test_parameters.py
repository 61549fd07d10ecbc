"""Parameters are read strictly: known names, once each, short, UTF-8, no control characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.ui.parameters import number, parameters
from orchestrator.cli.ui.refusal import Refusal

ALLOWED = {"a": 5, "b": 5}


def test_parameters_are_decoded() -> None:
    assert parameters(b"", ALLOWED) == {}
    assert parameters(b"a=1&b=%C3%A9+x", ALLOWED) == {"a": "1", "b": "é x"}
    assert parameters(b"a&b=x=y", ALLOWED) == {"a": "", "b": "x=y"}


@pytest.mark.parametrize(
    "encoded",
    [b"c=1", b"a=1&a=1", b"a=%ff", b"a=%zz", b"a=%", b"a=123456", b"a=%00", b"a=%1b", b"&", b"=1"],
)
def test_what_is_not_expected_is_refused(encoded: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        parameters(encoded, ALLOWED)
    assert caught.value.status in (400, 413)


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(encoded: bytes) -> None:
    try:
        found = parameters(encoded, ALLOWED)
    except Refusal:
        return
    assert set(found) <= set(ALLOWED)


@pytest.mark.parametrize("text", ["", "-1", "1.0", "١", "1e3", " 1", "9" * 13])
def test_only_a_number_is_a_number(text: str) -> None:
    assert number("0017") == 17
    with pytest.raises(Refusal):
        number(text)
