"""The trackers of a section `mirror`, with their addresses from the environment."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.store import home
from orchestrator.cli.terminal.console_log import Redactor
from orchestrator.core.errors import UsageInvalid

if TYPE_CHECKING:
    from db.read.rows import SweepRow
    from orchestrator.core.sweepfile.mirror_section import MirrorSection
    from orchestrator.report.mirrors.mirroring import Mirroring

# The extra of this project that has each package.
_EXTRAS = {"mlflow": "mlflow", "wandb": "wandb"}


def mirror_secrets(mirror: MirrorSection | None) -> dict[str, str]:
    """The tracking URI by the name of its environment variable.

    Raises UsageInvalid if it is not set.
    """
    name = mirror.variable if mirror is not None else None
    if name is None:
        return {}
    if not os.environ.get(name):
        raise UsageInvalid(
            f"mirror.mlflow names {name}, not set in this environment: export {name}, and run again"
        )
    return {name: os.environ[name]}


def missing_packages(mirror: MirrorSection) -> list[str]:
    """A line for each tracker whose package is not installed."""
    return [
        f"mirror.{name} needs {name}, which is not installed: pip install"
        f" '.[{_EXTRAS[name]}]' in the cloned folder"
        for name in _EXTRAS
        if getattr(mirror, name) is not None and find_spec(name) is None
    ]


def mirrorings(mirror: MirrorSection, sweep: SweepRow) -> list[Mirroring]:
    """Return what brings each tracker of a section up to date, of those that are installed."""
    from orchestrator.report.mirrors.mirroring import Mirroring
    from orchestrator.report.mirrors.mlflow_mirror import MlflowMirror, uri_of
    from orchestrator.report.mirrors.wandb_mirror import WandbMirror

    secrets = mirror_secrets(mirror)
    redact = Redactor([*secrets.values()], values=secrets)
    found = []
    if mirror.mlflow is not None and find_spec("mlflow") is not None:
        place = mirror.mlflow

        def open_mlflow() -> MlflowMirror:
            uri, artifacts = secrets.get(mirror.variable or ""), None
            if uri is None:
                uri = uri_of(place)
                artifacts = Path(place).expanduser().absolute() / "artifacts"
            return MlflowMirror.open(
                uri, sweep=sweep.name, run_token=sweep.run_token, artifacts=artifacts
            )

        found.append(Mirroring("mlflow", open_mlflow, redact))
    if mirror.wandb is not None and find_spec("wandb") is not None:
        open_wandb = partial(
            WandbMirror, Path(mirror.wandb), sweep=sweep.name, run_token=sweep.run_token
        )
        found.append(Mirroring("wandb", open_wandb, redact))
    return found


@contextmanager
def alone(sweep: SweepRow) -> Iterator[bool]:
    """Yield whether this is the only process on this machine that mirrors a sweep.

    Two at once would write runs twice.
    """
    folder = home.sweep_home()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"mirror-{sweep.run_token}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
