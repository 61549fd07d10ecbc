"""What goes to stderr while a command runs: log lines for people or machines, and no secret in any of them."""

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

from orchestrator.cli.output import plain, shortened
from orchestrator.core.trial.rank_environment import secret_values
from orchestrator.core.trial.redaction import Secrets

# Each repetition is bounded: an argument of 100 kB takes milliseconds, not minutes.
_URL_PASSWORD = re.compile(
    r"(?P<before>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,31}://[^\s:/@'\"]{0,255}):(?P<password>[^\s'\"]{1,1024})@",
    re.IGNORECASE,
)
_QUERY_PASSWORD = re.compile(
    r"(?P<before>(?:^|[?&;\s])\w{0,32}(?:pass\w{0,32}|pwd)=['\"]?)(?P<password>[^&;\s'\"]{1,1024})",
    re.IGNORECASE,
)
PROJECT_LOGGERS = ("orchestrator", "db")
# A connection that breaks is told by the store, in a line; these would show a traceback each time.
SILENT_LOGGERS = ("sqlalchemy", "psycopg")


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class Redactor:
    """Takes secrets out of text: the password of any URL, and values known to be secret wherever they turn up."""

    def __init__(
        self, sources: Sequence[str], *, values: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`sources`: what may hold a database's URL: arguments of the command, values of the environment. `values`: by their names."""
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

    def learn(self, values: Mapping[str, str]) -> None:
        """Take these out as well from now on."""
        self._values |= values
        self._secrets = Secrets(self._values)

    def __call__(self, text: str) -> str:
        text = self._secrets.blot(text)
        return _QUERY_PASSWORD.sub(r"\g<before>***", _URL_PASSWORD.sub(r"\g<before>:***@", text))


def configure_logging(*, verbosity: int, log_format: LogFormat, redact: Redactor) -> None:
    """Send the project's log to stderr: errors (-1 and less), warnings (0), what changed (1), how (2 and more)."""
    handler = _Stderr()
    handler.setFormatter(
        _JsonLines(redact) if log_format is LogFormat.JSON else _PlainLines(redact)
    )
    level = {0: logging.WARNING, 1: logging.INFO}.get(
        verbosity, logging.DEBUG if verbosity > 0 else logging.ERROR
    )
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
        return f"{at:%H:%M:%S} {record.levelname.lower():<7} {shortened(plain(self._redact(record.getMessage() + trace), lines=True))}"


class _JsonLines(logging.Formatter):
    def __init__(self, redact: Redactor) -> None:
        super().__init__()
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, tz=UTC).isoformat(
                timespec="milliseconds"
            ),
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
