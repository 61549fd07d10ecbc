"""Reads one key of a section with values at its bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError


def check_bounds(
    section: type[BaseModel],
    name: str,
    *,
    taken: Iterable[object],
    refused: Iterable[object],
    others: Mapping[str, object] | None = None,
) -> None:
    """Check which values a key takes, and that a refusal names the key."""
    rest = dict(others or {})
    for value in taken:
        found: Any = getattr(section.model_validate({**rest, name: value}), name)
        assert found == (tuple(value) if isinstance(value, list) else value)
    for value in refused:
        with pytest.raises(ValidationError) as caught:
            section.model_validate({**rest, name: value})
        assert {error["loc"][0] for error in caught.value.errors()} == {name}, value
