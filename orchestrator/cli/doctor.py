"""The command that checks this machine: `sweep doctor` says what would keep a sweep from running well, and what to do about it.

Each check stands alone and changes nothing; torch and Ray are tried in processes of their own, so that a broken one is a finding.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.cluster_doctor import STYLES, look_at_cluster
from orchestrator.cli.home import sweep_home
from orchestrator.cli.output import DbOption, JsonOption, examples, write_json, write_line
from orchestrator.core.errors import SweepError
from orchestrator.core.machines.check import Check, Status
from orchestrator.core.machines.node_health import (
    CLOCK_SKEW_SECONDS,
    GOOD_FREE_BYTES,
    MIN_FREE_BYTES,
)
from orchestrator.report import quantities as show

IMPORT_SECONDS = 120.0  # torch from a cold network file system takes minutes
GOOD_OPEN_FILES = 4096  # Ray and a gang of eight ranks stay below it
REQUIRED = (
    "numpy",
    "pydantic",
    "sqlalchemy",
    "alembic",
    "optuna",
    "ray",
    "typer",
    "rich",
    "pyyaml",
    "tenacity",
    "psutil",
)
OPTIONAL = {
    "torch": "train",
    "nvidia-ml-py": "gpu",
    "psycopg": "postgres",
    "pyarrow": "export",
    "scipy": "gp",
}  # package: extra


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(
        epilog=examples(
            "sweep doctor",
            "sweep doctor --ray-address auto --json",
            "sweep doctor --cluster --ray-address auto     every node: GPUs, ECC, matrix products, disk, clock, versions",
        )
    )(doctor)


def doctor(
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            help="Also connect to this Ray cluster: auto or HOST:PORT.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="Look at every node of the cluster instead, and at what differs."
        ),
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, or the nodes of a cluster.

    Packages, GPUs, Ray, database, disk, ports. Ends with exit code 1 when something would keep a sweep from running.
    """
    if cluster:
        look_at_cluster(ray_address, db, as_json=as_json)
        return
    checks = []
    for check in _all_checks(db, ray_address):
        checks.append(check)
        if not as_json:
            _print(check)
    failed = [check for check in checks if check.status is Status.FAIL]
    if as_json:
        write_json("doctor", {"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        num_warnings = sum(check.status is Status.WARN for check in checks)
        write_line(
            f"{len(checks)} checks, {num_warnings} to look at, {len(failed)} to mend", style="bold"
        )
    if failed:
        raise typer.Exit(1)


def _print(check: Check) -> None:
    write_line(f"{check.status:<4}  {check.name:<12} {check.found}", style=STYLES[check.status])
    if check.advice:
        write_line(f"{'':<19}{check.advice}")


def _all_checks(db: str | None, ray_address: str | None) -> Iterator[Check]:
    # Both take seconds to import: they do so beside each other.
    torch, ray = _begin(_TORCH_QUESTION), _begin("import ray; print(ray.__version__)")
    checks: tuple[Callable[[], Check | list[Check]], ...] = (
        _python,
        _packages,
        lambda: _torch(torch),
        _gpus,
        lambda: _ray(ray),
        *((lambda: _cluster(ray_address),) if ray_address is not None else ()),
        lambda: _access(ray_address),
        lambda: _environment(ray_address),
        lambda: _database(db),
        lambda: _reader(db),
        _home,
        _ports,
        _proc,
        _clean_up,
        _clock,
        _open_files,
    )
    for check in checks:
        found = check()
        yield from found if isinstance(found, list) else [found]


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform != "linux":
        return Check(
            name="python",
            status=Status.WARN,
            found=found,
            advice="trials run on Linux only; planning and looking work here",
        )
    return Check(name="python", status=Status.OK, found=found)


def _packages() -> Check:
    versions = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    found = ", ".join(
        f"{name} {version}" for name, version in versions.items() if version is not None
    )
    missing = [name for name in REQUIRED if versions[name] is None]
    if missing:
        return Check(
            name="packages",
            status=Status.FAIL,
            found=found,
            advice=f"missing: {', '.join(missing)}; pip install layout-sweep",
        )
    extras = [
        f"{name} (layout-sweep[{extra}])"
        for name, extra in OPTIONAL.items()
        if versions[name] is None
    ]
    return Check(
        name="packages",
        status=Status.OK,
        found=found,
        advice=f"not installed, and not always needed: {', '.join(extras)}" if extras else "",
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


_TORCH_QUESTION = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and torch.distributed.is_nccl_available() else None,
    "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
}))
"""


def _begin(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _answer(process: subprocess.Popen[str]) -> tuple[str | None, str]:
    """What a program printed last, or None and why there is nothing."""
    try:
        said, complaint = process.communicate(timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None, f"no answer within {IMPORT_SECONDS:.0f} s"
    if process.returncode == 0 and said.strip():
        return said.strip().splitlines()[-1], ""
    lines = complaint.strip().splitlines()
    return None, lines[-1][:300] if lines else f"exit code {process.returncode}"


def _torch(process: subprocess.Popen[str]) -> Check:
    said, complaint = _answer(process)
    if said is None:
        if _version("torch") is None:
            return Check(
                name="torch",
                status=Status.WARN,
                found="not installed",
                advice="planning and looking need none; to train with workload llama: pip install 'layout-sweep[train]'",
            )
        return Check(
            name="torch",
            status=Status.FAIL,
            found=f"cannot be imported: {complaint}",
            advice="reinstall torch",
        )
    facts: Mapping[str, object] = json.loads(said)
    devices = facts["devices"]
    found = f"{facts['version']}, " + (
        f"CUDA {facts['cuda']}, NCCL {facts['nccl']}, {len(devices)} x {devices[0]}"
        if isinstance(devices, list) and devices
        else "CPU only"
    )
    if not facts["gloo"]:
        return Check(
            name="torch",
            status=Status.FAIL,
            found=f"{found}, without gloo",
            advice="CPU ranks meet over gloo: install torch from PyPI",
        )
    if not devices and _driver_gpus():
        advice = "the driver has GPUs that torch does not see: is it a CPU build, or is CUDA_VISIBLE_DEVICES empty?"
        return Check(name="torch", status=Status.WARN, found=found, advice=advice)
    return Check(name="torch", status=Status.OK, found=found)


def _gpus() -> Check:
    from orchestrator.node.gpu_monitor import clean, device_name  # pydantic, 0.05 s

    name, indices = device_name(), _driver_gpus()
    if name is None:
        if indices:
            advice = "without NVML no GPU usage is recorded, and foreign processes are not seen: pip install 'layout-sweep[gpu]'"
            return Check(
                name="gpus",
                status=Status.WARN,
                found=f"{len(indices)} by the driver, but NVML does not answer",
                advice=advice,
            )
        return Check(
            name="gpus",
            status=Status.OK,
            found="none: a slot is a core, and trials run one after another",
        )
    held = [reason for index in indices for reason in (clean([index]),) if reason is not None]
    found = f"{max(len(indices), 1)} x {name}"
    if held:
        return Check(
            name="gpus",
            status=Status.WARN,
            found=f"{found}; {'; '.join(held)}",
            advice="what else runs there disturbs what is measured",
        )
    return Check(name="gpus", status=Status.OK, found=f"{found}, no compute process on them")


def _driver_gpus() -> list[str]:
    """Indices of the GPUs that the kernel's driver has."""
    folder = Path("/proc/driver/nvidia/gpus")
    try:
        return [str(index) for index, _ in enumerate(folder.iterdir())]
    except OSError:
        return []


