"""What precedes the import of Ray: say which Ray is used, and keep a local one off the network."""

from __future__ import annotations

import os
from collections.abc import Callable

from orchestrator.cli.output import note


def prepare_ray(ray_address: str | None, say: Callable[[str], None] = note) -> None:
    if ray_address is not None:
        say(f"Joining the Ray cluster at {ray_address} ...")
        return
    # Ray's own switch for "this machine only", read when Ray is imported: its servers bind
    # loopback instead of every interface.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    say("Starting a local Ray ...")
