"""The commands about one trial: show, logs.

A trial's log files lie on the node that ran it; what the store keeps of them is the failed rank's last lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.defaults import existing_store
from orchestrator.cli.home import attempt_folders
from orchestrator.cli.output import (
    Column,
    DbOption,
    JsonOption,
    StyledText,
    examples,
    json_text,
    note,
    plain,
    write,
    write_json,
    write_line,
    write_table,
)
from orchestrator.cli.results import state_cell
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.lifecycle import IN_FLIGHT
from orchestrator.core.trial.machine_load import MachineLoad, said_of
from orchestrator.report import quantities as show_as
from orchestrator.report import records

if TYPE_CHECKING:
    from db.read.rows import AttemptRow, TrialDetail
    from db.store import Store
    from orchestrator.core.trial.failure_kinds import Failure
    from orchestrator.core.trial.measurement import Measurement

FOLLOW_SECONDS = 0.5
LOG_LINES_SHOWN = 50
EVENT_DETAIL_CHARACTERS = 160  # --json has all of it

TrialArgument = Annotated[
    int, typer.Argument(metavar="TRIAL", help="The trial's number (see `sweep trials`).", min=1)
]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(epilog=examples("sweep show 17", "sweep show 17 --json"))(show)
    app.command(
        epilog=examples("sweep logs 17", "sweep logs 17 --rank 3 --attempt 1", "sweep logs 17 -f")
    )(logs)


def show(trial: TrialArgument, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Show all that is known of a trial.

    Why it was proposed, what was predicted and measured, its attempts, where and on what they ran, and how they failed.
    """
    with existing_store(db) as store:
        detail = store.trial(trial)
    if as_json:
        write_json("show", records.detail_record(detail))
        return
    _print_head(detail)
    for attempt in detail.attempts:
        _print_attempt(attempt, detail.cell.cell.num_gpus)
    _print_events(detail)


def _print_head(detail: TrialDetail) -> None:
    trial, layout = detail.trial, detail.trial.layout
    write_line(
        f"Trial {trial.id}: {trial.state.replace('_', ' ')}",
        style=state_cell(trial.state).style or "bold",
    )
    rows = [
        ("sweep", detail.sweep_name),
        ("cell", detail.cell.cell.key),
        ("layout", layout.key),
        (
            "",
            f"world size {layout.world_size}, global batch {layout.global_batch_size}, {layout.short}",
        ),
        ("why", trial.why),
    ]
    if trial.condemned_by is not None:
        rows.append(
            (
                "condemned by",
                f"trial {trial.condemned_by}: this layout needs at least as much memory",
            )
        )
    _print_facts(rows)
    write()
    write_table(
        [
            Column(title=""),
            Column(title="predicted", right=True),
            Column(title="measured", right=True),
            Column(title="predicted/measured", right=True),
        ],
        [
            _compared(
                "tokens/s/GPU",
                trial.predicted_tokens_per_second_per_gpu,
                trial.tokens_per_second_per_gpu,
                show_as.tokens_rate,
            ),
            _compared(
                "peak memory",
                trial.predicted_memory_bytes,
                trial.peak_memory_allocated_bytes,
                show_as.memory,
            ),
        ],
    )


def _compared(name: str, predicted: float | None, measured: float | None, text: Any) -> list[str]:
    ratio = f"{predicted / measured:.2f}" if predicted is not None and measured else show_as.UNKNOWN
    return [name, text(predicted), text(measured), ratio]


def _print_facts(facts: list[tuple[str, str | None]]) -> None:
    """Names and values, the unknown left out."""
    columns = [Column(title="", style="dim"), Column(title="", wrap=True)]
    write_table(
        columns,
        [[f"  {name:<17}", value] for name, value in facts if value not in (None, "")],
        header=False,
    )


