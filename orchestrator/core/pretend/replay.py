"""A table of measured runs as something to search: its problems are cells, and what a launch of a layout returns is the run that was measured.

Of several runs of one layout one stands for all (run_table.standing_run). Knows nothing of files.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from math import prod
from typing import Any

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.pretend.run_table import (
    MeasuredRun,
    RunStatus,
    named_profile,
    parse_runs,
    standing_run,
)
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES, GIB, Hardware, from_label
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import PRESETS, ModelShape
from orchestrator.core.sweepfile.constraint_language import Names
from orchestrator.core.sweepfile.sections import Axes
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import Failure
from orchestrator.core.trial.failures import Evidence, classify
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.measurement import LAUNCH_SECONDS, hardware_flops_per_token
from orchestrator.core.trial.protocol import MeasurementPlan, RankResult

LAYOUT_OPTION = "layout"  # under which a rank is told the key of the layout to replay: one process stands for the whole gang
DEFAULT_PROFILE = "llama"  # what is believed of a sweep file without a section `trainer`
_SHAPE_COLUMNS = ("layers", "hidden", "heads", "ffn", "vocab")

Problem = tuple[str, int, int, int]  # digest of the model, GPUs, sequence length, global batch


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayTable:
    """One table: for each problem the run that stands for each layout, in the order of the rows."""

    table_id: str
    hardware: str  # the table's word
    memory_bytes: float | None  # of one GPU, as sold
    gpus_per_node: int
    models: Mapping[str, ModelShape]  # by digest
    runs: Mapping[Problem, Mapping[Layout, MeasuredRun]]

    @property
    def device(self) -> Hardware:
        """The device that the table's word means; of a stranger the nearest, with the memory that the table gives."""
        return from_label(self.hardware, memory_bytes=self.memory_bytes)

    @property
    def profile(self) -> str:
        """The named trainer that its words mean."""
        return named_profile(run for runs in self.runs.values() for run in runs.values())

    @property
    def digest(self) -> str:
        """Digest of what the table says: numbers of a changed table are other numbers."""
        rows = [
            (problem, layout.key, run.status, run.step_seconds, run.peak_memory_bytes)
            for problem, runs in self.runs.items()
            for layout, run in runs.items()
        ]
        return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]

    def layouts(self, cell: Cell) -> Collection[Layout]:
        """The layouts that were run in a cell: no other can be replayed."""
        return self.runs.get(_problem(cell), {}).keys()

    def run(self, cell: Cell, layout: Layout) -> MeasuredRun:
        """What a launch returns. Raises UsageInvalid for what the table lacks."""
        found = self.runs.get(_problem(cell), {}).get(layout)
        if found is None:
            raise UsageInvalid(f"table {self.table_id} has no run of {layout.key} in {cell.key}")
        return found

    def check(self, spec: SweepSpec) -> None:
        """Refuse a sweep whose cells or options the table cannot answer for. Raises UsageInvalid with what it has."""
        for cell in spec.cells():
            if _problem(cell) not in self.runs:
                raise UsageInvalid(
                    f"table {self.table_id} has no runs of {cell.key}; it has {'; '.join(self.problem_texts)}"
                )
        names, said = self._option_values(), dict(spec.axes.options)
        if set(names) != set(said):
            wanted = ", ".join(
                f"{name}: [{', '.join(map(_quoted, values))}]" for name, values in names.items()
            )
            raise UsageInvalid(
                f"axes.options names {', '.join(said) or 'nothing'}; table {self.table_id} varies in"
                f" {', '.join(names) or 'nothing beside the layout'}: write axes.options: {{{wanted}}}"
            )

    def sweep(self, *, name: str | None, path: str) -> dict[str, Any]:
        """A sweep file for the table, as data: its problems, every value that occurs as an axis, its memory limit, and the trainer it names.

        A sweep has every combination of models, GPUs, lengths and batches. Where the table lacks some, only its largest problem is meant.
        """
        problems = (
            list(self.runs)
            if self.is_complete
            else [max(self.runs, key=lambda problem: len(self.runs[problem]))]
        )
        layouts = [layout for runs in self.runs.values() for layout in runs]
        sizes = {
            size: sorted({getattr(layout, size) for layout in layouts})
            for size in Axes.model_fields
            if size not in ("recompute", "options")
        }
        axes = {**sizes, "recompute": sorted({str(layout.recompute) for layout in layouts})}
        device = self.device
        known = DEVICES.get(device.name)
        memory = (
            {}
            if known is not None and known.memory_bytes == device.memory_bytes
            else {"device_memory_gib": device.memory_bytes / GIB}
        )
        options = self._option_values()
        return {
            "name": name or _name(f"replay-{self.table_id}"),
            "model": [
                asdict(self.models[digest])
                for digest in dict.fromkeys(digest for digest, _, _, _ in problems)
            ],
            "gpus": sorted({gpus for _, gpus, _, _ in problems}),
            "gpus_per_node": self.gpus_per_node,
            "device": device.name if known is not None else "a100-80gb",
            **memory,
            **({"trainer": self.profile} if self.profile != DEFAULT_PROFILE else {}),
            "sequence_length": sorted({length for _, _, length, _ in problems}),
            "global_batch_size": sorted({batch for _, _, _, batch in problems}),
            "precision": sorted({str(layout.precision) for layout in layouts}),
            "axes": axes | ({"options": options} if options else {}),
            # Every run of a layout returns the same numbers: repeats would confirm nothing.
            "search": {"confirm": {"repeats": 0}},
            "workload": {"name": "replay", "options": {"table": path, "table_id": self.table_id}},
        }

    def _option_values(self) -> dict[str, list[str]]:
        found: dict[str, set[str]] = {}
        for runs in self.runs.values():
            for layout in runs:
                for name, value in layout.options:
                    found.setdefault(name, set()).add(str(value))
        return {name: sorted(values) for name, values in sorted(found.items())}

    @property
    def is_complete(self) -> bool:
        """Whether it has every combination of its models, GPUs, sequence lengths and batches."""
        return len(self.runs) == prod(len(set(values)) for values in zip(*self.runs, strict=True))

    @property
    def problem_texts(self) -> list[str]:
        """Its problems as overrides that choose them."""
        return [
            f"{self.models[digest].name}: gpus={gpus} sequence_length={length} global_batch_size={batch}"
            for digest, gpus, length, batch in self.runs
        ]


