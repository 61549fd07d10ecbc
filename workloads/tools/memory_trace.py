"""Traces the memory of a model of one's own as a process: `python -m workloads.tools.memory_trace
MODULE:FUNCTION` writes one JSON document.

`sweep trace` starts it, and makes a table and a part of a sweep file of what it says. An `error` in
the document is for people.
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

from orchestrator.core.problem.layout import Precision
from workloads.tools.model_trace import TraceRefused, trace_model

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
    """Trace, and write the document to stdout; whatever else is printed meanwhile goes to stderr."""
    asked = parser().parse_args(arguments)
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        found = document(asked)
        json.dump(found, stdout)
    return 2 if "error" in found else 0


def document(asked: argparse.Namespace) -> dict[str, Any]:
    """What a trace found, or `error`: why there can be none, and what to change."""
    try:
        build = _imported(asked.target)
        gc.collect()
        # What imports made holds none of the model's tensors, and takes long to look through
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
        # The model's code may raise anything, and its author is told where
        return {"error": _explained(exc)}
    return asdict(traced)


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog="python -m workloads.tools.memory_trace",
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
            f"{target!r} is not MODULE:FUNCTION; write it as mine:build for the function `build` of mine.py"
        )
    sys.path.insert(0, str(Path.cwd()))
    if module_name.endswith(".py"):
        raise TraceRefused(
            f"{target!r} names a file; write the module: {module_name.removesuffix('.py').replace('/', '.')}:{function_name}"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name != module_name.partition(".")[0] and exc.name != module_name:
            raise TraceRefused(
                f"{module_name} needs {exc.name}, which is not installed in {sys.executable}"
            ) from exc
        raise TraceRefused(
            f"no module {module_name}: neither in {Path.cwd()} nor installed; start it in the folder of your code"
        ) from exc
    except Exception as exc:
        raise TraceRefused(f"{module_name} cannot be imported: {_said(exc)}{_place(exc)}") from exc
    function = getattr(module, function_name, None)
    if not callable(function):
        close = get_close_matches(
            function_name, [name for name, value in vars(module).items() if callable(value)], n=1
        )
        hint = f"; did you mean {close[0]}?" if close else ""
        raise TraceRefused(f"{module_name} has no function {function_name}{hint}")
    return function  # type: ignore[no-any-return]  # asked just now


def _explained(exc: Exception) -> str:
    if (
        isinstance(exc, _REAL_VALUES)
        or "numpy() is not supported" in str(exc)
        or "tolist() is not supported" in str(exc)
    ):
        return (
            f"the model asks for the value of a tensor{_place(exc)}, and in a trace tensors have none: leave out .item(), .tolist(), .numpy(), "
            "`if` on a tensor and masks as indices, or build the model for the trace without that part"
        )
    if isinstance(exc, TypeError) and "positional argument" in str(exc):
        return f"{_said(exc)}{_place(exc)}; a model alone is called with token ids and targets, or return (model, loss): docs/workloads.md"
    return f"the model cannot be run{_place(exc)}: {_said(exc)}"


def _said(exc: Exception) -> str:
    first = next((line.strip() for line in str(exc).splitlines() if line.strip()), "")
    return f"{type(exc).__name__}: {first[:300]}"


def _place(exc: Exception) -> str:
    """The last line of the model's own code, with what stands there."""
    frames = [
        f
        for f in traceback.extract_tb(exc.__traceback__)
        if not f.filename.startswith((_OF_TORCH, _OWN + "/workloads", "<frozen"))
    ]
    if not frames:
        return ""
    return (
        f" at {frames[-1].filename}:{frames[-1].lineno} (`{frames[-1].line}`)"
        if frames[-1].line
        else f" at {frames[-1].filename}"
    )


if __name__ == "__main__":
    sys.exit(main())
