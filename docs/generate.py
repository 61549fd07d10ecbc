"""The parts of the documents that follow from the code: the states, the tables of keys, columns and kinds of failure.

Each stands between `<!-- generated: NAME -->` and `<!-- end -->`. `python -m docs.generate` writes them anew; a test fails where they differ.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from benchmarks.chaos import PARTS, missing
from db import readonly, schema
from db.store import Store
from docs.words import COLUMNS, FAILURES, FAULTS, KEYS, OPTIONS, PLACEHOLDERS, RESULT, KeyWords
from orchestrator.core.capabilities import CAPABILITIES
from orchestrator.core.failures import OUT_OF_MEMORY_KINDS, POLICIES, Fault
from orchestrator.core.hardware import DEVICES, GIB
from orchestrator.core.layout import Precision
from orchestrator.core.lifecycle import mermaid
from orchestrator.core.model_shape import PRESETS
from orchestrator.core.protocol import RankResult
from orchestrator.core.spec import Axes, Confirm, Limits, Measuring, ModelSizes, Plateau, Search, SweepSpec
from orchestrator.core.step_time import PRIORS
from orchestrator.core.template import TEMPLATE_NAMES
from orchestrator.core.trainer_section import BytesPerParameter, TracedModeSection, TracedTerm, TrainerSection
from orchestrator.core.workload_options import WORKLOADS, FaultKind, LlamaWorkload
from tests.faults.campaign import KILLED

DOCS = Path(__file__).parent
PROJECT = DOCS.parent
FOLDERS = (
    "orchestrator/core",
    "orchestrator",
    "orchestrator/cli",
    "orchestrator/report",
    "db",
    "workloads",
    "workloads/llama",
    "workloads/synthetic",
    "workloads/replay",
    "workloads/command",
    "workloads/netbench",
)
SECTIONS: Mapping[str, type[BaseModel]] = {
    "sweep": SweepSpec,
    "axes": Axes,
    "measurement": Measuring,
    "limits": Limits,
    "search": Search,
    "plateau": Plateau,
    "confirm": Confirm,
    "workload": LlamaWorkload,  # the keys of all of them
    "trainer": TrainerSection,
    "bytes-per-parameter": BytesPerParameter,
    "activations": TracedModeSection,
    "bytes": TracedTerm,
    "model": ModelSizes,
}
PROGRAM_OPTIONS: Mapping[str, Any] = {name: workload.model_fields["options"].annotation for name, workload in WORKLOADS.items()}
_BLOCK = re.compile(r"(<!-- generated: ([a-z -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    for document in documents():
        text = document.read_text()
        new = generated(text)
        if new != text:
            document.write_text(new)
            print(f"wrote {document}")  # noqa: T201
    return 0


def documents() -> list[Path]:
    """Every document of the project."""
    return sorted([*DOCS.rglob("*.md"), *(PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))])


def generated(text: str) -> str:
    """The document with its generated parts as the code has them today. Raises KeyError for a part that nobody makes."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_part(match[2])}\n{match[3]}", text)


def _part(name: str) -> str:
    kind, _, which = name.partition(" ")
    if kind == "keys":
        return key_table(f"KEYS[{which!r}]", SECTIONS[which], KEYS[which])
    if kind == "options":
        return option_table(which) if which else option_list()
    parts: Mapping[str, Callable[[], str]] = {
        "capabilities": capability_table,
        "faults": lambda: _words("fault", "FAULTS", FAULTS, FaultKind),
        "placeholders": lambda: _words("name", "PLACEHOLDERS", PLACEHOLDERS, TEMPLATE_NAMES),
        "result": lambda: _words("field", "RESULT", RESULT, RankResult.model_fields),
        "measured": lambda: _table(("what", "result", "file in `benchmarks/results/`"), measured_rows()),
        "scores": score_table,
        "scoreboard": lambda: _table(("figure", "result", "file in `benchmarks/results/`"), scoreboard_rows()),
        "modules": module_tables,
        "states": lambda: f"```mermaid\n{mermaid()}\n```",
        "failures": failure_table,
        "models": model_table,
        "devices": device_table,
        "views": view_list,
        "tables": table_list,
        "columns": column_table,
        "constants": constant_table,
    }
    return parts[name]()