def read_table(text: str, table_id: str) -> ReplayTable:
    """Read one table of a CSV. Raises UsageInvalid when it is not there, or says too little to be searched."""
    runs = parse_runs(text)
    of_table = [run for run in runs if run.table_id == table_id]
    if not of_table:
        ids = list(dict.fromkeys(run.table_id for run in runs))
        close = get_close_matches(table_id, ids, n=1)
        hint = (
            f"did you mean {close[0]}?"
            if close
            else f"it has {', '.join(ids[:20])}{', ...' if len(ids) > 20 else ''}"
        )
        raise UsageInvalid(f"the file has no table {table_id!r}; {hint}")
    rows = [run for run in of_table if run.replay and run.layout is not None and _tells(run)]
    if not rows:
        raise UsageInvalid(
            f"table {table_id} has no row that can be replayed: replay = True, status ok with a time, oom or error"
        )
    missing = next((run for run in rows if run.model is None), None)
    if missing is not None:
        raise UsageInvalid(
            f"table {table_id} has no model shape: {_missing_of_shape(text, missing)}. It cannot be searched without"
        )
    for what, values in (
        ("hardware", {run.hardware for run in rows}),
        ("gpus_per_node", {run.gpus_per_node for run in rows}),
    ):
        if len(values) > 1:
            raise UsageInvalid(
                f"table {table_id} mixes {what} {', '.join(map(str, sorted(values, key=str)))}; one table is one kind of machine"
            )
    models = _named({run.model.digest: run.model for run in rows if run.model is not None})
    problems: dict[Problem, dict[Layout, list[MeasuredRun]]] = {}
    for run in rows:
        assert run.cell is not None
        problems.setdefault(_problem(run.cell), {}).setdefault(replayed_layout(run), []).append(run)
    first = rows[0]
    return ReplayTable(
        table_id=table_id,
        hardware=first.hardware,
        memory_bytes=first.memory_bytes,
        gpus_per_node=first.gpus_per_node,
        models=models,
        runs={
            problem: {layout: standing_run(same) for layout, same in layouts.items()}
            for problem, layouts in problems.items()
        },
    )


def replayed_layout(run: MeasuredRun) -> Layout:
    """The layout of a row, with what varies in its table beyond sizes as options."""
    assert run.layout is not None
    taken = {*Names().all, *Layout.__dataclass_fields__}
    # `recompute` and `precision` say in a source's words what no layout of ours does.
    named = ((f"{name}_word" if name in taken else name, value) for name, value in run.extra)
    return replace(run.layout, options=tuple(sorted(named)))


