"""Commands as forks of one process: most of what a short command does is to import.

`python -m tests.cli.forked_commands`: for each line of stdin, a JSON list of the arguments and the
environment's changes, it answers with a line of JSON: the exit code, what the command said, and the
modules that were imported at its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Forked:
    """The end of a command. `modules`: those of this process are among them."""

    exit_code: int
    out: str
    modules: frozenset[str]


@dataclass(frozen=True)
class ForkedCommands:
    """A process from which commands are forked."""

    process: subprocess.Popen[str]

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
        assert self.process.stdin is not None and self.process.stdout is not None
        asked = json.dumps([list(arguments), dict(environment)])
        print(asked, file=self.process.stdin, flush=True)
        code, out, modules = json.loads(self.process.stdout.readline())
        return Forked(exit_code=code, out=out, modules=frozenset(modules))


@contextmanager
def forked_commands() -> Iterator[ForkedCommands]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.cli.forked_commands"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield ForkedCommands(process)


def _run(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str, list[str]]:
    from orchestrator.cli import main

    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as found:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(said.fileno(), 1)
                os.environ.update(environment)
                code = main(arguments)
                sys.stdout.flush()
                found.write(json.dumps(sorted(sys.modules)))
                found.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        said.seek(0)
        found.seek(0)
        modules = json.loads(found.read() or "[]")
        return os.waitstatus_to_exitcode(status), said.read(), modules


def _main() -> None:
    # What every command imports that reads a store.
    import db.store_reads  # noqa: F401
    import orchestrator.cli  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), flush=True)


if __name__ == "__main__":
    _main()
