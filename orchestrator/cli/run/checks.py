"""Checks before `sweep run` starts anything: layouts, devices, store, folders, variables.

The functions import what they need, so that `sweep --help` loads none of it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from layout_sweep.regular_file import read_regular
from orchestrator.cli.store import home
from orchestrator.cli.sweep_file import assumed_gpus_per_node
from orchestrator.cli.terminal import surroundings
from orchestrator.cli.terminal.output import note
from orchestrator.cluster.ray import session_folder
from orchestrator.core.errors import ResourcesInsufficient, StoreUnavailable, UsageInvalid
from orchestrator.report.quantities import counted

if TYPE_CHECKING:
    from orchestrator.core.problem.cell import Cell
    from orchestrator.core.search.space import CellSpace, CellSpaces
    from orchestrator.core.sweepfile.command_options import CommandOptions
    from orchestrator.core.sweepfile.spec import SweepSpec

_CELLS_NAMED = 3
# Combinations of the values of {names} in a command: each needs a few looks at the file system.
_MOST_COMBINATIONS = 64
# A script is searched for the names of its variables up to this size.
_MOST_SCRIPT_BYTES = 1 << 20


def check_some_layout_is_legal(spec: SweepSpec, spaces: CellSpaces) -> None:
    """Raise UsageInvalid if no cell has a legal layout."""
    from orchestrator.core.search.axis_values import unsplit_batch

    problems = []
    for cell in spec.cells():
        space = _assumed_space(spec, spaces, cell)
        if len(space.legal):
            return
        reasons = sorted(space.rejected.items(), key=lambda item: -item[1])[:2]
        texts = [f"of {counted(count, 'layout')}, {reason}" for reason, count in reasons]
        problems.append(f"{cell.key}: {unsplit_batch(spec, cell) or '; '.join(texts)}")
    num_more = len(problems) - _CELLS_NAMED
    more = f" and {counted(num_more, 'more cell')}" if num_more > 0 else ""
    raise UsageInvalid(
        f"no layout is legal in any cell. {'. '.join(problems[:_CELLS_NAMED])}{more}. `sweep plan`"
        " lists all reasons"
    )


def _assumed_space(spec: SweepSpec, spaces: CellSpaces, cell: Cell) -> CellSpace:
    """The space of a cell on nodes as the run should find them: so it enumerates no cell again."""
    space = spaces.of(cell, gpus_per_node=assumed_gpus_per_node(spec))
    if not len(space.legal) and spec.gpus_per_node == "auto":
        # A cluster may have larger nodes, and these allow more.
        space = spaces.of(cell, gpus_per_node=cell.num_gpus)
    return space


def check_this_machine(spec: SweepSpec) -> None:
    """Find at once what a local Ray would find only after seconds.

    Raises UsageInvalid, ResourcesInsufficient or MachineUnready.
    """
    from importlib.util import find_spec

    from orchestrator.cluster.contract import Slots, shapes_of
    from orchestrator.core.search.axis_values import unsplit_batch
    from orchestrator.core.trial.protocol import Device
    from orchestrator.node.gpu_monitor import device_name

    if spec.workload.name == "llama" and find_spec("torch") is None:
        raise UsageInvalid(
            "workload llama needs torch, which is not installed here: pip install"
            " '.[train]' in the cloned folder"
        )
    session_folder.usable_parent(os.environ)
    surroundings.check_for_ray()
    if Path("/dev/nvidiactl").exists() or device_name() is not None:
        return
    cores = os.cpu_count() or 1
    slots = Slots(device=Device.CPU, device_name=None, nodes={"here": cores})
    if spec.device not in ("auto", "cpu"):
        slots = Slots(device=Device.CUDA, device_name=None, nodes={})
    per_node = spec.gpus_per_node if isinstance(spec.gpus_per_node, int) else cores
    try:
        shapes_of(spec.cells(), slots, gpus_per_node=per_node, device=spec.device)
    except ResourcesInsufficient as exc:
        # Where a batch does not fit such a number either, other hardware would not help.
        unsplit = [text for cell in spec.cells() if (text := unsplit_batch(spec, cell)) is not None]
        also = f". Besides, {unsplit[0]}" if unsplit else ""
        raise ResourcesInsufficient(f"{exc}{also}") from None


def check_program(spec: SweepSpec) -> None:
    """Raise UsageInvalid if a command's folder, program, script or file format is not here.

    What only a rank knows, such as its run directory, is checked by the rank.
    """
    from orchestrator.core.sweepfile.command_options import CommandOptions
    from orchestrator.core.sweepfile.program_files import Files, why_not_startable

    options = spec.workload.options
    if not isinstance(options, CommandOptions):
        return
    _check_toml(options)
    here = Files(
        exists=os.path.exists,
        is_folder=os.path.isdir,
        may_run=lambda path: os.access(path, os.X_OK),
    )
    for argv, cwd, search_path in _filled(spec, options):
        if options.cwd is not None and cwd is None:
            # Relative paths start in a folder that only a rank knows.
            first = argv[0] or ""
            argv = [first if first.startswith("/") or "/" not in first else None]
        problem = why_not_startable(
            argv, cwd=cwd, search_path=search_path, files=here, written=options.files
        )
        if problem is not None:
            raise UsageInvalid(problem)


def values_not_passed(spec: SweepSpec, spaces: CellSpaces) -> str | None:
    """Return which values vary and do not reach the program, with the fix.

    None: all do, its script cannot be read here, or the sweep starts no command.
    """
    from orchestrator.core.machines.program_contract import how_to_pass, not_passed
    from orchestrator.core.problem.layout import NAMED_AXES
    from orchestrator.core.search.space import SpaceTooLarge
    from orchestrator.core.sweepfile.command_options import CommandOptions
    from orchestrator.core.sweepfile.passed_values import names_passed, varying_values

    options = spec.workload.options
    script = text_of_script(options) if isinstance(options, CommandOptions) else None
    if not isinstance(options, CommandOptions) or script is None:
        return None
    passed = names_passed(options, spec.axes.options, script)
    if {*NAMED_AXES, "sequence_length", *spec.axes.options} <= passed:
        return None
    tables = []
    for cell in spec.cells():
        with suppress(SpaceTooLarge):
            tables.append(_assumed_space(spec, spaces, cell).legal)
    missing = not_passed(varying_values(tables, spec.sequence_length), passed)
    if not missing:
        return None
    return f"{', '.join(missing)} may not reach the program: {how_to_pass(missing)}"


def text_of_script(options: CommandOptions) -> str | None:
    """Return the text of the program's script.

    None: it has none, it is no file here, or it is very large.
    """
    from orchestrator.core.sweepfile.program_files import script_of

    script = script_of(options.argv)
    if script is None or "{" in script or "{" in (options.cwd or ""):
        return None
    if isinstance(written := options.files.get(script.removeprefix("./")), str):
        return written
    path = Path(options.cwd or "") / script
    if not path.is_absolute():
        return None
    try:
        found = read_regular(path, num_bytes=_MOST_SCRIPT_BYTES)
    except OSError:
        return None
    is_whole = found.size <= _MOST_SCRIPT_BYTES
    return found.content.decode(errors="replace") if is_whole else None


def _check_toml(options: CommandOptions) -> None:
    """Raise UsageInvalid if a file is TOML, which a package has to write, and that is missing.

    An environment that is older than this program may lack it.
    """
    from importlib.util import find_spec

    from orchestrator.core.frameworks.translation import TABLES
    from orchestrator.core.sweepfile.config_files import format_of

    names = [name for name, content in options.files.items() if not isinstance(content, str)]
    table = TABLES[options.framework] if options.framework is not None else None
    if table is not None and table.file is not None:
        names.append(table.file)
    written = [name for name in names if format_of(name) == "TOML"]
    if written and find_spec("tomli_w") is None:
        raise UsageInvalid(
            f"workload.options.files: {written[0]} needs the package tomli-w, which is not"
            " installed here: pip install 'tomli-w>=1.2'"
        )


def _filled(
    spec: SweepSpec, options: CommandOptions
) -> Iterator[tuple[list[str | None], str | None, str | None]]:
    """The argv, cwd and PATH of ranks for each combination of the values that a file gives.

    None for what has other {names}.
    """
    from itertools import islice, product

    from orchestrator.core.sweepfile.template import fill_known, names_in

    path = options.env.get("PATH")
    texts = [*options.argv, *filter(None, (options.cwd, path))]
    values = {name: given for name, given in spec.template_values().items() if given}
    named = [name for name in values if any(name in names_in(text) for text in texts)]
    for combination in islice(product(*(values[name] for name in named)), _MOST_COMBINATIONS):
        known = dict(zip(named, combination, strict=True))
        argv = [fill_known(word, known) for word in options.argv]
        cwd = fill_known(options.cwd, known) if options.cwd is not None else None
        search_path = fill_known(path, known) if path is not None else os.environ.get("PATH")
        yield argv, cwd, search_path


def check_home() -> None:
    """Raise StoreUnavailable if run folders cannot be written.

    Names SWEEP_HOME if the folder around it is new too: it may be mistyped.
    """
    folder = home.sweep_home()
    runs = folder / "runs"
    try:
        is_odd = not folder.parent.exists()
        runs.mkdir(parents=True, exist_ok=True)
        probe = runs / f".probe-{os.getpid()}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as exc:
        advice = "Set SWEEP_HOME to a folder that can be written to"
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "Free some space, or set SWEEP_HOME to a folder that has some"
        raise StoreUnavailable(
            f"run folders cannot be written to {runs}: {exc.strerror}. {advice}"
        ) from None
    if is_odd:
        note(f"New folder for runs: {folder} (SWEEP_HOME)")


def check_that_ray_keeps_it(db: str | None) -> None:
    """Raise UsageInvalid if the store is in a folder that Ray deletes after its job."""
    from db.connection import url
    from orchestrator.cluster.ray.job import is_unpacked

    store = url.resolve(db)
    if store.drivername == "sqlite" and is_unpacked(Path(str(store.database))):
        raise UsageInvalid(
            f"the store would be {store.database}, in the folder that Ray has unpacked for this job"
            ' and will delete. Name another: --runtime-env-json \'{"env_vars": {"SWEEP_DB":'
            ' "sqlite:////home/me/sweep.sqlite", "SWEEP_HOME": "/home/me/.sweep"}}\''
        )
    if is_unpacked(home.sweep_home()):
        note(
            f"Logs go to {home.sweep_home()}, which Ray will delete. To keep them, set SWEEP_HOME"
            " to another folder"
        )


def rank_environment(spec: SweepSpec) -> dict[str, str]:
    """The variables that the sweep file passes from this environment to ranks, without secrets."""
    from orchestrator.core.sweepfile.command_options import CommandOptions
    from orchestrator.core.trial.rank_environment import named

    options = spec.workload.options
    if not isinstance(options, CommandOptions):
        return {}
    # A rank would print the address of a webhook or tracker unredacted.
    addresses = {target.variable for target in spec.notify}
    addresses |= {spec.mirror.variable} if spec.mirror is not None else set()
    found = named(options.pass_env, os.environ)
    return {name: value for name, value in found.items() if name not in addresses}


def rank_secrets(spec: SweepSpec) -> dict[str, str]:
    """The variables whose values are secret: ranks get them, nothing writes or shows them.

    Raises UsageInvalid if one is not set.
    """
    from orchestrator.core.sweepfile.command_options import CommandOptions

    options = spec.workload.options
    names = options.env_from if isinstance(options, CommandOptions) else ()
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UsageInvalid(
            f"workload.options.env_from names {', '.join(missing)}, not set in this environment:"
            f" export {' '.join(missing)}, and run again"
        )
    return {name: os.environ[name] for name in names}