def constant_table() -> str:
    """The constants of step time: what is believed of each before anything is measured, and what it is."""
    source = ast.parse((PROJECT / "orchestrator/core/step_time.py").read_text())
    body = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "StepTimeConstants").body
    means = {
        field.target.id: said.value.value
        for field, said in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant)
    }
    rows = [(f"`{name}`", f"{prior.median:.3g}", f"x/ {math.exp(prior.log_sd):.2f}", means[name]) for name, prior in PRIORS.items()]
    return _table(("constant", "prior", "", "meaning"), rows)


def key_table(where: str, model: type[BaseModel], words: Mapping[str, KeyWords]) -> str:
    """The keys of a section, with their defaults out of the code."""
    _require_same(where, words, model.model_fields)
    rows = [
        (f"`{name}`", words[name].takes, "required" if field.is_required() else _default(field.default), words[name].means)
        for name, field in model.model_fields.items()
    ]
    return _table(("key", "takes", "default", "meaning"), rows)


def option_table(workload: str) -> str:
    """The options of a workload: what each takes, and the default and the meaning that the code has."""
    options, takes = PROGRAM_OPTIONS[workload].model_fields, OPTIONS[workload]
    _require_same(f"OPTIONS[{workload!r}]", takes, options)
    rows = [
        (f"`{name}`", takes[name], "required" if field.is_required() else _default(field.default), field.description)
        for name, field in options.items()
    ]
    return _table(("key", "takes", "default", "meaning"), rows)


def option_list() -> str:
    """The options of every workload, by name."""
    rows = [(f"`{name}`", ", ".join(f"`{key}`" for key in options.model_fields)) for name, options in PROGRAM_OPTIONS.items()]
    return _table(("`name`", "keys of `options`"), rows)


