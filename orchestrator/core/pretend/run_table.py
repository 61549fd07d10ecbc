"""Reads CSV tables of measured runs, one row per run, into typed values.

Runs measured elsewhere can be replayed and predicted as if they had been measured here.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.physics.trainer import Trainer, profile_of_words, trainer_of_words
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import (
    Layout,
    Precision,
    Recompute,
    RecomputeMode,
    SelectivePolicy,
)
from orchestrator.core.problem.model_shape import ModelShape

GIB = 1 << 30
USUAL_GPUS_PER_NODE = 8  # if it is unknown

REQUIRED = ("table_id", "hardware", "n_gpus", "status")
# Also required of a row to replay: they make it one layout of one cell.
REQUIRED_TO_REPLAY = ("seq_len", "gbs", "dp", "tp", "pp", "mbs", "grad_acc")
# Columns of words about a run beyond its layout. Those that vary within a table are axes.
CATEGORICAL = (
    "attention_kernel",
    "sequence_parallel",
    "rms_kernel",
    "sharding",
    "peft",
    "framework_config",
    "vp",
    "ep",
    "compile",
    "offload",
)
VERSION = ("code_version",)  # never an axis

_PRECISIONS = {
    "fp32": Precision.FP32, "float32": Precision.FP32, "tf32": Precision.FP32,
    "bf16": Precision.BF16, "bfloat16": Precision.BF16, "amp_bf16": Precision.BF16,
    "fp16": Precision.FP16, "float16": Precision.FP16, "amp_fp16": Precision.FP16,
    "fp8": Precision.FP8, "float8": Precision.FP8,
}  # fmt: skip
_FULL = ("full", "every_layer", "true", "full:all")
_NONE = ("", "none", "false", "no", "off")


class TableInvalid(UsageInvalid):
    """A table has a value that cannot be read. The message names line, column and rule."""


class RunStatus(StrEnum):
    OK = "ok"
    OOM = "oom"
    ERROR = "error"
    PRUNED = "pruned"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """One row: a run of one layout with its outcome. None is unknown."""

    line: int  # the header is line 1
    table_id: str
    model_name: str
    model: ModelShape | None  # None: sizes unknown
    num_parameters: float | None  # as the source states
    hardware: str  # as the source calls it
    # As sold; drivers leave 1-3 % less.
    memory_bytes: float | None
    num_gpus: int
    gpus_per_node: int
    sequence_length: int | None
    global_batch_size: int | None
    layout: Layout | None
    # Columns with words that vary in this table beyond the layout; "" is unknown.
    extra: tuple[tuple[str, str], ...]
    words: tuple[tuple[str, str], ...]  # all columns with words
    status: RunStatus
    step_seconds: float | None
    tokens_per_second_per_gpu: float | None
    peak_memory_bytes: float | None
    # What was read, in the source's words.
    peak_memory_kind: str
    replay: bool  # False for duplicates and irrelevant runs

    @property
    def cell(self) -> Cell | None:
        """The problem that the run solves; None if a part of it is unknown."""
        if self.model is None or self.sequence_length is None or self.global_batch_size is None:
            return None
        return Cell(
            model=self.model,
            num_gpus=self.num_gpus,
            sequence_length=self.sequence_length,
            global_batch_size=self.global_batch_size,
        )

    @property
    def trainer(self) -> Trainer:
        """The program that ran it, by the table's words."""
        words = dict(self.words)
        if self.layout is not None and self.layout.tensor_parallel_size == 1:
            words.pop("sequence_parallel", None)  # nothing to split without tensor parallelism
        return trainer_of_words(words)

    def word(self, column: str) -> str:
        """Return the word in a column; "" if it is unknown."""
        return dict(self.words).get(column, "")


