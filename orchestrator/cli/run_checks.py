"""What a run needs and can be told at once, before anything is started: a legal layout, devices, a store that stays, room for its folders, variables.

Imports are within functions, so that `sweep --help` loads none of them.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli import home, surroundings
from orchestrator.cli.output import note
from orchestrator.cluster.ray import session_folder as ray_folder

if TYPE_CHECKING:
    from orchestrator.core.pretend.replay import ReplayTable
    from orchestrator.core.sweepfile.spec import SweepSpec

_MAKE_ROOM = "Make room, or set SWEEP_HOME to a folder that has it"
_HOME_ADVICE = {errno.ENOSPC: _MAKE_ROOM, errno.EDQUOT: _MAKE_ROOM}


def check_some_layout_is_legal(spec: SweepSpec, table: ReplayTable | None) -> None:
    """Say why nothing can be measured; a cell without a legal layout among others is told with the results. Raises UsageInvalid."""
    from orchestrator.core.errors import UsageInvalid
    from orchestrator.core.search.space import enumerate_cell
    from orchestrator.report.quantities import counted

    told = []
    for cell in spec.cells():
        # Nodes as large as may be: what is not legal on those is on none.
        per_node = spec.gpus_per_node if isinstance(spec.gpus_per_node, int) else cell.num_gpus
        space = enumerate_cell(
            spec,
            cell,
            gpus_per_node=per_node,
            among=table.layouts(cell) if table is not None else None,
        )
        if len(space.legal):
            return
        reasons = sorted(space.rejected.items(), key=lambda item: -item[1])[:2]
        told.append(
            f"{cell.key}: "
            + "; ".join(f"of {counted(count, 'layout')}, {reason}" for reason, count in reasons)
        )
    more = f" and {len(told) - 3} more cells" if len(told) > 3 else ""
    raise UsageInvalid(
        f"no layout is legal in any cell. {'. '.join(told[:3])}{more}. `sweep plan` lists all reasons"
    )


def check_this_machine(spec: SweepSpec) -> None:
    """Say what a local Ray would take seconds to find out. Raises UsageInvalid, ResourcesInsufficient, MachineUnready."""
    from importlib.util import find_spec

    from orchestrator.cluster.contract import Slots, shapes_of
    from orchestrator.core.errors import UsageInvalid
    from orchestrator.core.trial.protocol import Device
    from orchestrator.node.gpu_monitor import device_name

    if spec.workload.name == "llama" and find_spec("torch") is None:
        raise UsageInvalid(
            "workload llama needs torch, which is not installed here: pip install 'layout-sweep[train]'"
        )
    ray_folder.check(os.environ)
    surroundings.check_for_ray()
    has_gpu = Path("/dev/nvidiactl").exists() or device_name() is not None
    cores = os.cpu_count() or 1
    if not has_gpu:
        wants_gpu = spec.device not in ("auto", "cpu")
        slots = Slots(
            device=Device.CUDA if wants_gpu else Device.CPU,
            device_name=None,
            nodes={} if wants_gpu else {"here": cores},
        )
        shapes_of(
            spec.cells(),
            slots,
            gpus_per_node=spec.gpus_per_node if isinstance(spec.gpus_per_node, int) else cores,
        )


def check_home() -> None:
    """Try to write where run folders go. Raises StoreUnavailable."""
    from orchestrator.core.errors import StoreUnavailable

    runs = home.sweep_home() / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        probe = runs / f".probe-{os.getpid()}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as exc:
        raise StoreUnavailable(
            f"run folders cannot be written to {runs}: {exc.strerror}. {_HOME_ADVICE.get(exc.errno or 0, 'Set SWEEP_HOME to a folder that can')}"
        ) from None


def check_that_ray_keeps_it(db: str | None) -> None:
    """What was uploaded with a Ray job is deleted after it: no place for a store. Raises UsageInvalid."""
    from db.connection import url
    from orchestrator.cluster.ray.job import is_unpacked
    from orchestrator.core.errors import UsageInvalid

    store = url.resolve(db)
    if store.drivername == "sqlite" and is_unpacked(Path(str(store.database))):
        raise UsageInvalid(
            f"the store would be {store.database}, in the folder that Ray has unpacked for this job and will delete."
            ' Name another: --runtime-env-json \'{"env_vars": {"SWEEP_DB": "sqlite:////home/me/sweep.sqlite", "SWEEP_HOME": "/home/me/.sweep"}}\''
        )
    if is_unpacked(home.sweep_home()):
        note(
            f"Logs go to {home.sweep_home()}, which Ray will delete: SWEEP_HOME names another folder"
        )


def rank_environment(spec: SweepSpec) -> dict[str, str]:
    """The variables that a sweep file wants ranks to get from this environment, but for secrets."""
    from orchestrator.core.sweepfile.command_options import CommandOptions
    from orchestrator.core.trial.rank_environment import named

    options = spec.workload.options
    return named(options.pass_env, os.environ) if isinstance(options, CommandOptions) else {}


def rank_secrets(spec: SweepSpec) -> dict[str, str]:
    """The variables whose values are secrets: they are handed on to ranks, and never written or shown.

    Raises UsageInvalid for one that is not set.
    """
    from orchestrator.core.errors import UsageInvalid
    from orchestrator.core.sweepfile.command_options import CommandOptions

    options = spec.workload.options
    names = options.env_from if isinstance(options, CommandOptions) else ()
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UsageInvalid(
            f"workload.options.env_from names {', '.join(missing)}, not set in this environment: export {' '.join(missing)}, and run again"
        )
    return {name: os.environ[name] for name in names}