def capability_table() -> str:
    """What workload llama can run."""
    able = CAPABILITIES["llama"]
    sizes = {name: getattr(able, f"max_{name}") for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")}
    rows = [
        ("`data_parallel_size`", "any"),
        *((f"`{name}`", "any" if most is None else f"at most {most}" if most > 1 else "1") for name, most in sizes.items()),
        ("`zero_stage`", ", ".join(map(str, sorted(able.zero_stages)))),
        ("`precision`", ", ".join(sorted(able.precisions))),
    ]
    return _table(("axis", "values"), rows)


def module_tables() -> str:
    """Every module with the first sentence of its docstring."""
    lines = []
    for folder in FOLDERS:
        rows = []
        for file in sorted((PROJECT / folder).glob("*.py")):
            about = ast.get_docstring(ast.parse(file.read_text()))
            if about:
                sentence = re.split(r"(?<=[.])\s", " ".join(about.split()), maxsplit=1)[0]
                rows.append((f"`{file.name if file.name != '__init__.py' else folder.rpartition('/')[2]}`", sentence))
        lines += [f"**`{folder}/`**", "", _table(("module", "what it is"), rows), ""]
    return "\n".join(lines).rstrip()


def measured_rows() -> list[tuple[str, str, str]]:
    """What the newest committed result of each benchmark says; a benchmark without one is left out."""
    rows: list[tuple[str, str, str]] = []

    def row(name: str, what: str, said: Callable[[Any], str]) -> None:
        folder = PROJECT / "benchmarks" / "results"
        files = [*folder.glob(f"{name}.json"), *sorted(folder.glob(f"{name}_cpu-*.json"), key=lambda file: file.stem[-10:])]
        if files:
            rows.append((what, said(json.loads(files[-1].read_text())), f"`{files[-1].name}`"))

    row("orchestration", "trials of two fresh ranks that do nothing: ask, store, launch, collect, tell", _said_of_trials)
    row("orchestration", "the same with torch, gloo and four steps of llama-tiny", lambda r: f"{_rate(r, 'sweep_torch')}/s")
    row("long-sweep", "ask + tell + store at 5,000 trials; memory gained over them", _said_of_a_long_sweep)
    row("long-sweep-scripted", "the same at 10,000 trials", lambda r: f"{_digits(r['ask_tell_store_ms_per_trial_at']['10000'])} ms a trial")
    row(
        "packing",
        "GPU-seconds used of 512 GPUs by the study of `sweeps/playbook.yaml`, until its tail; its time over the shortest possible",
        _said_of_packing,
    )
    row(
        "ray-scale-undisturbed",
        "the same study on real Ray, 512 declared GPUs on two cores: gangs from order to stored result",
        _said_of_ray,
    )
    row("simulated-scale", "the control plane on a virtual clock, 16,384 GPUs", _said_of_a_simulation)
    row("enumerate", "enumerate and rank the layouts of a large cell", _said_of_layouts)
    for database in ("", "-postgresql"):
        where = "PostgreSQL" if database else "SQLite"
        row(f"store-scale{database}", f"`best`, `status` on 100,000 trials, {where}", _said_of_a_store)
    return rows


def _said_of_packing(result: Any) -> str:
    ours, in_line = result["median"]["packing"], result["median"]["first_come"]
    return (
        f"{ours['used_share_until_tail']:.0%}; {ours['makespan_over_bound']:.2f}."
        f" First come, first served in the same run: {in_line['used_share_until_tail']:.0%}; {in_line['makespan_over_bound']:.2f}"
    )


def _said_of_ray(result: Any) -> str:
    return f"{_digits(result['trials_per_second'])} trials/s; {result['num_trials']:,} trials in {result['seconds'] / 60:.1f} minutes"


def _said_of_a_simulation(result: Any) -> str:
    return f"{result['num_attempts']:,} launches in {result['wall_seconds']:.0f} s, with {result['peak_memory_bytes'] / 1e6:.0f} MB"


def score_table() -> str:
    """In how many trials slow nodes are found, of the newest committed result."""
    files = sorted((PROJECT / "benchmarks" / "results").glob("node-score_*.json"), key=lambda file: file.stem[-10:])
    result = json.loads(files[-1].read_text())
    rows = [
        (
            name,
            f"{case['trials_median']:.0f}",
            f"{case['trials_nine_in_ten']:.0f}",
            f"{result['seeds'] - case['not_found']} of {result['seeds']}",
            f"{case['false_alarms']} of {result['healthy_sweeps']}",
        )
        for name, case in result["cases"].items()
    ]
    return _table(("case", "trials, median", "nine in ten", "found within 400", "healthy sweeps that accused a node"), rows)


def scoreboard_rows() -> list[tuple[str, str, str]]:
    """What the newest committed results say of faults; a result that is not there, or a figure that it does not tell, is left out."""
    rows: list[tuple[str, str, str]] = []
    if (found := newest("chaos")) is not None:
        name, result = found
        rows += [(what, said(result), f"`{name}`") for what, (tells, said) in _CHAOS.items() if tells in result]
    if (found := newest("ray-scale")) is not None:
        name, result = found
        killed = " and ".join(f"{count} {victim}s" for victim, count in result["killed"].items())
        what = f"the playbook's study on real Ray, {result['num_nodes']} simulated nodes of {result['gpus_per_node']} declared GPUs, {killed} killed: lost, twice, processes left"
        said = f"{result['lost']}, {result['duplicated']}, {result['leaked_processes']} of {result['num_trials']:,} trials in {result['seconds'] / 60:.1f} minutes"
        rows.append((what, said, f"`{name}`"))
        what = "the same, on a Ray that was busy with all of it: from the death of an orchestrator to the next one's first launch, at the slowest"
        rows.append((what, f"{_digits(result['slowest_takeover_seconds'])} s", f"`{name}`"))
    if (found := newest("resume")) is not None:
        name, result = found
        what = f"a sweep of {result['num_trials']:,} trials goes on: from the command to its first launch, Ray apart, at the slowest"
        rows.append((what, f"{_digits(result['slowest_resumed_seconds'])} s", f"`{name}`"))
    return rows


def chaos_lacks(result: Any) -> list[str]:
    """Why kills do not show what the scoreboard says: complaints, campaigns that are missing, figures that are not told."""
    return [
        *(f"complaint: {text}" for text in result["complaints"]),
        *(f"missing: {campaign}" for campaign in _missing_of(result)),
        *(f"not told: {tells}" for tells, _ in _CHAOS.values() if tells not in result),
    ]


def _missing_of(result: Any) -> list[str]:
    return missing(list(PARTS), [part["campaign"] for part in result["parts"]])


def _parts(result: Any, beginning: str) -> list[Any]:
    return [part for part in result["parts"] if part["campaign"].startswith(beginning)]


def _said_of_complaints(result: Any) -> str:
    lists = [[f'"{text}"' for text in result["complaints"]], [f"`{campaign}`" for campaign in _missing_of(result)]]
    return "; ".join(f"{len(found)}: {', '.join(found)}" if found else "0" for found in lists)


def _said_of_crash_points(result: Any) -> str:
    sqlite, postgresql = (part["kills"] for part in _parts(result, "crash-points"))
    return f"all: {sqlite} on SQLite, {postgresql} on PostgreSQL"


def _said_of_migrations(result: Any) -> str:
    made, upgraded = (" and ".join(str(part["victims"]["migration"]) for part in _parts(result, play)) for play in ("making", "upgrade"))
    return f"all: {made} of its making, {upgraded} of its upgrade, on SQLite and PostgreSQL"


def _said_of_survivors(result: Any) -> str:
    looked = [part for part in result["parts"] if part["looks"]]
    killed = sum((Counter(part["victims"]) for part in looked), Counter[str]())
    return (
        f"{result['leaked_processes']} in {result['looks']:,} looks, after {_list_of({kind: killed[kind] for kind in KILLED})} were killed"
    )


def _said_of_pauses(result: Any) -> str:
    broken = sum(part["broken"] for part in _parts(result, "rivals"))
    return f"{broken}, by {result['replaced']} in {result['paused']:,} pauses"


def _said_of_outages(result: Any) -> str:
    (outage,) = _parts(result, "outages")
    connections, servers = (outage["victims"][kind] for kind in ("connection", "server"))
    return f"{connections} and {servers}: {outage['lost']} of {outage['acknowledged']} results lost"


# What a campaign of kills shows: the figure, the field without which it is not told, and how it is said.
_CHAOS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "complaints; campaigns that are missing": ("complaints", _said_of_complaints),
    "campaigns whose time was over before all was done": ("cut_short", lambda r: ", ".join(f"`{name}`" for name in r["cut_short"]) or "0"),
    "results lost, of those acknowledged": ("lost", lambda r: f"{r['lost']} of {r['acknowledged']:,}, in {r['kills']:,} kills"),
    "results that count twice; trials stuck": ("duplicated", lambda r: f"{r['duplicated']}; {r['stuck']}"),
    "statements and commits at which an orchestrator died, of twelve trials": ("kills", _said_of_crash_points),
    "statements at which a program died that made or upgraded a store, which the next one used": ("migration", _said_of_migrations),
    "processes alive 5 s after the death of their orchestrator, or the end of their sweep": ("looks", _said_of_survivors),
    "entries broken by orchestrators that had begun, slept past their lease, and were replaced": ("replaced", _said_of_pauses),
    "PostgreSQL connections ended, servers killed under load": ("parts", _said_of_outages),
    "from the death of an orchestrator to the next one's first launch, at the slowest": (
        "slowest_takeover_seconds",
        lambda r: f"{_digits(r['slowest_takeover_seconds'])} s",
    ),
}