# --- what a launch returns ---


def replayed_result(run: MeasuredRun, device: Hardware) -> RankResult:
    """The numbers of a run that ended well, as one rank would hand them over: one step, for that is all that a table tells."""
    assert run.step_seconds is not None
    assert run.layout is not None
    peak = int(run.peak_memory_bytes) if run.peak_memory_bytes is not None else None
    reserved = "reserved" in run.peak_memory_kind
    flops = _plausible_peak(run, device)
    return RankResult(
        step_seconds=[run.step_seconds],
        peak_memory_allocated_bytes=None if reserved else peak,
        peak_memory_reserved_bytes=peak if reserved else None,
        device_memory_bytes=int(device.memory_bytes),
        peak_flops=flops,
        peak_flops_source=f"table: {device.name}" if flops is not None else None,
        stack=Stack(device_name=run.hardware[:200]),
    )


def _plausible_peak(run: MeasuredRun, device: Hardware) -> float | None:
    """The data sheet's, unless the device is a guess, or the run would have been faster than it allows: then the guess or a shape is wrong."""
    if run.cell is None or run.layout is None or run.step_seconds is None:
        return None
    peak = device.peak_flops.get(run.layout.precision) if device.name in DEVICES else None
    flops = hardware_flops_per_token(
        run.cell.model, sequence_length=run.cell.sequence_length, layout=run.layout
    )
    achieved = flops * run.cell.tokens_per_step / run.step_seconds / run.num_gpus
    return peak if peak is not None and achieved <= peak else None


def failure_text(run: MeasuredRun) -> str:
    """What a row says that did not end well; each row another text, for they are not one mistake."""
    what = "out of memory" if run.status is RunStatus.OOM else "it ended in an error"
    return f"line {run.line} of table {run.table_id}: {what} when it was measured"


def replayed_failure(run: MeasuredRun, *, node: str) -> Failure:
    """An out-of-memory or crash, as if it had happened now."""
    is_memory = run.status is RunStatus.OOM
    exception = "replayed.OutOfMemoryError" if is_memory else "replayed.RunError"
    return classify(
        Evidence(
            rank=0,
            node=node,
            exit_code=1,
            exception=exception,
            message=failure_text(run),
            noted_out_of_memory=is_memory,
            phase="first_step",
        )
    )


def held_gpu_seconds(run: MeasuredRun, plan: MeasurementPlan) -> float:
    """What the launch would have held: (60 s + steps x step time) x GPUs, warm-up and the fewest timed steps; no steps where it failed."""
    steps = plan.warmup_steps + plan.min_steps if run.status is RunStatus.OK else 0
    return (LAUNCH_SECONDS + steps * (run.step_seconds or 0.0)) * run.num_gpus


# --- small things ---


def _problem(cell: Cell) -> Problem:
    return cell.model.digest, cell.num_gpus, cell.sequence_length, cell.global_batch_size


def _tells(run: MeasuredRun) -> bool:
    return run.status in (RunStatus.OOM, RunStatus.ERROR) or (
        run.status is RunStatus.OK and run.step_seconds is not None
    )


def _missing_of_shape(text: str, run: MeasuredRun) -> str:
    reader = csv.DictReader(text.lstrip("\ufeff").splitlines(keepends=True))
    row = next((row for row in reader if reader.line_num == run.line), {})
    missing = [column for column in _SHAPE_COLUMNS if not (row.get(column) or "").strip()]
    if missing:
        return f"line {run.line} lacks {', '.join(missing)}"
    return f"line {run.line} gives sizes that do not go together (hidden is a multiple of heads, heads of kv_heads, a head's size even)"


def _named(models: Mapping[str, ModelShape]) -> dict[str, ModelShape]:
    """The models under names that a sweep file takes: two of one name, or one of a preset's, get their digest behind it."""
    found: dict[str, ModelShape] = {}
    for digest, model in models.items():
        name = _name(model.name)
        taken = name in {other.name for other in found.values()} or (
            name in PRESETS and PRESETS[name].digest != digest
        )
        found[digest] = replace(
            model, name=f"{name[:54].rstrip('._-')}-{digest[:8]}" if taken else name
        )
    return found


def _name(text: str) -> str:
    return (
        re.sub(r"\.{2,}", ".", re.sub(r"[^a-z0-9._-]+", "-", text.lower()))[:63].strip("._-")
        or "table"
    )


def _quoted(value: str) -> str:
    return value if re.fullmatch(r"[A-Za-z_][\w.+]*", value) else repr(value)
