"""Traces the memory of a user's own model, MODULE:FUNCTION, and writes one JSON document.

`sweep trace` starts it, and makes a table and a part of a sweep file from it. An `error` in the
document is for people.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from layout_sweep.start import return_imports
from orchestrator.core.problem.layout import Precision
from workloads.tools.model_trace import trace_model
from workloads.tools.traced_run import TraceRefused

_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}
_OF_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[2])
_REAL_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace, and write the document to stdout; all other output goes to stderr."""
    asked = parser().parse_args(arguments)
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        found = document(asked)
        json.dump(found, stdout)
    return 2 if "error" in found else 0


def document(asked: argparse.Namespace) -> dict[str, Any]:
    """The result of a trace, or `error`: why it failed, and what to change."""
    try:
        build = _imported(asked.target)
        gc.collect()
        # Imported objects refer to none of the model's tensors, and are slow to search.
        gc.freeze()
        traced = trace_model(
            build,
            sequence_length=asked.sequence_length,
            recomputes=asked.recompute,
            dtype=_DTYPES[asked.precision] if asked.precision is not None else None,
            autocast=asked.autocast,
        )
    except TraceRefused as exc:
        return {"error": str(exc)}
    except Exception as exc:  # noqa: BLE001
        # The model's code may raise anything, and its author needs the place.
        return {"error": _explained(exc)}
    return asdict(traced)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workloads.tools.memory_trace",
        description="Trace the memory of a model of one's own.",
    )
    parser.add_argument("target", metavar="MODULE:FUNCTION")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--recompute", type=lambda text: text.split(","), default=None)
    parser.add_argument("--precision", type=Precision, choices=list(_DTYPES), default=None)
    parser.add_argument("--autocast", action="store_true")
    return parser


def _imported(target: str) -> Callable[..., Any]:
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise TraceRefused(
            f"{target!r} is not MODULE:FUNCTION; "
            "write it as mine:build for the function `build` of mine.py"
        )
    if module_name.endswith(".py"):
        module_name = module_name.removesuffix(".py").replace("/", ".")
        raise TraceRefused(
            f"{target!r} names a file; write the module: {module_name}:{function_name}"
        )
    return_imports()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name != module_name.partition(".")[0] and exc.name != module_name:
            raise TraceRefused(
                f"{module_name} needs {exc.name}, which is not installed in {sys.executable}"
            ) from exc
        raise TraceRefused(
            f"no module {module_name}: neither in {Path.cwd()} nor installed; "
            "start it in the folder of your code"
        ) from exc
    except Exception as exc:
        raise TraceRefused(
            f"{module_name} cannot be imported: {_first_line(exc)}{_place(exc)}"
        ) from exc
    function = getattr(module, function_name, None)
    if not callable(function):
        close = get_close_matches(
            function_name, [name for name, value in vars(module).items() if callable(value)], n=1
        )
        hint = f"; did you mean {close[0]}?" if close else ""
        raise TraceRefused(f"{module_name} has no function {function_name}{hint}")
    return function  # type: ignore[no-any-return]  # callable


def _explained(exc: Exception) -> str:
    unsupported = ("numpy() is not supported", "tolist() is not supported")
    if isinstance(exc, _REAL_VALUES) or any(text in str(exc) for text in unsupported):
        return (
            f"the model asks for the value of a tensor{_place(exc)}, and in a trace tensors have "
            "none: leave out .item(), .tolist(), .numpy(), `if` on a tensor and masks as indices, "
            "or build the model for the trace without that part"
        )
    if isinstance(exc, TypeError) and "positional argument" in str(exc):
        return (
            f"{_first_line(exc)}{_place(exc)}; a model alone is called with token ids and targets, "
            "or return (model, loss): docs/workloads.md"
        )
    return f"the model cannot be run{_place(exc)}: {_first_line(exc)}"


def _first_line(exc: Exception) -> str:
    first = next((line.strip() for line in str(exc).splitlines() if line.strip()), "")
    return f"{type(exc).__name__}: {first[:300]}"


def _place(exc: Exception) -> str:
    """The last line of the model's own code, with its text."""
    frames = [
        f
        for f in traceback.extract_tb(exc.__traceback__)
        if not f.filename.startswith((_OF_TORCH, _OWN + "/workloads", "<frozen"))
    ]
    if not frames:
        return ""
    last = frames[-1]
    return (
        f" at {last.filename}:{last.lineno} (`{last.line}`)"
        if last.line
        else f" at {last.filename}"
    )
