"""What goes to stderr while a command runs: log lines for people or machines, and no secret in any of them."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from urllib.parse import unquote

from orchestrator.cli.output import plain

_URL_PASSWORD = re.compile(r"(?P<before>[a-z][a-z0-9+.-]*://[^\s:/@'\"]*):(?P<password>[^\s'\"]+)@", re.IGNORECASE)
_QUERY_PASSWORD = re.compile(r"(?P<before>[?&;\s]\w*pass\w*=)(?P<password>[^&;\s'\"]+)", re.IGNORECASE)
_SHORTEST_SECRET = 4  # a shorter one would blot out ordinary words wherever it occurs; the patterns above still catch it in its URL


PROJECT_LOGGERS = ("orchestrator", "db")
# A connection that breaks is told by the store, in a line; these would show a traceback each time.
SILENT_LOGGERS = ("sqlalchemy", "psycopg")


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class Redactor:
    """Takes passwords of database URLs out of text: wherever a URL stands, and wherever one that was given turns up without it."""

    def __init__(self, sources: Sequence[str]) -> None:
        """`sources`: what may hold such a URL: the arguments of the command, values of the environment."""
        found = [match["password"] for text in sources for pattern in (_URL_PASSWORD, _QUERY_PASSWORD) for match in pattern.finditer(text)]
        forms = {form for password in found for form in (password, unquote(password), password.replace("%", "%%"))}
        self._secrets = sorted((form for form in forms if len(form) >= _SHORTEST_SECRET), key=len, reverse=True)

    @classmethod
    def of_this_process(cls, arguments: Sequence[str]) -> Redactor:
        return cls([*arguments, *os.environ.values()])

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return _QUERY_PASSWORD.sub(r"\g<before>***", _URL_PASSWORD.sub(r"\g<before>:***@", text))


def configure_logging(*, verbosity: int, log_format: LogFormat, redact: Redactor) -> None:
    """Send the project's log to stderr: errors (-1 and less), warnings (0), what changed (1), how (2 and more)."""
    handler = _Stderr()
    handler.setFormatter(_JsonLines(redact) if log_format is LogFormat.JSON else _PlainLines(redact))
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG if verbosity > 0 else logging.ERROR)
    for name in PROJECT_LOGGERS:  # other packages' chatter is not ours to show
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
    for name in SILENT_LOGGERS:
        logging.getLogger(name).handlers[:] = [logging.NullHandler()]


class _Stderr(logging.Handler):
    """Writes to whatever sys.stderr is by then: a progress display may have put itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # stderr is gone; nobody can be told
            self.handleError(record)


class _PlainLines(logging.Formatter):
    def __init__(self, redact: Redactor) -> None:
        super().__init__()
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        at = datetime.fromtimestamp(record.created)
        return f"{at:%H:%M:%S} {record.levelname.lower():<7} {plain(self._redact(record.getMessage() + trace), lines=True)}"


class _JsonLines(logging.Formatter):
    def __init__(self, redact: Redactor) -> None:
        super().__init__()
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return self._redact(json.dumps(line, default=str))


_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