def _print_attempt(attempt: AttemptRow, num_gpus: int) -> None:
    write()
    held = attempt.held(num_gpus)
    seconds = (
        show_as.age_seconds(attempt.started_at, attempt.ended_at)
        if attempt.ended_at is not None
        else None
    )
    superseded = ""
    if attempt.superseded:
        superseded = (
            "; the median of all measured runs counts"
            if attempt.pooled
            else ", superseded: it does not count"
        )
    write_line(
        f"Attempt {attempt.number}: {attempt.state.replace('_', ' ')}{superseded}", style="bold"
    )
    phases = ", ".join(
        f"{phase.replace('_', ' ')} {show_as.duration(value)}"
        for phase, value in attempt.phase_seconds.items()
    )
    facts: list[tuple[str, str | None]] = [
        ("made for", str(attempt.purpose) if attempt.purpose is not None else None),
        (
            "started",
            f"{show_as.at(attempt.started_at)} UTC"
            + (f", took {show_as.duration(seconds)}" if seconds is not None else ""),
        ),
        ("nodes", ", ".join(attempt.nodes) if attempt.nodes else None),
        (
            "shared nodes",
            "yes: other trials ran on them meanwhile" if attempt.shared_nodes else None,
        ),
        ("machine load", _load_text(attempt.load)),
        ("phases", phases),
        (
            "GPU-hours",
            f"{show_as.gpu_hours(held.held)}: {show_as.shares(held.parts)}"
            if held is not None and held.held
            else None,
        ),
        ("", _more_than_held(attempt, num_gpus)),
        (
            "processes killed",
            f"{attempt.processes_killed} left over beyond the ranks"
            if attempt.processes_killed
            else None,
        ),
        ("environment", _environment_text(attempt.environment or {})),
        ("fingerprint", _fingerprint_text(attempt)),
    ]
    _print_facts(facts)
    if attempt.measurement is not None:
        _print_measurement(attempt.measurement, attempt)
    if attempt.failure is not None:
        _print_failure(attempt.failure)


def _more_than_held(attempt: AttemptRow, num_gpus: int) -> str | None:
    """Say so where the reported steps add up to more than the attempt took: all of its time counts as useful then."""
    if attempt.measurement is None or attempt.gpu_seconds is None or attempt.timed_seconds is None:
        return None
    told, held = sum(attempt.measurement.step_seconds), attempt.gpu_seconds / num_gpus
    if told <= held or attempt.timed_seconds < held:
        return None
    return (
        f"the program reported {show_as.duration(told)} of steps, but held its GPUs for {show_as.duration(held)}:"
        " it did not run them in real time"
    )


def _load_text(load: MachineLoad) -> str | None:
    """Who used the cores, and how the GPUs were clocked; first what spoils the result."""
    if not load.is_known:
        return None
    texts = [said] if (said := said_of(load)) is not None else []
    if load.cpu_cores is not None and load.others_cpu_cores is not None:
        shares = {
            "its own": load.own_cpu_cores,
            "its sweep's": load.sweep_cpu_cores,
            "others'": load.others_cpu_cores,
        }
        told = ", ".join(f"{name} {used:.1f}" for name, used in shares.items() if used is not None)
        texts.append(f"of {load.cpu_cores:g} cores: {told}")
    if load.gpu_clock_ratio is not None:
        heat = (
            f", {load.gpu_temperature_celsius:.0f} °C"
            if load.gpu_temperature_celsius is not None
            else ""
        )
        why = (
            f", limited by {', '.join(reason.replace('_', ' ') for reason in load.gpu_throttle_reasons)}"
            if load.gpu_throttle_reasons
            else ""
        )
        texts.append(f"GPUs at {load.gpu_clock_ratio:.0%} of their clock{heat}{why}")
    return "; ".join(texts) or None


def _environment_text(environment: Mapping[str, Any]) -> str:
    """`NAME=value, ...`; where nodes differ, `NAME=value on NODE / value on NODE`."""
    texts = []
    for name, value in environment.items():
        told = (
            value
            if isinstance(value, str)
            else " / ".join(f"{of or 'not set'} on {node}" for node, of in value.items())
        )
        texts.append(f"{name}={told}")
    return ", ".join(texts)


def _fingerprint_text(attempt: AttemptRow) -> str | None:
    fingerprint = attempt.fingerprint
    if fingerprint is None:
        return None
    stack = {
        name: value for name, value in fingerprint.stack.model_dump().items() if value is not None
    }
    code = f"git {fingerprint.git_sha[:12]}" if fingerprint.git_sha else None
    dirty = (
        f"uncommitted changes {fingerprint.dirty_diff_digest[:8]}"
        if fingerprint.dirty_diff_digest
        else None
    )
    if fingerprint.git_sha is None and fingerprint.dirty_diff_digest:
        dirty = f"program {fingerprint.dirty_diff_digest}"
    version = f"layout-sweep {fingerprint.orchestrator_version}"
    known = [*(part for part in (code, dirty) if part), *(f"{k} {v}" for k, v in stack.items())]
    return ", ".join(
        [fingerprint.digest, version, *known, *(f"{k}={v}" for k, v in fingerprint.settings)]
    )