def _ray(process: subprocess.Popen[str]) -> Check:
    said, complaint = _answer(process)
    if said is None:
        return Check(
            name="ray",
            status=Status.FAIL,
            found=f"cannot be imported: {complaint}",
            advice="reinstall ray (pip install layout-sweep)",
        )
    return Check(
        name="ray",
        status=Status.OK,
        found=f"{said}; a local one starts with each `sweep run`, unless --ray-address names a cluster",
    )


def _cluster(address: str | None) -> Check:
    from orchestrator.cluster.ray.scheduler import RayScheduler  # Ray takes seconds to import

    try:
        with tempfile.TemporaryDirectory() as folder:
            scheduler = RayScheduler(address=address, device=None, root=Path(folder))
            slots = scheduler.slots
            scheduler.close()
    except SweepError as exc:
        return Check(
            name="cluster",
            status=Status.FAIL,
            found=str(exc),
            advice="is it up (ray status), and do both sides run the same Ray?",
        )
    unit = "GPUs" if slots.device == "cuda" else "cores"
    return Check(
        name="cluster",
        status=Status.OK,
        found=f"{address}: {len(slots.nodes)} node(s), {unit} {slots.by_size}",
    )


def _access(ray_address: str | None) -> list[Check]:
    """Who can reach or read what Ray must keep to itself."""
    from orchestrator.core.machines.exposure import exposures
    from orchestrator.node.exposure import ray_facts

    facts = ray_facts(os.environ, cluster_address=ray_address)
    found = exposures(facts)
    if not found:
        token = (
            f"token in {facts.token_file}, mode {facts.token_file_mode:o}"
            if facts.token_file_mode is not None
            else "no token, none needed"
        )
        listening = (
            f"{len(facts.listeners)} of Ray's sockets on this machine, none open to others without one"
            if facts.listeners
            else token
        )
        return [Check(name="ray access", status=Status.OK, found=listening)]
    return found


