"""The `sweep` command: its list of commands, exit codes, errors as one line, and logging.

`sweep --help` promises 0.5 s. So neither this module nor the commands' modules import SQLAlchemy,
Optuna, Ray, numpy, torch or rich at the top: the functions that need them do.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from orchestrator import __version__
from orchestrator.cli.lazy_group import LazyGroup
from orchestrator.cli.store.home import sweep_home
from orchestrator.cli.terminal import surroundings
from orchestrator.cli.terminal.console_log import LogFormat, Redactor, configure_logging
from orchestrator.cli.terminal.output import note, plain, write_error
from orchestrator.cli.terminal.signals import Terminated, terminable
from orchestrator.cli.terminal.streams import OutputLost, give_up_stdout, take_over
from orchestrator.core.errors import StoreUnavailable, SweepError, UsageInvalid

INTERNAL_ERROR = 1
USAGE_ERROR = 2
INTERRUPTED = 130
# What a shell reports of a program that died of SIGPIPE.
BROKEN_PIPE = 141
# New objects between garbage collections, in place of Python's 700 or 2,000: the imports alone
# create 200,000 that stay.
OBJECTS_TO_COLLECT = 50_000
# The logging options that may follow the command's name, and how many values each takes. -q is
# missing, because `run` has one.
_LOGGING_OPTIONS = {"-v": 0, "-vv": 0, "--verbose": 0, "--log-format": 1}

# The module of each command, in the order of `sweep --help`.
COMMANDS = {
    "plan": "plan",
    "explain": "explain",
    "validate": "validate",
    "run": "run.command",
    "schema": "validate",
    "replay": "replay",
    "list": "sweeps",
    "status": "status",
    "top": "top.command",
    "ui": "ui.command",
    "best": "best.command",
    "trials": "trials",
    "compare": "compare",
    "report": "report",
    "plot": "plot",
    "show": "show",
    "profile": "profile",
    "logs": "logs",
    "nodes": "nodes",
    "bench": "nodes",
    "unbench": "nodes",
    "netbench": "netbench",
    "calibration": "calibration",
    "trace": "trace",
    "sql": "sql",
    "export": "export.command",
    "mirror": "mirror.command",
    "enqueue": "requests",
    "retry": "requests",
    "cancel": "admin",
    "invalidate": "admin",
    "rename": "sweeps",
    "rm": "sweeps",
    "doctor": "doctor.command",
}
DB_COMMANDS = {"upgrade": "admin", "grant-reader": "reader"}
EPILOG = """\b
Examples:
  sweep plan sweeps/quickstart.yaml     show what would be measured, and what it costs
  sweep run sweeps/quickstart.yaml      measure; repeat the command to continue where it stopped
  sweep best                            show the fastest layout of each cell
  sweep sql 'select * from v_best'      ask any question

\b
Words:
  layout  one way to train: parallel sizes, micro-batch, recomputation, ZeRO stage and more
  cell    a model on a number of GPUs, with a sequence length and a global batch size
  trial   one layout of one cell, to be measured; an attempt is one launch of it
  sweep   a sweep file, and all trials of its cells

\b
Environment (an option on the command line overrides it):
  SWEEP_DB         the database; unlike in --db, a password is not visible in `ps` here
  SWEEP_DB_READER  for PostgreSQL: the login that `sweep sql` uses, see `sweep db grant-reader`
  SWEEP_HOME       the folder of run folders and logs, by default .sweep
  RAY_ADDRESS      the Ray cluster, by default a local one
  NO_COLOR         if set, no colours

\b
Exit codes:
  0              done
  1              a bug in this program, or a check of `sweep doctor` failed
  2              a mistake in the command line or the sweep file
  3              trials failed (only with run --strict)
  4              nothing could be measured in a cell
  5              another `sweep run` works on the sweep
  75             the database, the cluster or the machine is not ready: try again
  130, 143, 129  ended by Ctrl-C, SIGTERM or a closed terminal; all results are saved
"""


class _Interrupted(Exception):
    """Ctrl-C. Typer alone would end with 130 and print nothing."""


class _Commands(LazyGroup):
    """Accepts the logging options after the command's name too: `sweep run FILE -v`."""

    table = COMMANDS

    def invoke(self, ctx):  # type: ignore[no-untyped-def]  # its types are private to typer
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted from None

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]  # as above
        return super().parse_args(ctx, _logging_options_first(args))