def parse_runs(text: str) -> tuple[MeasuredRun, ...]:
    """Read the rows of one CSV in their order. Raises TableInvalid naming line, column and rule."""
    reader = csv.DictReader(text.lstrip("\ufeff").splitlines(keepends=True))
    try:
        header = reader.fieldnames or []
    except csv.Error as exc:
        raise _unreadable(0, exc) from None
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise TableInvalid(
            f"line 1: no column {', '.join(missing)};"
            f" a table of runs has at least {', '.join(REQUIRED)}"
        )
    try:
        runs = []
        for row in reader:
            values = {k: (v or "").strip() for k, v in row.items() if k is not None}
            runs.append(_run(_TableRow(line=reader.line_num, values=values)))
    except csv.Error as exc:
        raise _unreadable(reader.line_num, exc) from None
    return _with_varying(runs)


def _unreadable(line: int, exc: csv.Error) -> TableInvalid:
    hint = ": is a quote left open?" if "field limit" in str(exc) else ""
    return TableInvalid(f"line {line + 1}: {str(exc).rstrip('?')}{hint}")


def tables(runs: Iterable[MeasuredRun]) -> dict[str, list[list[MeasuredRun]]]:
    """Group runs by table, and then by problem and hardware, in the order of the rows."""
    groups: dict[tuple[object, ...], list[MeasuredRun]] = {}
    for run in runs:
        model = run.model or run.model_name
        problem = (model, run.hardware, run.num_gpus, run.sequence_length, run.global_batch_size)
        groups.setdefault((run.table_id, *problem), []).append(run)
    found: dict[str, list[list[MeasuredRun]]] = {}
    for same in groups.values():
        found.setdefault(same[0].table_id, []).append(same)
    return found


