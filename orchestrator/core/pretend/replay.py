"""A table of measured runs that can be searched: a launch of a layout returns its measured run.

Runs of one model, number of GPUs, sequence length and batch belong to one cell. If a layout has
several runs, `representative_run` selects one.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.pretend.run_table import (
    MeasuredRun,
    RunStatus,
    named_profile,
    parse_runs,
    representative_run,
)
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES, GIB, Hardware, from_label
from orchestrator.core.problem.layout import SIZES, Layout
from orchestrator.core.problem.model_shape import PRESETS, ModelShape
from orchestrator.core.sweepfile.constraint_language import Names
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.suggestion import did_you_mean
from orchestrator.core.trial.failure_kinds import Failure
from orchestrator.core.trial.failures import Evidence, classify
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.measurement import LAUNCH_SECONDS, hardware_flops_per_token
from orchestrator.core.trial.protocol import MeasurementPlan, RankResult

# The option with the key of the layout to replay: one process represents the whole gang.
LAYOUT_OPTION = "layout"
DEFAULT_PROFILE = "llama"  # without a section `trainer`
_SHAPE_COLUMNS = ("layers", "hidden", "heads", "ffn", "vocab")

# Model digest, GPUs, sequence length, global batch.
CellKey = tuple[str, int, int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayTable:
    """One table: for each cell, the representative run of each layout, in the order of rows."""

    table_id: str
    hardware: str  # as the table calls it
    memory_bytes: float | None  # of one GPU, as sold
    gpus_per_node: int
    models: Mapping[str, ModelShape]  # by digest
    runs: Mapping[CellKey, Mapping[Layout, MeasuredRun]]

    @property
    def device(self) -> Hardware:
        """The device of the table, or the nearest known one with the memory in the table."""
        return from_label(self.hardware, memory_bytes=self.memory_bytes)

    @property
    def profile(self) -> str:
        """The name of the trainer that matches the table."""
        return named_profile(run for runs in self.runs.values() for run in runs.values())

    @property
    def digest(self) -> str:
        """Digest of the content: a changed table makes other numbers."""
        rows = [
            (key, layout.key, run.status, run.step_seconds, run.peak_memory_bytes)
            for key, runs in self.runs.items()
            for layout, run in runs.items()
        ]
        return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]

    def layouts(self, cell: Cell) -> Collection[Layout]:
        """Return the layouts that were run in a cell: no others can be replayed."""
        return self.runs.get(_key(cell), {}).keys()

    def run(self, cell: Cell, layout: Layout) -> MeasuredRun:
        """Return the run of a layout. Raises UsageInvalid if the table has none."""
        found = self.runs.get(_key(cell), {}).get(layout)
        if found is None:
            raise UsageInvalid(f"table {self.table_id} has no run of {layout.key} in {cell.key}")
        return found

    def check(self, spec: SweepSpec) -> None:
        """Raise UsageInvalid if the table lacks cells or options of a sweep."""
        for cell in spec.cells():
            if _key(cell) not in self.runs:
                raise UsageInvalid(
                    f"table {self.table_id} has no runs of {cell.key};"
                    f" it has {'; '.join(self.cell_texts)}"
                )
        names, given = self._option_values(), spec.axes.options
        if set(names) != set(given):
            wanted = ", ".join(
                f"{name}: [{', '.join(map(_quoted, values))}]" for name, values in names.items()
            )
            raise UsageInvalid(
                f"axes.options names {', '.join(given) or 'nothing'};"
                f" table {self.table_id} varies in {', '.join(names) or 'nothing but the layout'}:"
                f" write axes.options: {{{wanted}}}"
            )

    def sweep(self, *, name: str | None, path: str) -> dict[str, Any]:
        """Return a sweep file for the table, as data.

        A sweep has every combination of models, GPUs, lengths and batches. If the table lacks some,
        the file has only its largest cell.
        """
        largest = max(self.runs, key=lambda key: len(self.runs[key]))
        cells = list(self.runs) if self.is_complete else [largest]
        layouts = [layout for runs in self.runs.values() for layout in runs]
        axes: dict[str, Any] = {
            size: sorted({getattr(layout, size) for layout in layouts}) for size in SIZES
        }
        axes["recompute"] = sorted({str(layout.recompute) for layout in layouts})
        if options := self._option_values():
            axes["options"] = options
        device = self.device
        known = DEVICES.get(device.name)
        memory = {"device_memory_gib": device.memory_bytes / GIB}
        if known is not None and known.memory_bytes == device.memory_bytes:
            memory = {}
        digests = dict.fromkeys(digest for digest, _, _, _ in cells)
        return {
            "name": name or _name(f"replay-{self.table_id}"),
            "model": [asdict(self.models[digest]) for digest in digests],
            "gpus": sorted({gpus for _, gpus, _, _ in cells}),
            "gpus_per_node": self.gpus_per_node,
            "device": device.name if known is not None else "a100-80gb",
            **memory,
            **({"trainer": self.profile} if self.profile != DEFAULT_PROFILE else {}),
            "sequence_length": sorted({length for _, _, length, _ in cells}),
            "global_batch_size": sorted({batch for _, _, _, batch in cells}),
            "precision": sorted({str(layout.precision) for layout in layouts}),
            "axes": axes,
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
        """True if it has every combination of its models, GPUs, sequence lengths and batches."""
        return len(self.runs) == prod(len(set(values)) for values in zip(*self.runs, strict=True))

    @property
    def cell_texts(self) -> list[str]:
        """Its cells, as overrides that select them."""
        return [
            f"{self.models[digest].name}: gpus={gpus} sequence_length={length}"
            f" global_batch_size={batch}"
            for digest, gpus, length, batch in self.runs
        ]


def read_table(text: str, table_id: str) -> ReplayTable:
    """Read one table of a CSV. Raises UsageInvalid if it is missing or cannot be searched."""
    runs = parse_runs(text)
    of_table = [run for run in runs if run.table_id == table_id]
    if not of_table:
        ids = list(dict.fromkeys(run.table_id for run in runs))
        listed = f"; it has {', '.join(ids[:20])}{', ...' if len(ids) > 20 else ''}"
        hint = did_you_mean(table_id, ids) or listed
        raise UsageInvalid(f"the file has no table {table_id!r}{hint}")
    rows = [run for run in of_table if run.replay and run.layout is not None and _has_outcome(run)]
    if not rows:
        raise UsageInvalid(
            f"table {table_id} has no row that can be replayed:"
            " replay = True, status ok with a time, oom or error"
        )
    missing = next((run for run in rows if run.model is None), None)
    if missing is not None:
        raise UsageInvalid(
            f"table {table_id} has no model shape: {_missing_of_shape(text, missing)}."
            " Without it, the table cannot be searched"
        )
    for what, values in (
        ("hardware", {run.hardware for run in rows}),
        ("gpus_per_node", {run.gpus_per_node for run in rows}),
    ):
        if len(values) > 1:
            mixed = ", ".join(sorted(map(str, values)))
            raise UsageInvalid(
                f"table {table_id} mixes {what} {mixed}; one table is one kind of machine"
            )
    models = _named({run.model.digest: run.model for run in rows if run.model is not None})
    cells: dict[CellKey, dict[Layout, list[MeasuredRun]]] = {}
    for run in rows:
        assert run.cell is not None
        cells.setdefault(_key(run.cell), {}).setdefault(replayed_layout(run), []).append(run)
    first = rows[0]
    return ReplayTable(
        table_id=table_id,
        hardware=first.hardware,
        memory_bytes=first.memory_bytes,
        gpus_per_node=first.gpus_per_node,
        models=models,
        runs={
            key: {layout: representative_run(same) for layout, same in layouts.items()}
            for key, layouts in cells.items()
        },
    )


def replayed_layout(run: MeasuredRun) -> Layout:
    """Return the layout of a row; what else varies in its table becomes options."""
    assert run.layout is not None
    taken = {*Names().all, *Layout.__dataclass_fields__}
    # Columns `recompute` and `precision` may have words that our layouts lack.
    named = ((f"{name}_word" if name in taken else name, value) for name, value in run.extra)
    return replace(run.layout, options=tuple(sorted(named)))


# --- the result of a launch ---


def replayed_result(run: MeasuredRun, device: Hardware) -> RankResult:
    """Return the numbers of a successful run as the result of one rank with one step."""
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
    """Return the data sheet's peak; None if the device is a guess or the run was faster."""
    if run.cell is None or run.layout is None or run.step_seconds is None:
        return None
    peak = device.peak_flops.get(run.layout.precision) if device.name in DEVICES else None
    flops = hardware_flops_per_token(
        run.cell.model, sequence_length=run.cell.sequence_length, layout=run.layout
    )
    achieved = flops * run.cell.tokens_per_step / run.step_seconds / run.num_gpus
    return peak if peak is not None and achieved <= peak else None