def _print_measurement(measurement: Measurement, attempt: AttemptRow) -> None:
    steps = measurement.step_time
    sure = show_as.confidence(steps.relative_confidence)
    gpu = attempt.gpu
    facts: list[tuple[str, str | None]] = [
        (
            "tokens/s/GPU",
            f"{show_as.tokens_rate(measurement.tokens_per_second_per_gpu)}, all GPUs {show_as.tokens_rate(measurement.tokens_per_second)}",
        ),
        (
            "step",
            f"median {show_as.step_time(steps.median)} {sure} (95 %), IQR {show_as.step_time(steps.iqr)}, {steps.num_steps} steps"
            + (
                f"; less sure than asked for: {why}"
                if (why := _why_unsure(measurement)) is not None
                else ""
            ),
        ),
        (
            "MFU, HFU",
            f"{show_as.percent(measurement.mfu)}, {show_as.percent(measurement.hfu)}"
            if measurement.mfu is not None
            else None,
        ),
        ("", f"formula {measurement.mfu_formula}"),
        (
            "peak",
            f"{measurement.peak_flops / 1e12:,.3g} TFLOP/s per device ({measurement.peak_flops_source})"
            if measurement.peak_flops is not None
            else None,
        ),
        (
            "memory",
            f"allocated {show_as.memory_of(measurement.peak_memory_allocated_bytes, measurement.device_memory_bytes)}"
            + (
                f", reserved {show_as.memory(measurement.peak_memory_reserved_bytes)}"
                if measurement.peak_memory_reserved_bytes is not None
                else ""
            ),
        ),
        (
            "",
            ", ".join(
                f"{part} {show_as.memory(size)}"
                for part, size in (attempt.memory_by_part or {}).items()
            ),
        ),
        (
            "allocator retries",
            f"{measurement.allocator_retries}{': thrashing at the memory edge' if measurement.thrashing else ''}"
            if measurement.allocator_retries
            else None,
        ),
        (
            "loss",
            f"{measurement.loss_first:.4f} first, {measurement.loss_last:.4f} last"
            if measurement.loss_first is not None and measurement.loss_last is not None
            else None,
        ),
        (
            "GPU busy",
            show_as.percent(gpu.utilisation)
            if gpu is not None and gpu.utilisation is not None
            else None,
        ),
        (
            "GPU power",
            f"{gpu.power_watts:.0f} W" if gpu is not None and gpu.power_watts is not None else None,
        ),
    ]
    _print_facts(facts)


def _why_unsure(measurement: Measurement) -> str | None:
    from orchestrator.core.trial.measurement import why_unsure  # pydantic, 0.05 s

    steps = measurement.step_time
    return why_unsure(
        confident=measurement.confident,
        num_steps=steps.num_steps,
        relative_confidence=steps.relative_confidence,
    )


def _print_failure(failure: Failure) -> None:
    ended = (
        f"signal {failure.signal}"
        if failure.signal is not None
        else f"exit code {failure.exit_code}"
        if failure.exit_code is not None
        else ""
    )
    where = ", ".join(
        text
        for text in (
            f"rank {failure.rank}" if failure.rank is not None else "",
            f"node {failure.node}" if failure.node else "",
            f"phase {failure.phase}" if failure.phase else "",
            f"step {failure.step}" if failure.step is not None else "",
            ended,
        )
        if text
    )
    _print_facts(
        [
            ("failure", failure.kind),
            ("", failure.message),
            ("where", where),
            ("evidence", failure.evidence),
            ("log", failure.log_path),
        ]
    )
    if failure.log_tail.strip():
        write_line("  last lines:", style="dim")
        for line in failure.log_tail.rstrip().splitlines()[-LOG_LINES_SHOWN:]:
            write(f"    {plain(line)}")


def _print_events(detail: TrialDetail) -> None:
    write()
    write_line("Events", style="bold")
    columns = [
        Column(title="at (UTC)"),
        Column(title="event"),
        Column(title="attempt", right=True),
        Column(title="state"),
        Column(title="detail", wrap=True),
    ]
    rows: list[list[str | StyledText]] = [
        [
            show_as.at(event.at),
            event.event,
            str(event.attempt) if event.attempt is not None else "",
            " -> ".join(state for state in (event.from_state, event.to_state) if state),
            json_text(event.detail)[:EVENT_DETAIL_CHARACTERS] if event.detail else "",
        ]
        for event in detail.events
    ]
    write_table(columns, rows)


