"""Builds trace documents by hand, in whole microseconds."""

from __future__ import annotations

from typing import Any

STREAM, COMMUNICATION = 7, 20
MAIN = 1


def document(*rows: dict[str, Any], steps: tuple[int, int] = (0, 100), **keys: Any) -> Any:
    """A trace whose steps last from one microsecond to another."""
    start, end = steps
    marked = host("sweep::steps", start, end, category="user_annotation")
    return {"traceEvents": [marked, *rows], **keys}


def host(name: str, start: int, end: int, *, category: str = "cpu_op", **more: Any) -> Any:
    return _row(name, start, end, category, more.pop("thread", MAIN), more)


def annotation(name: str, start: int, end: int, **more: Any) -> Any:
    return host(name, start, end, category="user_annotation", **more)


def launch(start: int, end: int, correlation: int, name: str = "cudaLaunchKernel") -> Any:
    return host(name, start, end, category="cuda_runtime", correlation=correlation)


def kernel(name: str, start: int, end: int, correlation: int = 0, **more: Any) -> Any:
    arguments = {**({"correlation": correlation} if correlation else {}), **more}
    return _row(name, start, end, "kernel", arguments.pop("stream", STREAM), arguments)


def nccl(start: int, end: int, group: str, name: str = "AllReduce", **more: Any) -> Any:
    described = {"Process Group Name": group, "Process Group Description": f"mesh_{group}"}
    full = f"ncclDevKernel_{name}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return kernel(full, start, end, **{"stream": COMMUNICATION, **described, **more})


def _row(
    name: str, start: int, end: int, category: str, thread: int, arguments: dict[str, Any]
) -> Any:
    times = {"ts": start, "dur": end - start}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "args": arguments,
    } | times
