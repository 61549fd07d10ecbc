"""The command `ui`: a sweep in a browser, live."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from orchestrator.cli.options import Db, SweepArgument
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.terminal.output import note, write
from orchestrator.cli.ui.hosts import LOOPBACK, hosts_of, listen, url_of
from orchestrator.core.errors import UsageInvalid
from orchestrator.report.extras import how_to_install

PACKAGES = ("starlette", "uvicorn", "jinja2", "plotly")


def ui(
    sweep: SweepArgument = None,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="The address to listen on. One that other machines reach asks for a token.",
        ),
    ] = LOOPBACK,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port. Default: a free one.")
    ] = 0,
    token: Annotated[
        bool,
        typer.Option("--token", help="Ask for a token on loopback too, as on a shared machine."),
    ] = False,
    db: Db = None,
) -> None:
    """Watch a sweep in a browser, and act on it.

    Shows the best so far, what runs on which nodes, the failures, the queue and all trials as they
    come, the pictures of `sweep report`, a page for questions in SQL, and a calculator of memory
    and time. Prints its address, and serves until Ctrl-C; the sweep goes on. Needs the extra `ui`.

    Examples:
      sweep ui
      sweep ui 8b --port 8000
      ssh -L 8000:127.0.0.1:8000 trainer sweep ui 8b --port 8000
      sweep ui 8b --host 0.0.0.0
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageInvalid(
            f"sweep ui needs {missing[0]}, {how_to_install('ui')}. Without it: sweep status --watch"
        )
    with existing_store(db) as store:
        name = select_sweep(store, sweep).name
    hosts = hosts_of(host)
    import asyncio
    import secrets

    from orchestrator.cli.ui.application import Server  # uvicorn, Starlette, jinja2
    from orchestrator.cli.ui.sessions import Sessions

    with listen(host, port) as listening:
        number = listening.getsockname()[1]
        secret = secrets.token_urlsafe(32) if hosts.is_open or token else None
        sessions = Sessions(number, secret)
        write(url_of(host, number) + (f"?token={secret}" if secret is not None else ""))
        sys.stdout.flush()
        if hosts.is_open:
            note(
                "other machines reach this address, and nothing encrypts what is sent: whoever has"
                " the token can stop the sweep"
            )
        server = Server(db=db, sweep=name, hosts=hosts, sessions=sessions)
        asyncio.run(server.run_on(listening))