class _DatabaseCommands(LazyGroup):
    table = DB_COMMANDS


app = typer.Typer(
    cls=_Commands,
    name="sweep",
    help="Find, by measuring, the fastest layout to train a language model on the GPUs at hand.",
    epilog=EPILOG,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    # Rich's help costs 0.1 s and reads [brackets] as markup.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # `main` reports errors
)
database = typer.Typer(
    cls=_DatabaseCommands,
    help="Upgrade the database, or let others read it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(database, name="db")


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"sweep {__version__}")
        raise typer.Exit


@app.callback()
def _common_options(
    context: typer.Context,
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            show_default=False,
            help="Log changes of state to stderr; with -vv all details.",
        ),
    ] = 0,
    quiet: Annotated[
        int,
        typer.Option(
            "-q", "--quiet", count=True, show_default=False, help="Log to stderr only errors."
        ),
    ] = 0,
    log_format: Annotated[
        LogFormat, typer.Option("--log-format", help="The format of log lines.")
    ] = LogFormat.TEXT,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    surroundings.check()
    given = context.obj
    redact = given if isinstance(given, Redactor) else Redactor.of_this_process(sys.argv)
    configure_logging(verbosity=verbose - quiet, log_format=log_format, redact=redact)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. No error shows as a traceback."""
    gc.set_threshold(OBJECTS_TO_COLLECT, 10, 10)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    redact = Redactor.of_this_process(arguments)
    stdout_was_open = take_over()
    _drop_invalid_terminal_size()
    try:
        code = _exit_code(arguments, redact)
        # Flush here, where a reader that went away can be ignored.
        sys.stdout.flush()
    except BrokenPipeError:
        give_up_stdout()
        return BROKEN_PIPE
    except OutputLost as exc:
        give_up_stdout()
        if exc.is_closed:
            # A reader that went away, as `head` does, wants no more words.
            if not stdout_was_open:
                note("stdout is closed: no answer is shown. What was measured is in the store")
            return BROKEN_PIPE
        note(f"error: stdout cannot be written: {exc.reason}. What was measured stays in the store")
        return StoreUnavailable.exit_code
    return code


def _drop_invalid_terminal_size() -> None:
    """Remove COLUMNS and LINES that rich fails over, such as digits of other scripts."""
    for name in ("COLUMNS", "LINES"):
        if not re.fullmatch("[0-9]{0,9}", os.environ.get(name, "")):
            del os.environ[name]


def _exit_code(arguments: list[str], redact: Redactor) -> int:
    """Run a command line. Report an error in one line on stderr; with --json also on stdout."""
    try:
        with terminable():
            code = app(args=arguments, prog_name="sweep", standalone_mode=False, obj=redact)
    except SweepError as exc:
        kind, message, code = _kind_of(type(exc)), redact(str(exc)), exc.exit_code
    except typer.TyperException as exc:
        # The message of this class, which typer keeps private, is the help.
        if type(exc).__name__ == "NoArgsIsHelpError":
            note(exc.format_message())
            return USAGE_ERROR
        kind, message, code = _kind_of(UsageInvalid), _usage_mistake(exc, redact), exc.exit_code
    except Terminated as exc:
        with suppress(OSError):  # its terminal may have been closed
            note(str(exc))
            if _wants_json(arguments):
                write_error("interrupted", str(exc), exc.exit_code)
        return exc.exit_code
    except (KeyboardInterrupt, _Interrupted, typer.Abort):
        note("interrupted")
        if _wants_json(arguments):
            write_error("interrupted", "interrupted", INTERRUPTED)
        return INTERRUPTED
    except SystemExit as exc:
        # Typer's answer to a broken pipe, or a command's own.
        return _code_of(exc)
    except (BrokenPipeError, OutputLost):
        raise
    # An unforeseen error becomes one line and a file.
    except Exception as exc:  # noqa: BLE001
        known = surroundings.explain(exc)
        if known is not None:
            kind, message, code = _kind_of(type(known)), redact(str(known)), known.exit_code
        else:
            kind, message, code = "bug", _explain_bug(exc, redact), INTERNAL_ERROR
    else:
        return code if isinstance(code, int) else 0
    note(f"error: {message}")
    if _wants_json(arguments):
        try:
            write_error(kind, message, code)
            sys.stdout.flush()
        except (BrokenPipeError, OutputLost):  # the message is on stderr
            give_up_stdout()
    return code


def _wants_json(arguments: Sequence[str]) -> bool:
    """True if stdout is to hold JSON. Reads the raw arguments: they may not be parseable."""
    options = list(itertools.takewhile(lambda argument: argument != "--", arguments))
    pairs = itertools.pairwise(options)
    return "--json" in options or "--format=json" in options or ("--format", "json") in pairs


def _kind_of(error: type[SweepError]) -> str:
    """The name of an error class in JSON: usage_invalid, sweep_in_use, ..."""
    return re.sub(r"(?<=.)([A-Z])", r"_\1", error.__name__).lower()


def _logging_options_first(arguments: list[str]) -> list[str]:
    """Move the logging options before the command's name, where they are declared."""
    front: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            return [*front, *rest, argument, *remaining]
        name = argument.partition("=")[0]
        if name not in _LOGGING_OPTIONS:
            rest.append(argument)
            continue
        front.append(argument)
        if _LOGGING_OPTIONS[name] and "=" not in argument:
            front += itertools.islice(remaining, 1)
    return [*front, *rest]