def newest(benchmark: str) -> tuple[str, Any] | None:
    """The newest committed result of a benchmark, with its file's name."""
    files = sorted((PROJECT / "benchmarks" / "results").glob(f"{benchmark}_cpu-*.json"), key=lambda file: file.stem[-10:])
    return (files[-1].name, json.loads(files[-1].read_text())) if files else None


def _list_of(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind.replace('_', ' ')}{'s' if count != 1 else ''}" for kind, count in counts.items())


def _said_of_trials(result: Any) -> str:
    fresh, reused = _rate(result, "tune_fresh"), _rate(result, "tune_reuse_actors")
    return f"{_rate(result, 'sweep_tpe')}/s. Ray Tune in the same run: {fresh}/s in fresh processes, {reused}/s in reused ones"


def _said_of_a_long_sweep(result: Any) -> str:
    return f"{_digits(result['ask_tell_store_ms_per_trial_at']['5000'])} ms a trial; {result['resident_growth_bytes_over_5000_trials'] / 1e6:.0f} MB"


def _said_of_layouts(result: Any) -> str:
    counts = result["without_constraints"]
    return f"{counts['enumerated_and_ranked_per_second'] / 1e6:.1f} million/s ({counts['legal']:,} legal of {counts['lattice']:,})"


def _said_of_a_store(result: Any) -> str:
    return f"{_digits(result['best_seconds'])} s, {_digits(result['status_seconds'])} s"


def _rate(result: Any, arm: str) -> str:
    return _digits(result["summary"]["trials_per_second"][arm])


def _digits(number: float) -> str:
    """Two significant digits: what these machines are good for."""
    return f"{float(f'{number:.2g}'):g}"