def representative_run(same: Sequence[MeasuredRun]) -> MeasuredRun:
    """Return the median of the successful runs of a layout; of an even number, the slower one.

    If at least half failed, return the first failure of the more frequent kind: a layout that only
    runs every other time cannot be recommended.
    """
    ran = sorted(
        (run for run in same if run.status is RunStatus.OK),
        key=lambda run: run.tokens_per_second_per_gpu or 0.0,
    )
    if 2 * len(ran) > len(same):
        return ran[(len(ran) - 1) // 2]
    failed = [run for run in same if run.status is not RunStatus.OK]
    kind, _ = Counter(run.status for run in failed).most_common(1)[0]
    return next(run for run in failed if run.status is kind)


def named_profile(runs: Iterable[MeasuredRun]) -> str:
    """Return the trainer (core/physics/trainer.py) of most runs, or the first in the alphabet."""
    counts = Counter(profile_of_words(dict(run.words)) for run in runs)
    return min(counts, key=lambda name: (-counts[name], name))


_OR_NOTHING = "or nothing if it is unknown"
_NEEDED = "this row cannot be read without it"


@dataclass(frozen=True, kw_only=True, slots=True)
class _TableRow:
    line: int
    values: Mapping[str, str]

    def text(self, column: str) -> str:
        return self.values.get(column, "")

    def number(self, column: str) -> float | None:
        text = self.text(column)
        if not text or text.lower() in ("nan", "none"):
            return None
        try:
            found = float(text)
        except ValueError as exc:
            raise self.wrong(column, f"expected a number, {_OR_NOTHING}") from exc
        # Every number of a run is a size, a time or a speed.
        if not 0 <= found < float("inf"):
            rule = f"expected a number that is not negative and not infinite, {_OR_NOTHING}"
            raise self.wrong(column, rule)
        return found

    def count(self, column: str) -> int | None:
        number = self.number(column)
        if number is None:
            return None
        if number != int(number) or number < 1:
            raise self.wrong(column, f"expected a whole number of at least 1, {_OR_NOTHING}")
        return int(number)

    def needed_count(self, column: str) -> int:
        count = self.count(column)
        if count is None:
            raise self.wrong(column, f"{_NEEDED}; expected a whole number of at least 1")
        return count

    def wrong(self, column: str, rule: str) -> TableInvalid:
        return TableInvalid(f"line {self.line}, column {column}: {self.text(column)!r}: {rule}")


def _run(row: _TableRow) -> MeasuredRun:
    for column in REQUIRED:
        if not row.text(column):
            raise row.wrong(column, _NEEDED)
    replay = row.text("replay").lower() in ("true", "1", "yes")
    num_gpus = row.needed_count("n_gpus")
    layout = _layout(row, num_gpus, needed=replay)
    memory = row.number("gpu_mem_gb")
    step, length, batch = row.number("step_time_s"), row.count("seq_len"), row.count("gbs")
    rate = row.number("tokens_per_s_per_gpu")
    if rate is None and step and length and batch:
        rate = batch * length / step / num_gpus
    if step is None and rate and length and batch:
        step = batch * length / rate / num_gpus
    return MeasuredRun(
        line=row.line,
        table_id=row.text("table_id"),
        model_name=row.text("model"),
        model=_model(row),
        num_parameters=row.number("n_params"),
        hardware=row.text("hardware"),
        memory_bytes=memory * GIB if memory is not None else None,
        num_gpus=num_gpus,
        gpus_per_node=row.count("gpus_per_node") or USUAL_GPUS_PER_NODE,
        sequence_length=length,
        global_batch_size=batch,
        layout=layout,
        extra=(),
        words=_words(row),
        status=_status(row),
        step_seconds=step,
        tokens_per_second_per_gpu=rate,
        peak_memory_bytes=_peak_bytes(row),
        peak_memory_kind=row.text("peak_mem_kind"),
        replay=replay,
    )


def _status(row: _TableRow) -> RunStatus:
    try:
        return RunStatus(row.text("status").lower())
    except ValueError as exc:
        raise row.wrong("status", f"expected one of {', '.join(RunStatus)}") from exc


def _layout(row: _TableRow, num_gpus: int, *, needed: bool) -> Layout | None:
    """Return the layout of a row; None if it is incomplete or not exact, unless it is needed."""
    missing = next((column for column in REQUIRED_TO_REPLAY if not row.text(column)), None)
    if missing is not None:
        if needed:
            raise row.wrong(missing, "a row with replay = True needs it")
        return None
    stage = row.number("zero_stage") or 0.0
    if stage not in (0, 1, 2, 3):
        raise row.wrong("zero_stage", "expected 0, 1, 2 or 3")
    layout = Layout(
        data_parallel_size=row.needed_count("dp"),
        tensor_parallel_size=row.needed_count("tp"),
        pipeline_parallel_size=row.needed_count("pp"),
        context_parallel_size=row.count("cp") or 1,
        micro_batch_size=row.needed_count("mbs"),
        grad_accum_steps=row.needed_count("grad_acc"),
        recompute=read_recompute(row.text("recompute")),
        zero_stage=int(stage),
        precision=read_precision(row.text("precision")),
    )
    batch = row.needed_count("gbs")
    if layout.global_batch_size == batch and layout.world_size == num_gpus:
        return layout
    if not needed:
        return None
    column, product = "n_gpus", f"dp x tp x pp x cp is {layout.world_size}"
    if layout.global_batch_size != batch:
        column, product = "gbs", f"dp x mbs x grad_acc is {layout.global_batch_size}"
    raise row.wrong(column, f"{product}; a row with replay = True is exact")


def read_recompute(word: str) -> Recompute:
    """Return the nearest recomputation of ours; the word itself stays an axis of the table."""
    text = word.lower()
    if text in _NONE:
        return Recompute()
    if text in _FULL:
        return Recompute(mode=RecomputeMode.FULL)
    try:
        return Recompute.parse(text)
    except ValueError:
        pass
    if "selective" in text or "attn" in text or "attention" in text or "core" in text:
        attention = any(part in text for part in ("attn", "attention", "core"))
        return Recompute(
            mode=RecomputeMode.SELECTIVE,
            policy=SelectivePolicy.ATTENTION if attention else SelectivePolicy.OPS,
        )
    return Recompute(mode=RecomputeMode.FULL)


def read_precision(word: str) -> Precision:
    """Return the nearest precision of ours; bf16 if the word is missing or unknown."""
    text = word.lower().replace("mixed", "").strip(" _-")
    plain = text.split("(")[0].split("-")[0].strip()
    return _PRECISIONS.get(text) or _PRECISIONS.get(plain) or Precision.BF16


def _words(row: _TableRow) -> tuple[tuple[str, str], ...]:
    found = [(column, row.text(column)) for column in (*CATEGORICAL, *VERSION) if row.text(column)]
    for column, plain in (
        ("recompute", str(read_recompute(row.text("recompute")))),
        ("precision", str(read_precision(row.text("precision")))),
    ):
        if row.text(column) and row.text(column).lower() != plain:
            found.append((column, row.text(column)))
    return tuple(found)


def _with_varying(runs: Sequence[MeasuredRun]) -> tuple[MeasuredRun, ...]:
    """Give each run the words that vary in its table and do not follow from its layout."""
    by_table: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        by_table.setdefault(run.table_id, []).append(run)
    columns = {
        table_id: _varying_columns([r for r in rows if r.replay] or rows)
        for table_id, rows in by_table.items()
    }
    return tuple(
        replace(run, extra=tuple((column, run.word(column)) for column in columns[run.table_id]))
        for run in runs
    )


def _varying_columns(runs: Sequence[MeasuredRun]) -> list[str]:
    names = dict.fromkeys(column for run in runs for column, _ in run.words)
    return [
        column
        for column in names
        if column not in VERSION
        and len({run.word(column) for run in runs}) > 1
        and not _implied(column, runs)
    ]


def _implied(column: str, runs: Sequence[MeasuredRun]) -> bool:
    """True if the word follows from one part of the layout, as `zero1` does from ZeRO stage 1."""
    for size in (
        "zero_stage",
        "tensor_parallel_size",
        "precision",
        "recompute",
        "data_parallel_size",
    ):
        seen: dict[object, set[str]] = {}
        for run in runs:
            if run.layout is not None:
                seen.setdefault(getattr(run.layout, size), set()).add(run.word(column))
        if seen and all(len(words) == 1 for words in seen.values()):
            return True
    return False


def _model(row: _TableRow) -> ModelShape | None:
    """Return the shape if the table gives its sizes.

    A feed-forward of two matrices becomes the gated one with as many weights.
    """
    layers, hidden, heads = row.count("layers"), row.count("hidden"), row.count("heads")
    ffn, vocab = row.count("ffn"), row.count("vocab")
    if layers is None or hidden is None or heads is None or ffn is None:
        return None
    tied = row.text("tied_embeddings").lower()
    stated = row.number("n_params")
    kv_heads = row.count("kv_heads") or heads
    attention = hidden * hidden * (2 + 2 * kv_heads / heads)
    if vocab is None and stated is not None:
        # As in GPT, with two matrices and tied embeddings: all the rest is embedding.
        vocab = round((stated - layers * (attention + 2 * hidden * ffn)) / hidden)
    if vocab is None or vocab < 1:
        return None
    if stated is not None:
        guesses = {
            (matrices, embeddings): layers * (attention + matrices * hidden * ffn)
            + embeddings * vocab * hidden
            for matrices in (2, 3)
            for embeddings in ((1,) if tied == "true" else (2,) if tied == "false" else (1, 2))
        }
        matrices, embeddings = min(guesses, key=lambda guess: abs(guesses[guess] - stated))
        gated, is_tied = matrices == 3, embeddings == 1
    else:
        gated = ffn != 4 * hidden
        is_tied = tied == "true" or (tied != "false" and not gated)
    try:
        return ModelShape(
            name=row.text("model") or row.text("table_id"),
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            ffn_hidden_size=ffn if gated else round(2 * ffn / 3),
            vocab_size=vocab,
            tied_embeddings=is_tied,
        )
    except ValueError:
        return None  # an uneven head size


def _peak_bytes(row: _TableRow) -> float | None:
    """Return the peak. The column is in GB if its kind says so, else in GiB (torch, nvidia-smi)."""
    peak = row.number("peak_mem_gb")
    if peak is None:
        return None
    kind = row.text("peak_mem_kind")
    return peak * (1e9 if "GB" in kind and "nvidia-smi" not in kind else GIB)