def _environment(ray_address: str | None) -> list[Check]:
    """What ranks see of this environment, and what a Ray that others have started here shows to whatever runs in it."""
    from orchestrator.core.trial.rank_environment import holds_secret, needed
    from orchestrator.node.exposure import secrets_of_raylets

    num_seen, secrets = (
        len(needed(os.environ)),
        [name for name, value in os.environ.items() if holds_secret(name, value)],
    )
    found = f"ranks see {num_seen} of its {len(os.environ)} variables" + (
        f", and none of {_names(secrets)}" if secrets else ""
    )
    if ray_address is not None:
        found += "; Ray's processes on a cluster have the environment in which each node's `ray start` was called"
    advice = "pass others by workload.options.pass_env, secrets by env_from"
    checks = [Check(name="environment", status=Status.OK, found=found, advice=advice)]
    for pid, names in secrets_of_raylets().items():
        told = f"the Ray of process {pid} was started with {_names(names)}: whatever runs in it can read them"
        advice = (
            f"start it without them: env {' '.join(f'-u {name}' for name in names)} ray start ..."
        )
        checks.append(Check(name="environment", status=Status.WARN, found=told, advice=advice))
    return checks


def _names(names: Sequence[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (
        f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    )


def _database(db: str | None) -> Check:
    from db import migrate, schema
    from db.connection import url  # SQLAlchemy, 0.3 s
    from db.connection.engine import Database

    try:
        resolved = url.resolve(db)
        where = url.display(resolved)
        if resolved.drivername == "sqlite" and not Path(str(resolved.database)).exists():
            url.refuse_network_file_system(resolved)
            return _new_file(Path(str(resolved.database)), where)
        database = Database(resolved)
        try:
            version = database.read(
                lambda connection: migrate.current_version(connection, where=where)
            )
            database.write(
                lambda connection, change: None
            )  # takes the write lock, and gives it back
        finally:
            database.close()
    except SweepError as exc:
        return Check(name="database", status=Status.FAIL, found=str(exc))
    if version not in (None, schema.SCHEMA_VERSION):
        advice = migrate.cure(str(version))
        found = f"{where} has schema {version}, this program needs {schema.SCHEMA_VERSION}"
        return Check(name="database", status=Status.FAIL, found=found, advice=advice)
    return Check(
        name="database",
        status=Status.OK,
        found=f"{where}, writable, " + (f"schema {version}" if version else "still empty"),
    )


def _reader(db: str | None) -> list[Check]:
    """With which rights people's statements are asked; nothing to say of SQLite, which is opened read-only."""
    from db.connection import url  # SQLAlchemy, 0.3 s

    try:
        resolved = url.resolve(db)
    except SweepError:
        return []  # the check of the database has said it
    if resolved.drivername == "sqlite":
        return []
    from db.sql import reader_role  # needs SQLAlchemy

    has_reader = bool(os.environ.get(url.READER_VARIABLE))
    try:
        as_role = reader_role.role_of_statements(resolved)
    except SweepError as exc:
        if not has_reader:
            return []  # as above
        return [
            Check(
                name="sql reader",
                status=Status.FAIL,
                found=str(exc),
                advice="`sweep sql` is refused until then",
            )
        ]
    if as_role.is_own_login:
        return [
            Check(
                name="sql reader",
                status=Status.OK,
                found=f"`sweep sql` asks as role {as_role.name}, which may only select",
            )
        ]
    found = f"`sweep sql` asks as role {as_role.name}; only this program's own check of each statement keeps it from writing"
    advice = f"have a role made that may only select, and name it in {url.READER_VARIABLE}: sweep db grant-reader"
    return [Check(name="sql reader", status=Status.WARN, found=found, advice=advice)]


def _new_file(path: Path, where: str) -> Check:
    folder = _nearest_existing(path.parent)
    if not _can_be_written(folder):
        advice = "make it writable, or choose another place with SWEEP_DB"
        return Check(
            name="database",
            status=Status.FAIL,
            found=f"{where} cannot be made: {folder} is not writable",
            advice=advice,
        )
    return Check(name="database", status=Status.OK, found=f"{where}, made by the first `sweep run`")


def _home() -> Check:
    home = sweep_home()
    folder = _nearest_existing(home)
    free = shutil.disk_usage(folder).free
    found = f"{home}, {show.memory(free)} free"
    if not _can_be_written(folder):
        return Check(
            name="SWEEP_HOME",
            status=Status.FAIL,
            found=f"{folder} is not writable",
            advice="choose another place: SWEEP_HOME=FOLDER",
        )
    if free < GOOD_FREE_BYTES:
        status = Status.FAIL if free < MIN_FREE_BYTES else Status.WARN
        return Check(
            name="SWEEP_HOME",
            status=status,
            found=found,
            advice="logs and results go there: make room",
        )
    return Check(name="SWEEP_HOME", status=Status.OK, found=found)


def _can_be_written(folder: Path) -> bool:
    """Tried: what permissions allow, a file system may still refuse."""
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


def _nearest_existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _ports() -> Check:
    try:
        for _ in range(2):
            with (
                socket.create_server(("127.0.0.1", 0)) as server,
                socket.create_connection(server.getsockname(), timeout=5),
            ):
                pass
    except OSError as exc:
        advice = "ranks of one node meet there: look at the container's network and ulimits"
        return Check(
            name="ports",
            status=Status.FAIL,
            found=f"127.0.0.1 cannot be used: {exc.strerror}",
            advice=advice,
        )
    return Check(name="ports", status=Status.OK, found="127.0.0.1 can be bound and reached")


def _proc() -> Check:
    try:
        Path("/proc/self/stat").read_text()
        Path("/proc/1/stat").read_text()
    except OSError as exc:
        advice = "processes that a trial leaves behind are found there: mount /proc without hidepid"
        return Check(
            name="/proc", status=Status.WARN, found=f"{exc.filename}: {exc.strerror}", advice=advice
        )
    return Check(name="/proc", status=Status.OK, found="readable")


def _clean_up() -> Check:
    """What ends the processes of a trial whose programs leave daemons behind."""
    from orchestrator.node.cgroups import own_cgroup, why_no_cgroup

    reason = why_no_cgroup()
    if reason is None:
        return Check(
            name="clean-up",
            status=Status.OK,
            found=f"wardens, and a cgroup for each rank server below {own_cgroup()}",
        )
    advice = (
        "if all wardens of a trial are killed at once, its daemons are found by their environment only;"
        " a cgroup of your own ends them: systemd-run --user --scope -p Delegate=yes sweep run ..."
    )
    return Check(
        name="clean-up",
        status=Status.OK,
        found=f"wardens, without a cgroup: {reason}",
        advice=advice,
    )


def _clock() -> Check:
    now = datetime.now(tz=UTC)
    found = f"{now:%Y-%m-%d %H:%M:%S} UTC"
    if now.year < 2025:
        return Check(
            name="clock",
            status=Status.FAIL,
            found=found,
            advice="set the clock: certificates and leases go by it",
        )
    try:
        with tempfile.NamedTemporaryFile(dir=_nearest_existing(sweep_home())) as file:
            skew = Path(file.name).stat().st_mtime - time.time()
    except OSError:
        return Check(
            name="clock", status=Status.OK, found=found
        )  # that the folder is not writable is said elsewhere
    if abs(skew) > CLOCK_SKEW_SECONDS:
        advice = "SWEEP_HOME lies on a server with another clock: synchronise them (ntp)"
        return Check(
            name="clock",
            status=Status.WARN,
            found=f"{found}, but files there are {skew:+.0f} s off",
            advice=advice,
        )
    return Check(name="clock", status=Status.OK, found=found)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} at once, {hard} at most"
    if soft != resource.RLIM_INFINITY and soft < GOOD_OPEN_FILES:
        return Check(
            name="open files",
            status=Status.WARN,
            found=found,
            advice=f"Ray opens many: ulimit -n {GOOD_OPEN_FILES * 16}",
        )
    return Check(name="open files", status=Status.OK, found=found)
