"""The `sweep` command: puts the commands together, turns what went wrong into one line and an exit code, and configures logging.

Nothing heavy is imported here or at the top of the commands' modules (`sweep --help` promises 0.5 s): SQLAlchemy, Optuna, Ray, numpy,
torch and rich are imported inside the functions that use them.
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
from typer.core import TyperGroup

from orchestrator import __version__
from orchestrator.cli import admin as manage
from orchestrator.cli import (
    calibration,
    doctor,
    explain,
    export,
    netbench,
    nodes,
    plan,
    replay,
    run,
    status,
    surroundings,
    trace,
    trial,
)
from orchestrator.cli import results as look
from orchestrator.cli.console_log import LogFormat, Redactor, configure_logging
from orchestrator.cli.home import sweep_home
from orchestrator.cli.output import examples, note, plain, write_error
from orchestrator.cli.signals import Terminated, terminable
from orchestrator.cli.streams import OutputLost, give_up_stdout, take_over
from orchestrator.core.errors import StoreUnavailable, SweepError, UsageInvalid

INTERNAL_ERROR = 1
USAGE_ERROR = 2
INTERRUPTED = 130
# New objects before Python looks for garbage, in place of 700 or 2,000: imports make 200,000, and all of them stay.
OBJECTS_TO_COLLECT = 50_000
BROKEN_PIPE = 141  # what a shell reports of a program that died of SIGPIPE

_FLAGS_OF_ALL = {
    "-v": 0,
    "-vv": 0,
    "--verbose": 0,
    "--log-format": 1,
}  # number of values; -q means more to `run`, which has its own


class _Interrupted(Exception):
    """Ctrl-C. Typer would end with 130 in silence."""


class _Commands(TyperGroup):
    """Takes the logging options after the command's name too: `sweep run FILE -v` is what people type."""

    def invoke(self, ctx):  # type: ignore[no-untyped-def]  # its types are private to typer
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted from None

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]  # its types are private to typer
        return super().parse_args(ctx, _to_the_front(args))


app = typer.Typer(
    cls=_Commands,
    name="sweep",
    help="Find, by measuring, the fastest layout to train a language model on the GPUs at hand.",
    epilog=examples(
        "sweep plan sweeps/quickstart.yaml     what would be measured, and what it costs",
        "sweep run sweeps/quickstart.yaml      measure; the same command goes on where it stopped",
        "sweep best                            the fastest layout of each cell",
        "sweep sql 'select * from v_best'      ask anything",
        "",
        "Environment (an option on the command line wins over it):",
        "SWEEP_DB       the database; here a password is not visible in ps",
        "SWEEP_DB_READER  of a PostgreSQL: the login as which `sweep sql` asks, made by `sweep db grant-reader`",
        "SWEEP_HOME     run folders and logs, default .sweep",
        "RAY_ADDRESS    the Ray cluster, default a local one",
        "NO_COLOR       no colours",
        "",
        "Exit codes: 0 done, 1 bug in this program or a failed check, 2 your input, 3 trials failed (run --strict),",
        "4 nothing feasible, 5 another orchestrator holds the sweep, 75 database, cluster or machine not ready (try again),",
        "130, 143 and 129 interrupted (Ctrl-C, SIGTERM, a closed terminal), with everything saved",
    ),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # rich's help costs 0.1 s and reads [brackets] as markup
    pretty_exceptions_enable=False,  # `main` says what went wrong
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sweep {__version__}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    context: typer.Context,
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            show_default=False,
            help="Say on stderr what changes state; -vv: how.",
        ),
    ] = 0,
    quiet: Annotated[
        int,
        typer.Option(
            "-q",
            "--quiet",
            count=True,
            show_default=False,
            help="Say on stderr only what went wrong.",
        ),
    ] = 0,
    log_format: Annotated[
        LogFormat, typer.Option("--log-format", help="How log lines on stderr are written.")
    ] = LogFormat.TEXT,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    surroundings.check()
    redact = (
        context.obj if isinstance(context.obj, Redactor) else Redactor.of_this_process(sys.argv)
    )
    configure_logging(verbosity=verbose - quiet, log_format=log_format, redact=redact)