def logs(
    trial: TrialArgument,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank", min=0, help="Default: the rank to blame, else rank 0.", show_default=False
        ),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", min=1, help="Default: the last one.", show_default=False),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the attempt ends.")
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what a rank of a trial printed.

    Where its files are on another node, the last lines that the store keeps.
    """
    if follow and as_json:
        raise UsageInvalid(
            "--follow has no end to put into one JSON document; leave one of them out"
        )
    with existing_store(db) as store:
        detail = store.trial(trial)
        chosen = _chosen_attempt(detail, attempt)
        failure = chosen.failure
        rank = (
            rank
            if rank is not None
            else failure.rank
            if failure is not None and failure.rank is not None
            else 0
        )
        path = _log_path(detail, chosen, rank)
        if as_json:
            text, is_stored = _whole_text(path, chosen, rank)
            fields = {
                "trial_id": trial,
                "attempt": chosen.number,
                "rank": rank,
                "path": path,
                "from_store": is_stored,
                "text": text,
            }
            write_json("logs", fields)
        elif path is not None:
            note(f"{path}")
            for chunk in (
                _chunks(path, store, trial, chosen.number)
                if follow
                else iter([_read_from(path, 0)[0]])
            ):
                sys.stdout.write(plain(chunk.decode(errors="replace"), lines=True))
                sys.stdout.flush()
        else:
            text, _ = _whole_text(None, chosen, rank)
            note(
                f"the files of attempt {chosen.number} are not on this machine; these are the last lines of rank {rank} that the store keeps"
            )
            write(plain(text.rstrip("\n"), lines=True))


def _chosen_attempt(detail: TrialDetail, number: int | None) -> AttemptRow:
    if not detail.attempts:
        raise UsageInvalid(
            f"trial {detail.trial.id} is {detail.trial.state.replace('_', ' ')} and was never launched: it has no logs"
        )
    if number is None:
        return detail.attempts[-1]
    found = next((attempt for attempt in detail.attempts if attempt.number == number), None)
    if found is None:
        raise UsageInvalid(
            f"trial {detail.trial.id} has no attempt {number}; it has {', '.join(str(a.number) for a in detail.attempts)}"
        )
    return found


def _log_path(detail: TrialDetail, attempt: AttemptRow, rank: int) -> Path | None:
    """The rank's log file where it lies on this machine: as its failure says, or where this machine's launcher puts it."""
    from orchestrator.core.trial.protocol import log_file  # pydantic, 0.05 s

    folders = attempt_folders(detail.run_folder, detail.trial.id, attempt.number)
    failure = attempt.failure
    if (
        failure is not None
        and failure.log_path
        and Path(failure.log_path).name == log_file(failure.rank or 0)
    ):
        folders.insert(0, Path(failure.log_path).parent)
    return next(
        (path for folder in folders for path in (folder / log_file(rank),) if path.is_file()), None
    )


def _whole_text(path: Path | None, attempt: AttemptRow, rank: int) -> tuple[str, bool]:
    """A rank's output, and whether it is only what the store keeps. Raises UsageInvalid where there is neither."""
    if path is not None:
        return plain(_read_from(path, 0)[0].decode(errors="replace"), lines=True), False
    failure = attempt.failure
    if failure is None or not failure.log_tail or failure.rank not in (None, rank):
        where = f" on {', '.join(attempt.nodes)}" if attempt.nodes else ""
        raise UsageInvalid(
            f"no log of rank {rank} of attempt {attempt.number} is on this machine, and the store keeps only a failed rank's last lines."
            f" Its files are under SWEEP_HOME{where}"
        )
    return failure.log_tail, True


def _read_from(path: Path, offset: int) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
    except OSError as exc:
        raise UsageInvalid(f"cannot read {path}: {exc.strerror}") from exc
    return content, offset + len(content)


def _chunks(path: Path, store: Store, trial_id: int, attempt: int) -> Iterator[bytes]:
    """What is appended to a log, in whole lines, until its attempt has ended."""
    offset, rest = 0, b""
    while True:
        # Asked before reading: what was written until the end is still read.
        row = store.trial(trial_id)
        is_over = row.trial.num_attempts != attempt or row.trial.state not in IN_FLIGHT
        content, offset = _read_from(path, offset)
        lines, newline, rest = (rest + content).rpartition(b"\n")
        if newline:
            yield lines + newline
        if is_over:
            if rest:
                yield rest + b"\n"
            return
        time.sleep(FOLLOW_SECONDS)
