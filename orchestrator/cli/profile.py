"""The command `profile`: a trial's layout again, a few steps under torch.profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import Db, Json, RayAddress, TrialArgument
from orchestrator.cli.ray_start import start_ray_scheduler
from orchestrator.cli.run.ending import EXIT_SOME_FAILED
from orchestrator.cli.store import home
from orchestrator.cli.terminal.output import (
    Column,
    note,
    numbers,
    plain,
    write,
    write_json,
    write_line,
    write_table,
)
from orchestrator.core.errors import SweepInUse, UsageInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from db.read.rows import ProfileRow, TrialDetail
    from db.store import Store
    from orchestrator.cluster.contract import Scheduler
    from orchestrator.core.sweepfile.spec import SweepSpec


def profile(
    trial: TrialArgument,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also show the memory of the first four steps.")
    ] = False,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            metavar="RANK",
            help="Also show this rank, and keep its trace; may be given several times."
            " Rank 0 and the slowest are shown anyway.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="How many steps to profile.")] = 3,
    ray_address: RayAddress = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Show what the steps of a trial's layout are spent on.

    Runs the layout again, a few steps under torch.profiler. Nothing of it counts as a measurement.

    Examples:
      sweep profile 17
      sweep profile 17 --memory
      sweep profile 17 --rank 7 --ray-address auto
      sweep sql 'select part, part_seconds from v_profile where trial_id = 17'
    """
    from db.store import Store
    from orchestrator.core.trial.rank_profile import ProfilePlan
    from orchestrator.sweep.profiling import profile_trial

    with Store.open(db) as store:
        detail = store.trial(trial)
        spec = _spec_of(detail, store, ray_address)
        plan = ProfilePlan(num_steps=steps, memory=memory, ranks=tuple(rank or ()))
        world_size = detail.trial.layout.world_size
        if any(one >= world_size for one in plan.ranks):
            raise UsageInvalid(f"--rank: trial {trial} has ranks 0 to {world_size - 1}")
        scheduler = _join(ray_address, spec, detail)
        try:
            note(f"Profiling trial {trial}: {detail.trial.layout.short} ...")
            result = profile_trial(detail, spec, plan, scheduler=scheduler, store=store)
        finally:
            scheduler.close()
        row = store.trial(trial).profiles[-1]
    if as_json:
        from orchestrator.report import records

        write_json("profile", {"trial_id": trial, **records.profile_record(row)})
    else:
        print_profile(row)
    if result.failure is not None:
        raise typer.Exit(EXIT_SOME_FAILED)


def _spec_of(detail: TrialDetail, store: Store, ray_address: str | None) -> SweepSpec:
    """The sweep file of the trial's last run. Raises UsageInvalid if it cannot be profiled."""
    from orchestrator.cli.sweep_file import stored_spec
    from orchestrator.core.pretend.simulated_name import SIMULATED_SUFFIX
    from orchestrator.sweep.profiling import refusal

    row = store.sweep_named(detail.sweep_name)
    spec = stored_spec(row)
    why = refusal(spec)
    if why is None and detail.sweep_name.endswith(SIMULATED_SUFFIX):
        why = "the sweep is simulated: nothing ran"
    if why is not None:
        raise UsageInvalid(f"trial {detail.trial.id} cannot be profiled: {why}")
    if row.holder is not None and ray_address is None:
        raise SweepInUse(
            f"sweep {row.name!r} is being measured by pid {row.holder.pid} on {row.holder.host}: a"
            " profile on the same cores or GPUs would disturb it. Wait until it ends, or give"
            " --ray-address of its cluster"
        )
    return spec


def _join(ray_address: str | None, spec: SweepSpec, detail: TrialDetail) -> Scheduler:
    from orchestrator.cli.run import checks as run_checks

    return start_ray_scheduler(
        ray_address,
        root=home.run_root(detail.run_folder),
        device=spec.device,
        gpus_per_node=spec.gpus_per_node,
        rank_environment=run_checks.rank_environment(spec),
        rank_secrets=run_checks.rank_secrets(spec),
    )


def print_profile(row: ProfileRow) -> None:
    """Print a profile: the split of each rank that is kept, remarks, advice and memory."""
    from orchestrator.report import profile_text
    from orchestrator.report import quantities as show_as

    title = f"Profile {row.number}: {row.state}"
    write_line(f"{title}, {show_as.at(row.started_at)} UTC, measures nothing", style="bold")
    if row.failure_kind is not None:
        write_line(f"  {row.failure_kind}: {plain(row.failure_message or '')}")
    if row.ranks:
        titles = [
            title
            for rank, one in row.ranks.items()
            for title in (f"rank {rank}{', slowest' if one.is_slowest else ''}", "")
        ]
        write_table(
            [Column("part of a step"), *numbers(*titles)], profile_text.split_rows(row.ranks)
        )
        for line in profile_text.remarks(row.ranks):
            write_line(f"  {line}")
        for rank, one in row.ranks.items():
            if one.trace_path is not None:
                write_line(f"  trace of rank {rank}: {plain(one.trace_path)}")
        write_line("  Perfetto shows a trace: open it at https://ui.perfetto.dev")
    _print_lines("Advice", row.advice)
    if row.memory:
        write()
        write_line("Memory of the first four steps, rank 0", style="bold")
        for line in profile_text.memory_chart(row.memory):
            write(line)


def _print_lines(title: str, lines: Sequence[str]) -> None:
    if lines:
        write_line(title, style="bold")
    for line in lines:
        write_line(f"  - {line}")