def failure_text(run: MeasuredRun) -> str:
    """Return the message of a failed row. Rows differ, since they are not one mistake."""
    what = "out of memory" if run.status is RunStatus.OOM else "it ended in an error"
    return f"line {run.line} of table {run.table_id}: {what} when it was measured"


def replayed_failure(run: MeasuredRun, *, node: str) -> Failure:
    """Return the out-of-memory or crash of a row as if it had happened now."""
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


def reserved_gpu_seconds(run: MeasuredRun, plan: MeasurementPlan) -> float:
    """Return what the launch would have reserved: (60 s + steps x step time) x GPUs.

    Steps are the warm-up and the fewest timed steps, or none if the run failed.
    """
    steps = plan.warmup_steps + plan.min_steps if run.status is RunStatus.OK else 0
    return (LAUNCH_SECONDS + steps * (run.step_seconds or 0.0)) * run.num_gpus


# --- reading ---


def _key(cell: Cell) -> CellKey:
    return cell.model.digest, cell.num_gpus, cell.sequence_length, cell.global_batch_size


def _has_outcome(run: MeasuredRun) -> bool:
    is_timed = run.status is RunStatus.OK and run.step_seconds is not None
    return is_timed or run.status in (RunStatus.OOM, RunStatus.ERROR)


def _missing_of_shape(text: str, run: MeasuredRun) -> str:
    reader = csv.DictReader(text.lstrip("\ufeff").splitlines(keepends=True))
    row = next((row for row in reader if reader.line_num == run.line), {})
    missing = [column for column in _SHAPE_COLUMNS if not (row.get(column) or "").strip()]
    if missing:
        return f"line {run.line} lacks {', '.join(missing)}"
    return (
        f"line {run.line} gives sizes that do not fit each other"
        " (hidden is a multiple of heads, heads of kv_heads, a head's size even)"
    )


def _named(models: Mapping[str, ModelShape]) -> dict[str, ModelShape]:
    """Give the models names that a sweep file accepts; names that are taken get a digest."""
    found: dict[str, ModelShape] = {}
    for digest, model in models.items():
        name = _name(model.name)
        taken = name in {other.name for other in found.values()} or (
            name in PRESETS and PRESETS[name].digest != digest
        )
        if taken:
            name = f"{name[:54].rstrip('._-')}-{digest[:8]}"
        found[digest] = replace(model, name=name)
    return found


def _name(text: str) -> str:
    plain = re.sub(r"\.{2,}", ".", re.sub(r"[^a-z0-9._-]+", "-", text.lower()))
    return plain[:63].strip("._-") or "table"


def _quoted(value: str) -> str:
    return value if re.fullmatch(r"[A-Za-z_][\w.+]*", value) else repr(value)