def _usage_mistake(exc: typer.TyperException, redact: Redactor) -> str:
    """The message of typer or pydantic, without words that only their authors understand."""
    context = getattr(exc, "ctx", None)
    see = f"; see {context.command_path} --help" if context is not None else ""
    if type(exc).__name__ == "NoSuchOption" and context is not None and context.parent is None:
        see = f"; options of a command follow its name{see}"
    message = " ".join(plain(exc.format_message()).split()).replace("Value error, ", "")
    errors = getattr(exc.__cause__, "errors", None)  # of pydantic's ValidationError
    value = f"{errors()[0]['input']!r} " if errors is not None else ""
    message = message.replace("Input should be ", f"{value}should be ").rstrip(".")
    message = message.replace(", unable to parse string as an integer", "")
    return f"{redact(message)}{_similar_choice(message)}{see}"


def _similar_choice(message: str) -> str:
    """The choice that a mistyped word resembles."""
    match = re.search(r"'([^']+)' is not one of ('.+')", message)
    choices = re.findall(r"'([^']+)'", match[2]) if match else []
    close = get_close_matches(match[1].lower(), choices, n=1) if match else []
    return f"; did you mean {close[0]}?" if close else ""


def _explain_bug(exc: Exception, redact: Redactor) -> str:
    """One line for the user, and a file with the traceback for a developer."""
    first = next((line for line in str(exc).splitlines() if line.strip()), "")[:300]
    trace = redact("".join(traceback.format_exception(exc)))
    versions = f"sweep {__version__}, Python {sys.version.split()[0]}"
    path = _save(f"{versions}\n{redact(' '.join(sys.argv))}\n\n{trace}")
    saved = f"the traceback is in {path}"
    if path is None:
        frame = traceback.extract_tb(exc.__traceback__)[-1]
        saved = f"its traceback could not be saved; it ends at {frame.filename}:{frame.lineno}"
    return f"unexpected {redact(f'{type(exc).__name__}: {first}')} ; this is a bug: {saved}"


def _save(text: str) -> Path | None:
    name = f"traceback-{datetime.now(tz=UTC):%Y%m%dT%H%M%S}-{os.getpid()}.txt"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    for folder in (sweep_home, tempfile.gettempdir):
        try:
            path = Path(folder()) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                file.write(text.encode(errors="backslashreplace"))
        except (OSError, SweepError):
            continue
        return path
    return None


def _code_of(exc: SystemExit) -> int:
    cause = exc.__context__
    if isinstance(cause, OSError) and cause.errno == errno.EPIPE:
        give_up_stdout()
        return BROKEN_PIPE
    return exc.code if isinstance(exc.code, int) else INTERNAL_ERROR if exc.code else 0
