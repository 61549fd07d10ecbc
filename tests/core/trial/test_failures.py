"""Classification of failures: a corpus of real messages, and the first bad rank of a gang."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from orchestrator.core.trial.failure_kinds import (
    OUT_OF_MEMORY_KINDS,
    POLICIES,
    SUSPECT_KINDS,
    FailureKind,
    Fault,
    MemoryShortage,
    event_after,
    may_retry,
)
from orchestrator.core.trial.failures import (
    Evidence,
    cause_order,
    classify,
    first_bad,
    is_out_of_memory,
    proves_out_of_memory,
)
from orchestrator.core.trial.lifecycle import TrialEvent

K = FailureKind


def evidence(rank: int = 0, **known: object) -> Evidence:
    return Evidence(**({"rank": rank, "exit_code": 1} | known))  # type: ignore[arg-type]


# What a rank printed before it ended with exit code 1, and what it is. Wording of torch 1.10-2.13,
# CUDA 11-13, NCCL 2.18-2.28, gloo, glibc, CPython and Linux; process ids, addresses and sizes
# changed.
CORPUS: list[tuple[FailureKind, str]] = [
    (
        K.OOM_GPU,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 79.11 GiB",
    ),
    (
        K.OOM_GPU,
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 3; "
        "79.15 GiB total capacity)",
    ),
    (
        K.OOM_GPU,
        "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 15.78 GiB total "
        "capacity; 14.2 GiB already allocated)",
    ),
    (
        K.OOM_GPU,
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously "
        "reported at some other API call",
    ),
    (K.OOM_GPU, "torch.AcceleratorError: CUDA error: out of memory"),
    (
        K.OOM_GPU,
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 512.00 MiB. GPU 1 has a "
        "total capacity of 191.98 GiB",
    ),
    (
        K.OOM_GPU,
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    (K.OOM_GPU, "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    (
        K.OOM_GPU,
        "RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling "
        "`cusolverDnCreate(handle)`",
    ),
    (K.OOM_GPU, "node3:4121:4390 [3] include/alloc.h:125 NCCL WARN Cuda failure 'out of memory'"),
    (K.OOM_GPU, "node3:4121:4390 [3] alloc.cc:88 NCCL WARN Cuda failure 2 'out of memory'"),
    (K.OOM_GPU, "node1:77:412 [0] NCCL WARN Failed to CUDA calloc async 608 bytes"),
    (K.OOM_GPU, "RuntimeError: Triton Error [CUDA]: out of memory"),
    (
        K.OOM_GPU,
        "cudaErrorMemoryAllocation: The API call failed because it was unable to allocate enough "
        "memory",
    ),
    (K.OOM_GPU, "pycuda._driver.MemoryError: cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY"),
    (
        K.OOM_GPU,
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to "
        "allocate 17179869184 bytes.",
    ),
    (
        K.OOM_HOST,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 8",
    ),
    (
        K.OOM_HOST,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:75] . DefaultCPUAllocator: not enough "
        "memory: you tried to allocate 41943040 bytes.",
    ),
    (K.OOM_HOST, "MemoryError"),
    (
        K.OOM_HOST,
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB for an array with "
        "shape (100000, 100000)",
    ),
    (K.OOM_HOST, "OSError: [Errno 12] Cannot allocate memory"),
    (
        K.OOM_HOST,
        "terminate called after throwing an instance of 'std::bad_alloc'\n"
        "  what():  std::bad_alloc",
    ),
    (
        K.OOM_HOST,
        "RuntimeError: unable to mmap 1073741824 bytes from file </dev/shm/torch_77_1>: Cannot "
        "allocate memory (12)",
    ),
    (
        K.OOM_HOST,
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
        "shared memory (shm).",
    ),
    (
        K.OOM_HOST,
        "[88213.4] Memory cgroup out of memory: Killed process 4121 (python) total-vm:98304kB",
    ),
    (
        K.PORT_CLASH,
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: "
        "address already in use",
    ),
    (K.PORT_CLASH, "OSError: [Errno 98] Address already in use"),
    (
        K.NCCL,
        "torch.distributed.DistBackendError: NCCL error in: "
        "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, unhandled system error",
    ),
    (
        K.NCCL,
        "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:3690, ncclRemoteError: A call failed "
        "possibly due to a network error",
    ),
    (
        K.NCCL,
        "[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, "
        "OpType=ALLREDUCE, Timeout(ms)=600000)",
    ),
    (
        K.NCCL,
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by "
        "peer [127.0.0.1]:41236",
    ),
    (
        K.NCCL,
        "RuntimeError: Gloo connectFullMesh failed with "
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
    ),
    (
        K.NCCL,
        "RuntimeError: [third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out "
        "waiting 1800000ms for recv operation to complete",
    ),
    (
        K.NCCL,
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 "
        "clients joined.",
    ),
    (
        K.NCCL,
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while "
        "trying to connect to (node0, 29500).",
    ),
    (
        K.NCCL,
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the "
        "C10d store has failed.",
    ),
    (
        K.NCCL,
        "node7:811:911 [5] NCCL WARN NET/IB : Got completion from peer 10.0.0.7 with status=12 "
        "opcode=0 len=0 vendor err 129",
    ),
    (
        K.NCCL,
        "node7:811:911 [5] NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
    ),
    (
        K.NCCL,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1048576.00 TiB.",
    ),  # a corrupted size, after a time-out
    (
        K.NCCL,
        "RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.\nRuntimeError: "
        "Tried to allocate 1 EiB",
    ),
    (
        K.DEVICE_ERROR,
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ),
    (
        K.DEVICE_ERROR,
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling "
        "`cublasCreate(handle)`",
    ),
    (K.XID, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    (
        K.DEVICE_ERROR,
        "RuntimeError: CUDA error: all CUDA-capable devices are busy; CUDA-capable device(s) "
        "is/are busy or unavailable",
    ),
    (K.DEVICE_ERROR, "RuntimeError: No CUDA GPUs are available"),
    (
        K.DEVICE_ERROR,
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment",
    ),
    (K.XID, "NVRM: Xid (PCI:0000:1b:00): 79, pid=4121, GPU has fallen off the bus."),
    # github.com/leptonai/gpud/pull/1174 and .../NVSentinel/issues/155
    (K.XID, "NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error"),
    (K.XID, "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"),
    # github.com/leptonai/gpud/pull/46: what a program did, by NVIDIA's catalogue
    (
        K.SEGFAULT,
        "[Fri Aug 30 11:43:09 2024] NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', "
        "name=<unknown>, Graphics SM Warp Exception on (GPC 7)",
    ),
    # github.com/NVIDIA/open-gpu-kernel-modules/issues/1150: the clean-up after another error tells
    # nothing by itself
    (
        K.USER_ERROR,
        "kernel: NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by "
        "previous Xid 149",
    ),
    # github.com/SystemsGenetics/GEMmaker/pull/242, and Slurm's words for other reasons
    (
        K.PREEMPTED,
        "slurmstepd: error: *** JOB 32391783 ON cn119 CANCELLED AT 2021-06-18T13:05:36 DUE TO "
        "PREEMPTION ***",
    ),
    (
        K.PREEMPTED,
        "slurmstepd: error: *** STEP 5213.0 ON n1 CANCELLED AT 2026-03-02T10:00:01 DUE TO TIME "
        "LIMIT ***",
    ),
    # github.com/Facico/Chinese-Vicuna/issues/73: torchrun in a terminal that was closed
    (
        K.PREEMPTED,
        "torch.distributed.elastic.multiprocessing.api.SignalException: "
        "Process 17871 got signal: 1",
    ),
    (
        K.PREEMPTED,
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 2920830 got "
        "signal: 15",
    ),
    # Python on SIGINT, Lightning on SIGTERM
    (
        K.PREEMPTED,
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    '
        "time.sleep(600)\nKeyboardInterrupt",
    ),
    (K.PREEMPTED, "lightning.pytorch.utilities.exceptions.SIGTERMException"),
    # github.com/alibaba/Pai-Megatron-Patch/issues/366 and /60,
    # github.com/facebookresearch/detectron2/issues/214,
    # github.com/facebookresearch/fairseq/issues/1529, github.com/KaiyangZhou/CoOp/issues/73;
    # torch.nn.utils.clip_grad_norm_, torch's anomaly mode, Lightning's detect_nan_parameters,
    # DeepSpeed's loss scaler
    (
        K.NOT_FINITE,
        "AssertionError: Rank 11: found NaN in local grad norm in backward pass before "
        "data-parallel communication collective. Device: 3",
    ),
    (
        K.NOT_FINITE,
        "AssertionError: Rank 3: found NaN in local grad norm in backwards pass. Device: 3, node: "
        "set-zw04-kubernetes-pc133.mt",
    ),
    (K.NOT_FINITE, "FloatingPointError: Loss became infinite or NaN at iteration=0!"),
    (K.NOT_FINITE, "FloatingPointError: Loss is infinite or NaN!"),
    (
        K.NOT_FINITE,
        "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.",
    ),
    (
        K.NOT_FINITE,
        "RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, "
        "so it cannot be clipped.",
    ),
    (K.NOT_FINITE, "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output."),
    (K.NOT_FINITE, "ValueError: The loss returned in `training_step` is nan."),
    (
        K.NOT_FINITE,
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting "
        "run.",
    ),
    (K.NOT_FINITE, "AssertionError: loss is nan"),
    (K.NOT_FINITE, "workloads.rank.NotFinite: the loss of step 3 is nan"),
    (
        K.DEVICE_ERROR,
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( "
        "handle, opa, opb, m, n, k)`",
    ),
    (
        K.DEVICE_ERROR,
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA "
        "GPU",
    ),
    (K.DEVICE_ERROR, "torch.AcceleratorError: CUDA error: invalid device ordinal"),
    (
        K.OOM_HOST,
        "RuntimeError: DataLoader worker (pid 41) is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory.",
    ),
    (
        K.OOM_HOST,
        "RuntimeError: unable to write to file </torch_77_1>: No space left on device (28)",
    ),
    (K.STORAGE, "OSError: [Errno 28] No space left on device: '/scratch/step-3.pt'"),
    (
        K.NCCL,
        "node-1:77:90 [0] misc/shmutils.cc:87 NCCL WARN Error: failed to extend "
        "/dev/shm/nccl-Jr1Z9b to 33030532 bytes, error: No space left on device (28)",
    ),
    (K.STORAGE, "OSError: [Errno 122] Disk quota exceeded"),
    (K.STORAGE, "OSError: [Errno 116] Stale file handle: '/data/tokens.bin'"),
    (K.STORAGE, "OSError: [Errno 5] Input/output error"),
    (K.STORAGE, "OSError: [Errno 30] Read-only file system: '/scratch'"),
    (
        K.STORAGE,
        "RuntimeError: unable to open shared memory object </torch_77_1> in read-write mode: Too "
        "many open files (24)",
    ),
    (
        K.CONFIG_REJECTED,
        "workloads.rank.ConfigRejected: tensor_parallel_size 3 does not divide num_key_value_heads "
        "8",
    ),
    (K.USER_ERROR, "ValueError: expected 4 arguments"),
    (K.USER_ERROR, "ModuleNotFoundError: No module named 'apex'"),
    (K.USER_ERROR, "RuntimeError: CUDA error: device-side assert triggered"),
    (
        K.USER_ERROR,
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (128x4096 and 2048x4096)",
    ),
    (K.USER_ERROR, "KeyError: 'model.layers.0.self_attn.q_proj.weight'"),
    (
        K.USER_ERROR,
        "usage: train.py [-h] --mbs MBS\ntrain.py: error: the following arguments are required: "
        "--mbs",
    ),
]


@pytest.mark.parametrize(
    ("kind", "text"), CORPUS, ids=[f"{kind}-{index}" for index, (kind, _) in enumerate(CORPUS)]
)
def test_what_real_stacks_print_is_understood(kind: FailureKind, text: str) -> None:
    failure = classify(evidence(log_tail=f"step 3 loss 10.2\n{text}\n"))
    assert failure.kind is kind, failure
    assert failure.evidence


@pytest.mark.parametrize(
    ("kind", "text"), [pair for pair in CORPUS if ": " in pair[1] and pair[1][0] not in "n[u"]
)
def test_a_failure_note_and_a_log_lead_to_the_same_kind(kind: FailureKind, text: str) -> None:
    exception, _, message = text.partition(": ")
    assert classify(evidence(exception=exception, message=message, log_tail="noise")).kind is kind


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (K.SEGFAULT, {"signal": signal.SIGSEGV, "exit_code": None}),
        (K.SEGFAULT, {"signal": signal.SIGABRT, "exit_code": None}),
        (K.SEGFAULT, {"exit_code": 139}),  # a shell's way to say SIGSEGV
        (K.KILLED, {"signal": signal.SIGKILL, "exit_code": None}),
        (K.KILLED, {"exit_code": 137}),
        (K.PREEMPTED, {"signal": signal.SIGTERM, "exit_code": None}),
        (K.PREEMPTED, {"signal": signal.SIGINT, "exit_code": None}),
        (K.PREEMPTED, {"signal": signal.SIGHUP, "exit_code": None}),
        (K.PREEMPTED, {"exit_code": 143}),
        (
            K.PREEMPTED,
            {
                "exit_code": 143,
                "log_tail": "NCCL WARN NET/Socket : Connection reset by peer (ignored)",
            },
        ),
        (
            K.OOM_GPU,
            {
                "exit_code": 1,
                "log_tail": "torch.OutOfMemoryError: CUDA out of memory",
                "xids": [79],
            },
        ),
        (K.XID, {"signal": signal.SIGKILL, "exit_code": None, "xids": [45, 79]}),
        (
            K.XID,
            {
                "exit_code": None,
                "timed_out": "steady limit of 60 s passed",
                "phase": "steady",
                "xids": [119],
            },
        ),
        (
            K.XID,
            {
                "exception": "torch.AcceleratorError",
                "message": "CUDA error: an illegal memory access was encountered",
                "xids": [94],
            },
        ),
        (
            K.SEGFAULT,
            {
                "exception": "torch.AcceleratorError",
                "message": "CUDA error: an illegal memory access was encountered",
                "xids": [31],
            },
        ),
        (
            K.DEVICE_ERROR,
            {
                "exception": "RuntimeError",
                "message": "CUDA error: unspecified launch failure",
                "xids": [45, 63],
            },
        ),
        (K.USER_ERROR, {"exception": "ValueError", "message": "bad shape", "xids": [31]}),
        (K.BAD_RESULT, {"exit_code": 0, "bad_result": "none", "xids": [63]}),
        (
            K.NOT_FINITE,
            {
                "exit_code": 0,
                "exception": "workloads.rank.NotFinite",
                "message": "loss_last is nan",
            },
        ),
        (K.OOM_HOST, {"signal": signal.SIGKILL, "exit_code": None, "num_oom_kills": 1}),
        (K.OOM_HOST, {"exit_code": 137, "num_oom_kills": 2}),
        (K.SEGFAULT, {"signal": signal.SIGSEGV, "exit_code": None, "num_oom_kills": 1}),
        (K.USER_ERROR, {"exit_code": 1}),
        (
            K.BAD_RESULT,
            {
                "exit_code": 0,
                "bad_result": "result is not valid",
                "log_tail": "ValueError: caught and mended\nTCPStore",
            },
        ),
        (
            K.START_TIMEOUT,
            {
                "exit_code": None,
                "timed_out": "rendezvous limit of 60 s passed",
                "phase": "rendezvous",
            },
        ),
        (
            K.HUNG,
            {"exit_code": None, "timed_out": "steady limit of 60 s passed", "phase": "steady"},
        ),
        (
            K.HUNG,
            {
                "exit_code": None,
                "timed_out": "steady limit of 60 s passed",
                "phase": "steady",
                "log_tail": "NCCL error in: x",
            },
        ),
        (
            K.HUNG,
            {
                "exit_code": None,
                "timed_out": "steady limit",
                "phase": "steady",
                "log_tail": "std::bad_alloc caught, ignored",
            },
        ),
        (
            K.KILLED,
            {
                "signal": signal.SIGKILL,
                "exit_code": None,
                "log_tail": "caught CUDA out of memory in autotune, retrying",
            },
        ),
        (
            K.BAD_RESULT,
            {
                "exit_code": 0,
                "bad_result": "none",
                "log_tail": "caught CUDA out of memory in autotune, retrying",
            },
        ),
        (K.OOM_GPU, {"exception": "mylib.DoesNotFit", "noted_out_of_memory": True}),
    ],
)
def test_exit_codes_signals_and_limits_are_understood(
    kind: FailureKind, known: dict[str, object]
) -> None:
    assert classify(evidence(**known)).kind is kind


def test_an_illegal_access_is_an_out_of_memory_only_near_the_limit() -> None:
    text = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    gib = 1 << 30
    assert classify(evidence(log_tail=text)).kind is K.DEVICE_ERROR
    assert (
        classify(
            evidence(log_tail=text, peak_memory_bytes=60 * gib, device_memory_bytes=80 * gib)
        ).kind
        is K.DEVICE_ERROR
    )
    assert (
        classify(
            evidence(log_tail=text, peak_memory_bytes=70 * gib, device_memory_bytes=80 * gib)
        ).kind
        is K.OOM_GPU
    )
    # However much of the memory is in use.
    broken = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
    assert (
        classify(
            evidence(log_tail=broken, peak_memory_bytes=79 * gib, device_memory_bytes=80 * gib)
        ).kind
        is K.XID
    )
    full = {"peak_memory_bytes": 79 * gib, "device_memory_bytes": 80 * gib}
    assert classify(evidence(log_tail=text, xids=[31], **full)).kind is K.OOM_GPU
    assert (
        POLICIES[K.DEVICE_ERROR].fault
        is POLICIES[K.XID].fault
        is POLICIES[K.STORAGE].fault
        is Fault.MACHINE
    )


def test_a_failure_by_an_xid_names_its_number_and_what_the_program_felt() -> None:
    felt = {
        "exception": "torch.AcceleratorError",
        "message": "CUDA error: unspecified launch failure\nCUDA kernel errors might be",
    }
    failure = classify(evidence(2, phase="steady", xids=[45, 79], **felt))
    assert failure.message == (
        "rank 2 lost its GPU in steady: Xid 79 (GPU has fallen off the bus): "
        "torch.AcceleratorError: CUDA error: unspecified launch failure"
    )
    crashed = classify(evidence(2, phase="steady", xids=[31], **felt))
    assert crashed.message.startswith(
        "rank 2 crashed in steady: Xid 31 (GPU memory page fault): torch.AcceleratorError"
    )


def test_a_failure_that_a_launcher_of_ranks_passes_on_is_found_in_its_log() -> None:
    passed_on = (
        "AssertionError: Rank 0: found NaN in local grad norm in backward pass\nTraceback (most "
        "recent call last):\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    assert classify(evidence(log_tail=passed_on)).kind is K.NOT_FINITE
    ended = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n  traceback : "
        "Signal 15 (SIGTERM) received by PID 59462\n"
    )
    assert classify(evidence(log_tail=ended)).kind is K.PREEMPTED


def test_a_layout_that_diverges_is_a_result_and_a_preempted_trial_waits_again() -> None:
    assert POLICIES[K.NOT_FINITE].fault is Fault.LAYOUT and not may_retry(K.NOT_FINITE, {})
    assert POLICIES[K.PREEMPTED].fault is Fault.MACHINE
    assert may_retry(K.PREEMPTED, {K.PREEMPTED: 2}) and not may_retry(K.PREEMPTED, {K.PREEMPTED: 3})


def test_noise_about_the_network_does_not_hide_the_exception_that_ended_a_rank() -> None:
    log = (
        "NCCL WARN NET/IB : Connection reset by peer (retried)\nTraceback (most recent call "
        "last):\nValueError: bad shape\n"
    )
    assert classify(evidence(log_tail=log)).kind is K.USER_ERROR
    assert (
        classify(evidence(exception="ValueError", message="bad shape", log_tail=log)).kind
        is K.USER_ERROR
    )


def test_an_out_of_memory_behind_another_exception_is_found_in_the_traceback() -> None:
    note = evidence(
        exception="RuntimeError",
        message="layer 3 failed",
        traceback="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n\nThe "
        "above exception was the direct cause",
    )
    assert classify(note).kind is K.OOM_GPU


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "train.py", line 3, in step\n    run()  # may '
    "raise torch.OutOfMemoryError: CUDA out of memory\n"
)
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


@pytest.mark.parametrize(
    ("kind", "printed"),
    [
        (K.USER_ERROR, f"{TRACEBACK}ValueError: x\n"),
        (
            K.USER_ERROR,
            f"caught CUDA out of memory in autotune, retrying\n{TRACEBACK}ValueError: x\n",
        ),
        (
            K.USER_ERROR,
            f"{TRACEBACK}{OOM}\nretrying with a smaller tile\n{TRACEBACK}ValueError: x\n",
        ),
        (K.OOM_GPU, f"{TRACEBACK}{OOM}\n{CAUSE}{TRACEBACK}RuntimeError: layer 3 failed\n"),
        (
            K.OOM_GPU,
            f"{TRACEBACK}{OOM}\n{TRACEBACK}subprocess.CalledProcessError: Command 'train' returned "
            "non-zero exit status 1.\n",
        ),
        (
            K.OOM_GPU,
            "NCCL WARN Cuda failure 2 'out of memory'\ntorch.distributed.DistBackendError: NCCL "
            "error in: x, unhandled cuda error\n",
        ),
        (K.OOM_HOST, f"ValueError: caught before\n{TRACEBACK}MemoryError\n"),
    ],
)
def test_an_out_of_memory_counts_only_where_the_rank_died_of_it(
    kind: FailureKind, printed: str
) -> None:
    assert classify(evidence(log_tail=printed)).kind is kind
    with_rank = "".join(f"[rank1]: {line}\n" for line in printed.splitlines())
    assert classify(evidence(log_tail=with_rank)).kind is kind


def test_a_source_line_that_names_an_out_of_memory_is_none() -> None:
    note = {"exception": "ValueError", "message": "x"}
    assert classify(evidence(**note, traceback=f"{TRACEBACK}ValueError: x\n")).kind is K.USER_ERROR
    assert (
        classify(
            evidence(**note, traceback=f"{TRACEBACK}{OOM}\n{CAUSE}{TRACEBACK}ValueError: x\n")
        ).kind
        is K.OOM_GPU
    )


def test_the_log_of_a_rank_that_we_killed_shows_nothing() -> None:
    killed = evidence(
        exit_code=None,
        log_tail="CUDA out of memory, caught\nan illegal memory access was encountered",
    )
    assert classify(killed).kind is K.USER_ERROR
    full = {"peak_memory_bytes": 79, "device_memory_bytes": 80}
    assert (
        classify(
            evidence(exit_code=None, log_tail="illegal memory access was encountered", **full)
        ).kind
        is K.USER_ERROR
    )


def test_the_first_failure_of_a_gang_counts() -> None:
    gang = [
        evidence(0, exception="ValueError", at_unix_seconds=11.0),
        evidence(1, exception="KeyError", at_unix_seconds=10.0),
    ]
    assert first_bad(gang).rank == 1


def test_a_peer_that_lost_communication_or_aborted_is_innocent_even_if_it_died_first() -> None:
    gang = [
        evidence(
            0,
            log_tail="RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer",
            at_unix_seconds=1.0,
        ),
        evidence(1, exit_code=None, signal=signal.SIGABRT, at_unix_seconds=1.5),
        evidence(2, exit_code=None, signal=signal.SIGKILL, at_unix_seconds=2.0),
    ]
    assert (first_bad(gang).kind, first_bad(gang).rank) == (K.KILLED, 2)
    assert first_bad(gang[:1]).kind is K.NCCL


def test_an_out_of_memory_anywhere_explains_all_the_rest() -> None:
    gang = [
        evidence(
            0, exit_code=None, timed_out="first_step limit", phase="first_step", at_unix_seconds=5.0
        ),
        evidence(1, log_tail="torch.distributed.DistBackendError: NCCL error", at_unix_seconds=3.0),
        evidence(
            2,
            exception="torch.OutOfMemoryError",
            message="CUDA out of memory.",
            at_unix_seconds=4.0,
        ),
    ]
    assert (first_bad(gang).kind, first_bad(gang).rank) == (K.OOM_GPU, 2)


@pytest.mark.parametrize(
    ("is_total", "said"),
    [
        (True, "rank 0 was still in steady, at step 12: limit of 60 s passed"),
        (False, "rank 0 made no progress in steady: limit of 60 s passed"),
    ],
)
def test_only_the_limit_of_a_phase_says_that_no_progress_was_made(
    is_total: bool, said: str
) -> None:
    failure = classify(
        evidence(
            exit_code=None,
            timed_out="limit of 60 s passed",
            passed_total_limit=is_total,
            phase="steady",
            step=12,
        )
    )
    assert failure.kind is K.HUNG
    assert failure.message.startswith(said)


def test_of_a_long_exception_a_thousand_characters_are_kept() -> None:
    failure = classify(evidence(exception="ValueError", message="bad " * 1000))
    assert failure.evidence == ("ValueError: " + "bad " * 1000)[:1000]


def test_a_message_names_the_rank_the_phase_and_what_was_said_on_one_line() -> None:
    failure = classify(evidence(3, exception="ValueError", message="bad\nvery bad", phase="steady"))
    assert failure.message == "rank 3 failed in steady: ValueError: bad"


@pytest.mark.parametrize(
    ("on_gpu", "on_cpu", "known"),
    [
        (
            True,
            True,
            {
                "exception": "torch.OutOfMemoryError",
                "message": "CUDA out of memory. Tried to allocate 2.00 GiB",
            },
        ),
        (
            True,
            True,
            {
                "log_tail": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
                "`cublasCreate(handle)`"
            },
        ),
        (
            True,
            True,
            {"exception": "mylib.DoesNotFit", "message": "by 3 GiB", "noted_out_of_memory": True},
        ),
        (
            False,
            False,
            {
                "log_tail": "CUDA error: an illegal memory access was encountered",
                "peak_memory_bytes": 9,
                "device_memory_bytes": 10,
            },
        ),
        (False, True, {"exception": "MemoryError"}),
        (
            False,
            True,
            {
                "exception": "RuntimeError",
                "message": "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
            },
        ),
        (
            False,
            False,
            {"exception": "OSError", "message": "[Errno 12] Cannot allocate memory"},
        ),  # a fork, a mapping: the machine's
        (False, False, {"exit_code": 137, "num_oom_kills": 1}),
        (False, False, {"exception": "ValueError", "message": "bad shape"}),
    ],
)
def test_only_a_refused_allocation_proves_that_a_layout_does_not_fit(
    on_gpu: bool, on_cpu: bool, known: dict[str, object]
) -> None:
    failure = classify(evidence(**known))
    assert failure.kind in OUT_OF_MEMORY_KINDS or "ValueError" in failure.evidence
    assert (proves_out_of_memory(failure), proves_out_of_memory(failure, on_cpu=True)) == (
        on_gpu,
        on_cpu,
    )


def test_memory_exceptions_are_known_by_name_or_text() -> None:
    assert is_out_of_memory("torch.OutOfMemoryError", "")
    assert is_out_of_memory("MemoryError", "")
    assert is_out_of_memory("RuntimeError", "CUDA error: out of memory")
    assert not is_out_of_memory("RuntimeError", "out of luck")


def test_every_kind_has_a_policy_and_results_are_not_retried() -> None:
    assert set(POLICIES) == set(FailureKind)
    assert not may_retry(K.OOM_GPU, {})
    assert may_retry(K.NODE_LOST, {}) and not may_retry(K.NODE_LOST, {K.NODE_LOST: 1})
    assert all(POLICIES[kind].fault is Fault.LAYOUT for kind in OUT_OF_MEMORY_KINDS)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGSEGV, FailureKind.SEGFAULT),
        (signal.SIGKILL, FailureKind.KILLED),
        (signal.SIGABRT, FailureKind.NCCL),
    ],
)
def test_a_fatal_signal_outranks_warnings_in_the_log_but_an_abort_is_what_a_watchdog_does(
    number: signal.Signals, kind: FailureKind
) -> None:
    noise = "node1:17:42 [0] NCCL WARN NET/Socket : Connection reset by peer (ignored)"
    assert classify(evidence(signal=number, log_tail=noise)).kind is kind


CUDA_REFUSAL = (
    "CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has a total capacity of 80.00 GiB of "
    "which 900.50 MiB is free. Including non-PyTorch memory, this process has 79.10 GiB memory in "
    "use. Of the allocated memory 77.00 GiB is allocated by PyTorch, and 1.10 GiB is reserved by "
    "PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "asked", "held", "device"),
    [
        (CUDA_REFUSAL, 6 << 30, 77 << 30, 80 << 30),
        (
            CUDA_REFUSAL.split(" Of the")[0],
            6 << 30,
            None,
            80 << 30,
            # Cut off, as a failure's one line may be.
        ),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.50 MiB (GPU 3; "
            "79.15 GiB total capacity)",
            41 << 19,
            None,
            None,
        ),
        (
            "XPU out of memory. Tried to allocate 512 bytes. Of the allocated memory 0 bytes is "
            "allocated by PyTorch",
            512,
            0,
            None,
        ),
        (
            "CPU out of memory. Tried to allocate 24.00 MiB. The limit is 100.00 MiB (option "
            "memory_limit_bytes), of which 90.00 MiB is held by live tensors",
            24 << 20,
            90 << 20,
            100 << 20,
        ),
    ],
)
def test_the_numbers_of_an_allocator_are_read(
    text: str, asked: int, held: int | None, device: int | None
) -> None:
    told = MemoryShortage(is_reported=True, asked_bytes=asked, live_bytes=held, device_bytes=device)
    assert classify(evidence(exception="torch.OutOfMemoryError", message=text)).memory == told
    logged = evidence(log_tail=f"torch.OutOfMemoryError: {text}")
    assert classify(logged).memory == told


@pytest.mark.parametrize(
    "text",
    [
        "DefaultCPUAllocator: can't allocate memory",
        "CUDA out of memory. Tried to allocate more than 1EB memory",
    ],
)
def test_an_out_of_memory_without_numbers_has_none(text: str) -> None:
    assert classify(evidence(log_tail=text)).memory == MemoryShortage(is_reported=True)


def test_the_numbers_are_read_from_the_cause_of_another_exception() -> None:
    printed = f"{TRACEBACK}{OOM}\n{CAUSE}{TRACEBACK}RuntimeError: layer 3 failed\n"
    told = MemoryShortage(is_reported=True, asked_bytes=2 << 30)
    assert classify(evidence(log_tail=printed)).memory == told


def test_only_an_out_of_memory_has_a_shortage() -> None:
    assert classify(evidence(num_oom_kills=1, exit_code=137)).memory == MemoryShortage()
    assert classify(evidence(exception="ValueError", message=CUDA_REFUSAL[20:40])).memory is None


@pytest.mark.parametrize(
    ("code", "log", "said"),
    [
        (127, "launch.sh: line 2: exec: torchrun: not found\n", "exec: torchrun: not found"),
        (1, "Loading\r100 %\nusage: train.py --steps N\n=====\n\n", "usage: train.py --steps N"),
        (1, "x" * 10_000, "x" * 200),
    ],
)
def test_an_exit_without_an_exception_is_told_with_the_last_line_of_its_log(
    code: int, log: str, said: str
) -> None:
    failure = classify(evidence(exit_code=code, log_tail=log, phase="first_step"))
    before, _, last = failure.message.partition("; the last line of its log: ")
    assert (failure.kind, before) == (
        K.USER_ERROR,
        f"rank 0 failed in first_step: exit code {code}",
    )
    assert last.endswith(said) and len(last) < 400
    nothing = classify(evidence(exit_code=code, log_tail="\n==\n", phase="first_step"))
    assert nothing.message == before


def test_an_error_of_the_gpu_is_told_with_the_line_that_a_rank_ended_with() -> None:
    printed = classify(evidence(xids=(79,), log_tail="first\nbetween\nlast\n\n"))
    assert printed.evidence == "Xid 79 (GPU has fallen off the bus): last"
    raised = classify(evidence(xids=(79,), exception="RuntimeError", message="first\nlast"))
    assert (raised.evidence or "").endswith("first")


def test_the_line_that_shows_a_cause_is_told_alone() -> None:
    line = "CUDA out of memory. Tried to allocate 2 MiB"
    assert classify(evidence(log_tail=f"before\n{line}\nafter\nmore")).evidence == line


@pytest.mark.parametrize("kind", FailureKind)
def test_a_failure_without_retries_left_ends_the_trial_as_out_of_memory_or_failed(
    kind: FailureKind,
) -> None:
    spent = {kind: POLICIES[kind].max_retries}
    if kind is FailureKind.CANCELLED:
        wanted = TrialEvent.REQUEUED  # always waits again
    elif kind in OUT_OF_MEMORY_KINDS:
        wanted = TrialEvent.OUT_OF_MEMORY
    else:
        wanted = TrialEvent.FAILED
    assert event_after(kind, spent) is wanted
    if POLICIES[kind].max_retries:
        assert event_after(kind, {}) is TrialEvent.REQUEUED


# More than none: another attempt may end otherwise. Whoever is killed from outside may be so again.
RETRIES = {
    K.OOM_HOST: 1,
    K.SEGFAULT: 1,
    K.KILLED: 2,
    K.PREEMPTED: 3,
    K.HUNG: 1,
    K.START_TIMEOUT: 1,
}


@pytest.mark.parametrize(
    "kind", [K.OOM_GPU, K.CONFIG_REJECTED, K.NOT_FINITE, K.USER_ERROR, *RETRIES]
)
def test_what_the_layout_or_the_code_did_alone_is_not_tried_again(kind: FailureKind) -> None:
    most = RETRIES.get(kind, 0)
    assert [may_retry(kind, {kind: num}) for num in range(5)] == [num < most for num in range(5)]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (127, "exit code 127"),
        (128, "exit code 128"),
        (129, "died of SIGHUP"),
        (159, f"died of {signal.Signals(31).name}"),
        (160, "exit code 160"),
    ],
)
def test_a_shell_reports_signals_1_to_31_as_exit_codes(code: int, said: str) -> None:
    assert classify(evidence(exit_code=code)).message.endswith(f" in start: {said}")


def test_a_rank_of_which_nothing_is_told_failed_at_the_start() -> None:
    found = Evidence(rank=3)
    assert (found.step, found.phase, found.at_unix_seconds) == (0, "start", 0.0)


def test_the_class_of_an_exception_is_named_unless_it_is_one_of_ours() -> None:
    for exception, said in (
        ("workloads.rank.ConfigRejected", ": tp 3"),
        ("workloads.rank.Other", ": workloads.rank.Other: tp 3"),
        ("mine.ConfigRejected", ": mine.ConfigRejected: tp 3"),
    ):
        found = classify(evidence(exception=exception, message="tp 3"))
        assert found.message.endswith(f" in start{said}")


def test_a_request_to_end_explains_nothing_that_failed_besides() -> None:
    crashed = classify(evidence(exception="ValueError", message="x"))
    cancelled = replace(crashed, kind=K.CANCELLED)
    assert cause_order(crashed, 9.0) < cause_order(cancelled, 1.0)


def test_texts_of_a_failure_have_their_lengths() -> None:
    noted = classify(evidence(noted_out_of_memory=True, exception="E", message="x" * 2000))
    assert len(noted.evidence) == 1000
    felt = classify(evidence(xids=[79], log_tail="y" * 2000))
    assert felt.evidence.count("y") == 300
    line = classify(evidence(log_tail="CUDA out of memory" + "z" * 2000))
    assert len(line.evidence) == 1000


def test_a_bad_result_is_the_cause_only_of_a_rank_that_ended_well() -> None:
    assert classify(evidence(exit_code=0, bad_result="no steps")).kind is K.BAD_RESULT
    assert classify(evidence(exit_code=1, bad_result="no steps")).kind is K.USER_ERROR
    assert classify(evidence(exit_code=0)).kind is K.USER_ERROR


def test_a_machine_is_suspected_of_its_own_faults_and_of_hangs() -> None:
    of_machines = {kind for kind in K if POLICIES[kind].fault is Fault.MACHINE}
    assert of_machines | {K.HUNG, K.START_TIMEOUT} == SUSPECT_KINDS
    assert not MemoryShortage().is_reported
