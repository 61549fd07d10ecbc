"""Recognises the kind of a failure by known messages, in order of precedence."""

from __future__ import annotations

import re
import string
from typing import NamedTuple

from orchestrator.core.trial.failure_kinds import FailureKind

_K = FailureKind


class Cause(NamedTuple):
    """The kind of a failure, and the text that shows it."""

    kind: FailureKind
    text: str
    # An out-of-memory that an allocator, a library of the device or the rank reports. It is then
    # neither inferred nor the doing of another process.
    is_reported: bool = False


# The first match wins, so the more specific text comes first.
# Sources: messages of torch, CUDA, cuBLAS, cuDNN, NCCL, gloo, glibc and Linux.
_MESSAGES: tuple[tuple[FailureKind, str], ...] = (
    # No model asks for such a size: it comes from a corrupted message, after communication failed.
    (_K.NCCL, r"tried to allocate (?:\d{6,}(?:\.\d+)? ?[GT]i?B|[\d.]+ ?[PE]i?B)"),
    # Limits of locked memory (ulimit -l) read like memory, and are the machine's configuration.
    (_K.NCCL, r"ibv_\w+ failed with error:? cannot allocate memory"),
    (_K.OOM_HOST, r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"),
    (_K.OOM_GPU, r"\b(?:torch\.(?:cuda\.)?|c10::)?OutOfMemoryError\b"),
    (_K.OOM_GPU, r"\b(?:CUDA|HIP|XPU|NPU) out of memory"),
    (_K.OOM_GPU, r"\b(?:CUDA|HIP) (?:runtime |driver )?error:? out of memory"),
    (_K.OOM_GPU, r"Cuda failure (?:\d+ )?'out of memory'"),
    (_K.OOM_GPU, r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory"),
    (_K.OOM_GPU, r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_ALLOC_FAILED"),
    (_K.OOM_GPU, r"CUFFT_ALLOC_FAILED"),
    (_K.OOM_GPU, r"Triton Error \[(?:CUDA|HIP)\]: out of memory"),
    (_K.OOM_GPU, r"Failed to CUDA (?:calloc|malloc)(?: async)?"),
    (_K.OOM_GPU, r"RESOURCE_EXHAUSTED: Out of memory"),
    (_K.OOM_GPU, r"cuMemCreate.{0,80}out of memory"),
    (_K.OOM_HOST, r"\bMemoryError\b|_ArrayMemoryError"),
    (_K.OOM_HOST, r"cannot allocate memory|std::bad_alloc|unable to mmap \d+ bytes"),
    (_K.OOM_HOST, r"oom-kill|oom_reaper|(?:Memory cgroup )?out of memory: Killed process"),
    # torch's DataLoader, when /dev/shm is full.
    (_K.OOM_HOST, r"insufficient shared memory \(shm\)|workers are out of shared memory"),
    (_K.OOM_HOST, r"unable to write to file </torch_"),
    (_K.PREEMPTED, r"slurmstepd: error: \*\*\* (?:JOB|STEP) [^ ]+ ON [^ ]+ CANCELLED AT"),
    (_K.PREEMPTED, r"SignalException: Process \d+ got signal: (?:1|2|15)\b"),
    (_K.PREEMPTED, r"\bSignal (?:1|2|15) \(SIG(?:HUP|INT|TERM)\) received by PID"),
    (_K.PREEMPTED, r"(?m)^(?:\[rank\d+\]: ?)?KeyboardInterrupt$|\bSIGTERMException\b"),
    (_K.PREEMPTED, r"spot instance interruption"),
    (_K.PREEMPTED, r"(?:instance|node) (?:is being|was|has been) preempted"),
    # Programs that check for it: Megatron-LM, torch's clip_grad_norm_ and anomaly mode, Lightning,
    # detectron2, fairseq, DeepSpeed.
    (_K.NOT_FINITE, r"found (?:NaN|Inf) in local (?:grad norm|forward loss)"),
    (_K.NOT_FINITE, r"(?:unexpected|found) result nan|gradients? .{0,60}is non-finite"),
    (_K.NOT_FINITE, r"returned nan values in its \d+(?:st|nd|rd|th) output"),
    (_K.NOT_FINITE, r"loss returned in `\w+` is (?:nan|inf)"),
    (_K.NOT_FINITE, r"\bloss (?:is|was|became|has become) (?:now )?(?:nan|inf|infinite)\b"),
    (_K.NOT_FINITE, r"\bloss (?:is|was|became|has become) (?:now )?(?:not |non-)finite\b"),
    (_K.NOT_FINITE, r"minimum loss scale reached|loss scale already at minimum"),
    (_K.PORT_CLASH, r"EADDRINUSE|address already in use"),
    (_K.DEVICE_ERROR, r"illegal memory access was encountered"),
    (_K.DEVICE_ERROR, r"CUBLAS_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED)"),
    (_K.XID, r"uncorrectable (?:NVLink|ECC) error|GPU (?:has fallen off the bus|is lost)"),
    (_K.DEVICE_ERROR, r"CUDA driver initialization failed|CUDA unknown error"),
    (_K.DEVICE_ERROR, r"no CUDA-capable device|No CUDA GPUs are available"),
    (_K.DEVICE_ERROR, r"Found no NVIDIA driver|invalid device ordinal"),
    (_K.DEVICE_ERROR, r"CUDA-capable device\(s\) is/are busy or unavailable"),
    (_K.DEVICE_ERROR, r"system not yet initialized|unspecified launch failure"),
    # A container's /dev/shm, 64 MB by default, is a setting of the machine and no disk.
    (_K.NCCL, r"failed to extend /dev/shm/nccl-|/dev/shm/nccl-[^\n]{0,120}No space left on device"),
    (_K.STORAGE, r"No space left on device|Disk quota exceeded|Read-only file system"),
    (_K.STORAGE, r"Stale (?:NFS )?file handle|Input/output error|Too many open files"),
    (_K.NCCL, r"Dist(?:Backend|Network|Store)Error|Rendezvous(?:Connection|Timeout|Closed)Error"),
    (_K.NCCL, r"nccl(?:System|Internal|Remote|UnhandledCuda)Error"),
    (_K.NCCL, r"NCCL (?:communicator was aborted|error)"),
    (_K.NCCL, r"Watchdog caught collective operation timeout"),
    (_K.NCCL, r"HeartbeatMonitor|heartbeat monitor timed out"),
    (_K.NCCL, r"gloo/transport/|Gloo connectFullMesh failed"),
    (_K.NCCL, r"Connection closed by peer|Connection reset by peer"),
    (_K.NCCL, r"TCPStore|Socket Timeout|client socket has timed out"),
    (_K.NCCL, r"Timed out waiting \d+ms for (?:recv|send)"),
    (_K.NCCL, r"NET/IB ?: Got completion|Broken pipe"),
)
# For lower-case text: a search that ignores case would take ten times as long.
_SIGNATURES = tuple((kind, re.compile(message.lower())) for kind, message in _MESSAGES)
# Keeps lengths, as str.lower does not.
_LOWER_CASE = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)

# A refused allocation of this process, which a smaller layout may not need.
_REFUSED_BY_HOST = re.compile(r"DefaultCPUAllocator|MemoryError\b")


def find_cause(text: str) -> Cause | None:
    """Return the first known cause in a text, with the line that shows it."""
    lower = text.translate(_LOWER_CASE)
    for kind, pattern in _SIGNATURES:
        match = pattern.search(lower)
        if match is not None:
            start = text.rfind("\n", 0, match.start()) + 1
            line = text[start : start + 1000].split("\n", 1)[0]
            is_reported = kind is _K.OOM_GPU or (
                kind is _K.OOM_HOST and _REFUSED_BY_HOST.search(line) is not None
            )
            return Cause(kind, line, is_reported)
    return None
