"""A database of another program, such as Optuna's: its errors, as one line for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError

from orchestrator.core.errors import UsageInvalid


@contextmanager
def errors_in_one_line(what: str, *, example: str) -> Iterator[None]:
    """Raise UsageInvalid for an error of the database or a missing driver, without the URL.

    The URL may hold a password. `what` is the thing to be written, `example` a URL that works.
    """
    try:
        yield
    except (SQLAlchemyError, ImportError) as exc:
        cause = str(getattr(exc, "orig", None) or exc).splitlines()[0]
        raise UsageInvalid(
            f"no {what} can be written there: {cause}. Expected a URL such as {example}"
        ) from exc
