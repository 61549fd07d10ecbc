"""The log lines that a command writes to stderr, for people or as JSON, without secrets."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from urllib.parse import unquote

from orchestrator.cli.terminal.output import plain, shortened
from orchestrator.core.trial.rank_environment import secret_values
from orchestrator.core.trial.redaction import Secrets

# Each repetition is bounded, so that an argument of 100 kB takes milliseconds, not minutes.
_URL_PASSWORD = re.compile(
    r"(?P<before>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,31}://[^\s:/@'\"]{0,255})"
    r":(?P<password>[^\s'\"]{1,1024})@",
    re.IGNORECASE,
)
_QUERY_PASSWORD = re.compile(
    r"(?P<before>(?:^|[?&;\s])\w{0,32}(?:pass\w{0,32}|pwd)=['\"]?)"
    r"(?P<password>[^&;\s'\"]{1,1024})",
    re.IGNORECASE,
)
PROJECT_LOGGERS = ("orchestrator", "db")
# The store reports a broken connection in one line; these would show a traceback each time.
# uvicorn logs every invalid request.
SILENCED_LOGGERS = ("sqlalchemy", "psycopg", "uvicorn")


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class Redactor:
    """Replaces secrets in text: the password of any URL, and all values known to be secret."""

    def __init__(
        self, sources: Sequence[str], *, values: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`sources` are texts that may hold a database's URL; `values` are secrets by name."""
        found = [
            match["password"]
            for text in sources
            for pattern in (_URL_PASSWORD, _QUERY_PASSWORD)
            for match in pattern.finditer(text)
        ]
        forms = dict.fromkeys(form for password in found for form in (password, unquote(password)))
        self._values = dict(values) | {
            f"password {number}": form for number, form in enumerate(forms)
        }
        self._secrets = Secrets(self._values)

    @classmethod
    def of_this_process(cls, arguments: Sequence[str]) -> Redactor:
        return cls([*arguments, *os.environ.values()], values=secret_values(os.environ))

    def add_values(self, values: Mapping[str, str]) -> None:
        """Also replace these values from now on."""
        self._values |= values
        self._secrets = Secrets(self._values)

    def __call__(self, text: str) -> str:
        text = self._secrets.redact(text)
        return _QUERY_PASSWORD.sub(r"\g<before>***", _URL_PASSWORD.sub(r"\g<before>:***@", text))


def configure_logging(*, verbosity: int, log_format: LogFormat, redact: Redactor) -> None:
    """Send the project's log to stderr.

    Verbosity -1 and less shows errors, 0 warnings, 1 changes of state, 2 and more all details.
    """
    handler = _StderrHandler()
    formatter = _JsonLines if log_format is LogFormat.JSON else _PlainLines
    handler.setFormatter(formatter(redact))
    levels = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
    level = levels[min(max(verbosity, -1), 2) + 1]
    # Log lines of other packages are not shown.
    for name in PROJECT_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
    for name in SILENCED_LOGGERS:
        logging.getLogger(name).handlers[:] = [logging.NullHandler()]


class _StderrHandler(logging.Handler):
    """Writes to the current sys.stderr, which a progress display may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # stderr is gone
            self.handleError(record)


class _PlainLines(logging.Formatter):
    def __init__(self, redact: Redactor) -> None:
        super().__init__()
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        at = datetime.fromtimestamp(record.created)
        text = shortened(plain(self._redact(record.getMessage() + trace), lines=True))
        return f"{at:%H:%M:%S} {record.levelname.lower():<7} {text}"


class _JsonLines(_PlainLines):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, tz=UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {
            name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return self._redact(json.dumps(line, default=str))


_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