for _module in (
    plan,
    explain,
    run,
    replay,
    status,
    look,
    trial,
    nodes,
    netbench,
    calibration,
    trace,
    export,
    manage,
    doctor,
):
    _module.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. Nothing that goes wrong shows as a traceback."""
    gc.set_threshold(OBJECTS_TO_COLLECT, 10, 10)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    redact = Redactor.of_this_process(arguments)
    take_over()
    _drop_unreadable_size()
    try:
        with terminable():
            code = _outcome(arguments, redact)
        sys.stdout.flush()  # here, where a reader that has gone away can still be passed over in silence
    except BrokenPipeError:
        give_up_stdout()
        return BROKEN_PIPE
    except OutputLost as exc:
        give_up_stdout()
        if exc.is_closed:
            return BROKEN_PIPE
        note(f"error: stdout cannot be written: {exc.reason}. What was measured stays in the store")
        return StoreUnavailable.exit_code
    return code


def _drop_unreadable_size() -> None:
    """Rich reads COLUMNS and LINES, and fails over digits of other scripts."""
    for name in ("COLUMNS", "LINES"):
        if not re.fullmatch("[0-9]{0,9}", os.environ.get(name, "")):
            del os.environ[name]


def _outcome(arguments: list[str], redact: Redactor) -> int:
    """Run a command line; what goes wrong is told in one line on stderr, and to who asked for JSON also on stdout."""
    try:
        code = app(args=arguments, prog_name="sweep", standalone_mode=False, obj=redact)
    except SweepError as exc:
        kind, message, code = _kind_of(type(exc)), redact(str(exc)), exc.exit_code
    except typer.TyperException as exc:
        if (
            type(exc).__name__ == "NoArgsIsHelpError"
        ):  # its message is the help; typer keeps the class private
            note(exc.format_message())
            return USAGE_ERROR
        kind, message, code = _kind_of(UsageInvalid), _usage_mistake(exc, redact), exc.exit_code
    except Terminated as exc:
        with suppress(OSError):  # its terminal may have been closed
            note("interrupted" if exc.exit_code == INTERRUPTED else str(exc))
            if _wants_json(arguments):
                write_error("interrupted", str(exc), exc.exit_code)
        return exc.exit_code
    except (KeyboardInterrupt, _Interrupted, typer.Abort):
        note("interrupted")
        if _wants_json(arguments):
            write_error("interrupted", "interrupted", INTERRUPTED)
        return INTERRUPTED
    except SystemExit as exc:  # typer's answer to a broken pipe, else a command's own
        return _code_of(exc)
    except (BrokenPipeError, OutputLost):
        raise
    except Exception as exc:  # noqa: BLE001  # the last door: what nobody foresaw becomes one line, and its place is kept
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
        except (BrokenPipeError, OutputLost):  # stderr has it
            give_up_stdout()
    return code


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether stdout was to hold one JSON document; asked of the command line itself, which may be too wrong to be parsed."""
    options = list(itertools.takewhile(lambda argument: argument != "--", arguments))
    return (
        "--json" in options
        or "--format=json" in options
        or ("--format", "json") in itertools.pairwise(options)
    )


def _kind_of(error: type[SweepError]) -> str:
    """The class of an error as JSON says it: usage_invalid, sweep_held, ..."""
    return re.sub(r"(?<=.)([A-Z])", r"_\1", error.__name__).lower()


def _to_the_front(arguments: list[str]) -> list[str]:
    """Move the logging options before the command's name, where they are declared."""
    front: list[str] = []
    rest: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--":
            return [*front, *rest, argument, *waiting]
        name = argument.partition("=")[0]
        if name not in _FLAGS_OF_ALL:
            rest.append(argument)
            continue
        front.append(argument)
        if _FLAGS_OF_ALL[name] and "=" not in argument:
            front += [value for value in (next(waiting, None),) if value is not None]
    return [*front, *rest]


def _usage_mistake(exc: typer.TyperException, redact: Redactor) -> str:
    context = getattr(exc, "ctx", None)
    where = f"; see {context.command_path} --help" if context is not None else ""
    # The words of typer and pydantic, less what only their authors can make sense of.
    said = (
        plain(exc.format_message())
        .replace("Value error, ", "")
        .replace("Input should be", "should be")
        .rstrip(".")
    )
    return f"{redact(said)}{_meant_choice(said)}{where}"


def _meant_choice(said: str) -> str:
    """What was probably meant by a word that is none of those to choose from."""
    match = re.search(r"'([^']+)' is not one of ('.+')", said)
    close = (
        get_close_matches(match[1].lower(), re.findall(r"'([^']+)'", match[2]), n=1)
        if match is not None
        else []
    )
    return f"; did you mean {close[0]}?" if close else ""


def _explain_bug(exc: Exception, redact: Redactor) -> str:
    """One line, and a file with what a developer needs."""
    said = next((line for line in str(exc).splitlines() if line.strip()), "")[:300]
    text = redact("".join(traceback.format_exception(exc)))
    place = _save(
        f"sweep {__version__}, Python {sys.version.split()[0]}\n{redact(' '.join(sys.argv))}\n\n{text}"
    )
    kept = (
        f"the traceback is in {place}"
        if place is not None
        else f"and its traceback could not be saved; it ends at {_last_place(exc)}"
    )
    return f"unexpected {redact(f'{type(exc).__name__}: {said}')} ; this is a bug: {kept}"


def _save(text: str) -> Path | None:
    name = f"traceback-{datetime.now(tz=UTC):%Y%m%dT%H%M%S}-{os.getpid()}.txt"
    for find in (sweep_home, tempfile.gettempdir):
        try:
            path = Path(find()) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb"
            ) as file:
                file.write(text.encode(errors="backslashreplace"))
        except (OSError, SweepError):
            continue
        return path
    return None


def _last_place(exc: Exception) -> str:
    frame = traceback.extract_tb(exc.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _code_of(exc: SystemExit) -> int:
    cause = exc.__context__
    if isinstance(cause, OSError) and cause.errno == errno.EPIPE:
        give_up_stdout()
        return BROKEN_PIPE
    return exc.code if isinstance(exc.code, int) else INTERNAL_ERROR if exc.code else 0