def failure_table() -> str:
    _require_same("FAILURES", FAILURES, POLICIES)
    whose = {Fault.LAYOUT: "the layout's", Fault.CODE: "the code's", Fault.MACHINE: "the machine's", Fault.NOBODY: "nobody's"}
    rows = [
        (
            f"`{kind}`",
            FAILURES[kind].means,
            whose[policy.fault],
            str(policy.max_retries) if policy.fault is not Fault.NOBODY else "next run",
            "waits" if policy.fault is Fault.NOBODY else "out_of_memory" if kind in OUT_OF_MEMORY_KINDS else "failed",
            FAILURES[kind].do,
        )
        for kind, policy in POLICIES.items()
    ]
    return _table(("kind", "what happened", "whose fault", "retries", "then", "what to do"), rows)


def model_table() -> str:
    rows = []
    for name, shape in PRESETS.items():
        heads = f"{shape.num_attention_heads} / {shape.num_key_value_heads}"
        sizes = (shape.num_layers, shape.hidden_size, heads, shape.ffn_hidden_size, shape.vocab_size)
        rows.append((f"`{name}`", *sizes, "yes" if shape.tied_embeddings else "no", f"{shape.num_parameters:,}"))
    return _table(("preset", "layers", "hidden", "heads / kv", "ffn", "vocabulary", "tied", "parameters"), rows)


def device_table() -> str:
    rows = []
    for name, device in DEVICES.items():
        peaks = [_tera(device.peak_flops.get(precision)) for precision in (Precision.BF16, Precision.FP32, Precision.FP8)]
        memory = (f"{device.memory_bytes / GIB:.1f}", f"{device.memory_bandwidth / 1e12:.2f}")
        links = (f"{device.intra_node_bandwidth / 1e9:.0f}", f"{device.inter_node_bandwidth / 1e9:.0f}")
        price = f"{device.price_per_hour:.2f}" if device.price_per_hour is not None else "-"
        rows.append((f"`{name}`", *peaks, *memory, *links, price))
    titles = ("device", "bf16 TFLOP/s", "fp32 (TF32)", "fp8", "GiB", "memory TB/s", "node GB/s", "network GB/s", "$/hour")
    return _table(titles, rows)


def view_list() -> str:
    """Each view with the first sentence of its SQL file, and its columns."""
    lines = []
    for view, columns in view_columns().items():
        about = (PROJECT / "db" / "views" / f"{view}.sql").read_text().splitlines()[0].removeprefix("-- ")
        lines += [f"**`{view}`**: {about}", "", ", ".join(f"`{column}`" for column in columns), ""]
    return "\n".join(lines).rstrip()


def table_list() -> str:
    lines = []
    for table in schema.metadata.sorted_tables:
        columns = ", ".join(f"`{column.name}`{' (JSON)' if column.type is schema.Json else ''}" for column in table.columns)
        lines.append(f"- **`{table.name}`**: {columns}")
    return "\n".join(lines)


def column_table() -> str:
    """Every column of tables and views with its meaning."""
    places: dict[str, None] = {}
    for table in schema.metadata.tables.values():
        places |= dict.fromkeys(column.name for column in table.columns)
    for columns in view_columns().values():
        places |= dict.fromkeys(columns)
    _require_same("COLUMNS", COLUMNS, places)
    return _table(("column", "meaning"), [(f"`{name}`", COLUMNS[name]) for name in sorted(places)])


def view_columns() -> dict[str, tuple[str, ...]]:
    """The columns of each view, as a new store has them."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/sweep.sqlite"
        Store.open(url).close()
        return {view: readonly.query(url, f"SELECT * FROM {view} LIMIT 0").columns for view in schema.VIEWS}


def _words(title: str, where: str, words: Mapping[str, str], code: Iterable[str]) -> str:
    _require_same(where, words, code)
    return _table((title, "meaning"), [(f"`{name}`", meaning) for name, meaning in words.items()])


def _require_same(where: str, words: Iterable[str], code: Iterable[str]) -> None:
    """Raise ValueError when docs/words.py lacks a word of the code, or has one too many."""
    missing, superfluous = set(code) - set(words), set(words) - set(code)
    if missing or superfluous:
        raise ValueError(f"docs/words.py, {where}: lacks {sorted(missing)}, and has {sorted(superfluous)} that the code does not have")


def _default(value: Any) -> str:
    """A default as it would stand in the file."""
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "see there"
    if isinstance(value, (tuple, list)):
        return ", ".join(_default(item) for item in value) or "none"
    if isinstance(value, Mapping):
        return "none" if not value else str(value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _tera(flops: float | None) -> str:
    return "-" if flops is None else f"{flops / 1e12:g}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
