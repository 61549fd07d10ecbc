"""The command that traces the memory of a model of one's own: `sweep trace`. It needs torch, and starts what does as a process.

What comes out is a table, and the section `trainer` for a sweep file.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from orchestrator.cli.output import (
    Column,
    JsonOption,
    examples,
    note,
    write,
    write_json,
    write_table,
)
from orchestrator.core.errors import UsageInvalid

if TYPE_CHECKING:
    from orchestrator.core.physics.traced_memory import TracedBytes, TracedMode

GIB = 1 << 30
_TERMS = ("kept", "backward", "head", "end")


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(
        epilog=examples(
            "sweep trace mine:build --precision bf16",
            "sweep trace mine:build --autocast --sequence-length 8192 --layers 32",
            "",
            "mine.py:  def build(num_layers, recompute='none'): return Model(num_layers, recompute)",
        )
    )(trace)


def trace(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="The function that builds your model with as many layers as it is told.",
        ),
    ],
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", min=64, max=1 << 24, help="Tokens of a sequence.")
    ] = 4096,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers",
            min=1,
            max=100_000,
            help="Also add up a model of so many layers.",
            show_default=False,
        ),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            "--recompute",
            help="Modes, with commas. Default: all that the function takes.",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(
            "--precision",
            help="Make weights fp32, bf16 or fp16. Default: as the function makes them.",
            show_default=False,
        ),
    ] = None,
    autocast: Annotated[
        bool, typer.Option("--autocast", help="Run products in bf16 by torch.autocast.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Trace the memory of a model of your own, without a GPU.

    Runs forward and backward of 2, 3 and 5 of its layers on tensors that have no memory, and writes the section `trainer` of a sweep file.
    """
    found = _trace(target, sequence_length, recompute, precision, autocast=autocast)
    modes = {name: _mode(terms) for name, terms in found["modes"].items()}
    section = {
        "bytes_per_parameter": found["bytes_per_parameter"],
        "activations": {
            name: {
                term: _written(getattr(mode, term))
                for term in _TERMS
                if term != "end" or _written(mode.end)
            }
            for name, mode in modes.items()
        },
    }
    totals = _totals(modes, found, layers, sequence_length) if layers is not None else None
    if as_json:
        asked = {
            "target": target,
            "sequence_length": sequence_length,
            "precision": precision,
            "autocast": autocast,
        }
        write_json("trace", {**asked, **found, "trainer": section, "totals": totals})
        return
    _print(modes, found, sequence_length)
    if totals is not None:
        _print_totals(totals)
    options = [f"--precision {precision}"] * (precision is not None) + ["--autocast"] * autocast
    command = " ".join(["sweep trace", target, f"--sequence-length {sequence_length}", *options])
    write()
    write(_yaml(section, command))
    for remark in found["notes"]:
        note(f"note: {remark}")


def _trace(
    target: str,
    sequence_length: int,
    recompute: str | None,
    precision: str | None,
    *,
    autocast: bool,
) -> dict[str, Any]:
    """What the process says. Raises UsageInvalid with its own words."""
    if importlib.util.find_spec("torch") is None:
        raise UsageInvalid(
            f"sweep trace needs torch, which is not installed in {sys.prefix}: pip install 'layout-sweep[train]'"
        )
    options = [
        f"--sequence-length={sequence_length}",
        *([f"--recompute={recompute}"] if recompute is not None else []),
        *([f"--precision={precision}"] if precision is not None else []),
        *(["--autocast"] if autocast else []),
    ]
    # -P: a folder `workloads` of the user's own is not the one meant.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "workloads.tools.memory_trace", *options, "--", target],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise UsageInvalid(_died(target, done)) from None
    if "error" in found:
        raise UsageInvalid(f"{target}: {found['error']}")
    return found


def _died(target: str, done: subprocess.CompletedProcess[str]) -> str:
    words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    of_signal = done.returncode < 0 and -done.returncode in set(signal.Signals)
    how = signal.Signals(-done.returncode).name if of_signal else f"exit code {done.returncode}"
    return (
        f"{target}: the trace ended with {how}: {words[-1][-300:] if words else 'and said nothing'}"
    )


