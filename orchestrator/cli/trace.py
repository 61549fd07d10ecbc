"""The command `trace`: the memory of the user's own model, without a GPU.

The trace needs torch, and runs as a process of its own. The result is a table, and the section
`trainer` for a sweep file.
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

from layout_sweep.start import command
from orchestrator.cli.options import Json
from orchestrator.cli.terminal.output import Column, note, numbers, write, write_json, write_table
from orchestrator.core.errors import UsageInvalid

if TYPE_CHECKING:
    from orchestrator.core.physics.traced_memory import TracedBytes, TracedMode

GIB = 1 << 30
_TERMS = ("kept", "backward", "head", "end")


def trace(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="The function that builds your model with a given number of layers.",
        ),
    ],
    sequence_length: Annotated[
        int, typer.Option(min=64, max=1 << 24, help="Tokens of a sequence.")
    ] = 4096,
    layers: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help="Also show totals for a model of so many layers."),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(help="Modes, separated by commas. Default: all that the function accepts."),
    ] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="The precision of weights. Default: as the function makes them."),
    ] = None,
    autocast: Annotated[
        bool, typer.Option("--autocast", help="Run products in bf16 with torch.autocast.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Trace the memory of your own model, without a GPU.

    Runs forward and backward of 2, 3 and 5 of its layers on tensors without memory, and prints the
    section `trainer` for a sweep file.

    Examples:
      sweep trace mine:build --precision bf16
      sweep trace mine:build --autocast --sequence-length 8192 --layers 32

      mine.py:  def build(num_layers, recompute='none'): return Model(num_layers, recompute)
    """
    options = [f"--sequence-length={sequence_length}"]
    options += [f"--recompute={recompute}"] if recompute is not None else []
    options += [f"--precision={precision}"] if precision is not None else []
    options += ["--autocast"] if autocast else []
    found = _trace(target, options)
    modes = {name: _mode(terms) for name, terms in found["modes"].items()}
    section = _section(modes, found)
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
    command = ["sweep trace", target, f"--sequence-length {sequence_length}"]
    command += [f"--precision {precision}"] if precision is not None else []
    command += ["--autocast"] if autocast else []
    _print_section(section, " ".join(command))
    for remark in found["notes"]:
        note(f"note: {remark}")


def _trace(target: str, options: list[str]) -> dict[str, Any]:
    """Run the trace as a process. Raises UsageInvalid with its message."""
    if importlib.util.find_spec("torch") is None:
        raise UsageInvalid(
            f"sweep trace needs torch, which is not installed in {sys.prefix}: pip install"
            " '.[train]' in the cloned folder"
        )
    done = subprocess.run(
        command("workloads.tools.memory_trace", *options, "--", target),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        how = f"exit code {done.returncode}"
        if -done.returncode in set(signal.Signals):
            how = signal.Signals(-done.returncode).name
        message = lines[-1][-300:] if lines else "no message"
        raise UsageInvalid(f"{target}: the trace ended with {how}: {message}") from None
    if "error" in found:
        raise UsageInvalid(f"{target}: {found['error']}")
    return found


def _mode(terms: Mapping[str, Mapping[str, float]]) -> TracedMode:
    from orchestrator.core.physics.traced_memory import TracedBytes, TracedMode  # needs numpy

    return TracedMode(**{name: TracedBytes(**term) for name, term in terms.items()})


def _section(modes: Mapping[str, TracedMode], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `trainer` of a sweep file."""
    activations = {
        name: {
            term: _written(getattr(mode, term))
            for term in _TERMS
            if term != "end" or _written(mode.end)
        }
        for name, mode in modes.items()
    }
    return {"bytes_per_parameter": found["bytes_per_parameter"], "activations": activations}


def _print_section(section: Mapping[str, Any], command: str) -> None:
    write()
    write(f"trainer:  # {command}")
    write(f"  bytes_per_parameter: {_flow(section['bytes_per_parameter'])}")
    write("  activations:")
    for name, terms in section["activations"].items():
        write(f"    {name}: {_flow(terms)}")


def _totals(
    modes: Mapping[str, TracedMode], found: Mapping[str, Any], layers: int, sequence_length: int
) -> dict[str, Any]:
    parameters = layers * found["parameters_per_layer"] + found["parameters_besides"]
    size = {"tokens": sequence_length, "sequence_length": sequence_length}
    return {
        "num_layers": layers,
        "parameters": parameters,
        "state_bytes": round(parameters * sum(found["bytes_per_parameter"].values())),
        "modes": {
            name: {
                "kept_bytes": round(layers * mode.kept.of(**size)),
                "peak_bytes_above_states": round(mode.peak_bytes(num_layers=layers, **size)),
            }
            for name, mode in modes.items()
        },
    }


def _print(modes: Mapping[str, TracedMode], found: Mapping[str, Any], sequence_length: int) -> None:
    def per_token(term: TracedBytes) -> str:
        size = term.of(tokens=sequence_length, sequence_length=sequence_length)
        return f"{size / sequence_length:,.0f}"

    rows = [
        [
            name,
            *map(per_token, (mode.kept, mode.backward, mode.head)),
            f"{found['check'][name]:+.2%}",
            f"{found['cpu_seconds'][name]:.1f}",
        ]
        for name, mode in modes.items()
    ]
    write(
        f"Bytes per token of one sequence of {sequence_length:,}. kept: by each layer. backward and"
        " head: on top of\nwhat all layers keep, at the peak of the last layer's backward pass, and"
        " of head and loss.\ncheck: the error of a prediction from these for another depth and"
        " batch."
    )
    titles = ("kept", "backward", "head", "check", "CPU s")
    write_table([Column("recompute"), *numbers(*titles)], rows)
    layer, others = found["parameters_per_layer"], found["parameters_besides"]
    write(f"Parameters: {layer:,} in each layer, {others:,} outside the layers.")


def _print_totals(totals: Mapping[str, Any]) -> None:
    write()
    write(
        f"{totals['num_layers']} layers, {totals['parameters']:,} parameters:"
        f" {totals['state_bytes'] / GIB:,.1f} GiB of states, and for a micro-batch of one sequence"
    )
    rows = [
        [name, f"{each['kept_bytes'] / GIB:,.2f}", f"{each['peak_bytes_above_states'] / GIB:,.2f}"]
        for name, each in totals["modes"].items()
    ]
    write_table([Column("recompute"), *numbers("GiB kept", "GiB at the peak")], rows)


def _written(term: TracedBytes) -> Any:
    """A term as in a sweep file: a number alone is bytes per token."""
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


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(each)}" for name, each in value.items()) + "}"
    return f"{_number(value)}"