def _mode(terms: Mapping[str, Mapping[str, float]]) -> TracedMode:
    from orchestrator.core.physics.traced_memory import TracedBytes, TracedMode  # needs numpy

    return TracedMode(**{name: TracedBytes(**term) for name, term in terms.items()})


def _totals(
    modes: Mapping[str, TracedMode], found: Mapping[str, Any], layers: int, sequence_length: int
) -> dict[str, Any]:
    parameters = layers * found["parameters_per_layer"] + found["parameters_besides"]
    return {
        "num_layers": layers,
        "parameters": parameters,
        "state_bytes": round(parameters * sum(found["bytes_per_parameter"].values())),
        "modes": {
            name: {
                "kept_bytes": round(
                    layers * mode.kept.of(tokens=sequence_length, sequence_length=sequence_length)
                ),
                "peak_bytes_above_states": round(
                    mode.peak_bytes(
                        num_layers=layers, tokens=sequence_length, sequence_length=sequence_length
                    )
                ),
            }
            for name, mode in modes.items()
        },
    }


def _print(modes: Mapping[str, TracedMode], found: Mapping[str, Any], sequence_length: int) -> None:
    columns = [
        Column(title="recompute"),
        Column(title="kept", right=True),
        Column(title="backward", right=True),
        Column(title="head", right=True),
        Column(title="check", right=True),
        Column(title="CPU s", right=True),
    ]
    rows = [
        [
            name,
            *(
                f"{term.of(tokens=sequence_length, sequence_length=sequence_length) / sequence_length:,.0f}"
                for term in _first(mode)
            ),
            f"{found['check'][name]:+.2%}",
            f"{found['cpu_seconds'][name]:.1f}",
        ]
        for name, mode in modes.items()
    ]
    write(
        f"Bytes per token of one sequence of {sequence_length:,}: kept by a layer; and on top of all layers' at the fullest moment of"
    )
    write(
        "the last layer's backward pass, and of head and loss. Check: another depth and batch, predicted from these against traced."
    )
    write_table(columns, rows)
    write(
        f"Parameters: {found['parameters_per_layer']:,} a layer, {found['parameters_besides']:,} besides."
    )


def _first(mode: TracedMode) -> tuple[TracedBytes, ...]:
    return mode.kept, mode.backward, mode.head


def _print_totals(totals: Mapping[str, Any]) -> None:
    write()
    write(
        f"{totals['num_layers']} layers, {totals['parameters']:,} parameters: {totals['state_bytes'] / GIB:,.1f} GiB of states, "
        "and for a micro-batch of one sequence"
    )
    columns = [
        Column(title="recompute"),
        Column(title="GiB kept", right=True),
        Column(title="GiB at the peak", right=True),
    ]
    rows = [
        [name, f"{each['kept_bytes'] / GIB:,.2f}", f"{each['peak_bytes_above_states'] / GIB:,.2f}"]
        for name, each in totals["modes"].items()
    ]
    write_table(columns, rows)


def _written(term: TracedBytes) -> Any:
    """As a sweep file says it: a number alone is per token."""
    if not term.per_token_and_position and not term.fixed:
        return _number(term.per_token)
    parts = {
        "per_token": term.per_token,
        "per_token_and_position": term.per_token_and_position,
        "fixed": term.fixed,
    }
    return {name: _number(value) for name, value in parts.items() if value}


def _number(value: float) -> float:
    return int(value) if value == int(value) else value


def _yaml(section: Mapping[str, Any], command: str) -> str:
    lines = [
        f"trainer:  # {command}",
        f"  bytes_per_parameter: {_flow(section['bytes_per_parameter'])}",
        "  activations:",
    ]
    return "\n".join(
        [*lines, *(f"    {name}: {_flow(terms)}" for name, terms in section["activations"].items())]
    )


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(each)}" for name, each in value.items()) + "}"
    return f"{_number(value)}"
