"""Where in a step memory ran out, by tracebacks as torch prints them."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.failures import Evidence, classify
from orchestrator.core.trial.step_part import StepPart, step_part

TORCH = "/venv/lib/python3.12/site-packages/torch"
BACKWARD = [
    ("/home/me/train.py", "main"),
    (f"{TORCH}/_tensor.py", "backward"),
    (f"{TORCH}/autograd/__init__.py", "backward"),
    (f"{TORCH}/autograd/graph.py", "_engine_run_backward"),
]
FORWARD = [
    ("/home/me/train.py", "main"),
    (f"{TORCH}/nn/modules/module.py", "_wrapped_call_impl"),
    (f"{TORCH}/nn/modules/module.py", "_call_impl"),
    ("/home/me/model.py", "forward"),
    (f"{TORCH}/nn/functional.py", "silu"),
]
OPTIMIZER = [
    ("/home/me/train.py", "main"),
    (f"{TORCH}/optim/optimizer.py", "wrapper"),
    (f"{TORCH}/optim/adamw.py", "step"),
    (f"{TORCH}/optim/adamw.py", "_init_group"),
]
LOADING = [("/home/me/train.py", "main"), (f"{TORCH}/nn/modules/linear.py", "__init__")]


def traceback(frames: list[tuple[str, str]]) -> str:
    lines = "".join(f'  File "{path}", line 7, in {name}\n    x = y\n' for path, name in frames)
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    return f"Traceback (most recent call last):\n{lines}{error}\n"


@pytest.mark.parametrize(
    ("frames", "phase", "part"),
    [
        (FORWARD, "first_step", StepPart.FORWARD),
        (BACKWARD, "steady", StepPart.BACKWARD),
        # Recomputation calls the model within the backward pass.
        ([*BACKWARD, *FORWARD[1:]], "steady", StepPart.BACKWARD),
        (OPTIMIZER, "first_step", StepPart.OPTIMIZER),
        # Lightning calls the model from a closure of the optimizer.
        ([*OPTIMIZER[:2], *FORWARD], "steady", StepPart.FORWARD),
        ([("/x/torch/nn/utils/clip_grad.py", "clip_grad_norm_")], "steady", StepPart.OPTIMIZER),
        ([("/x/megatron/core/optimizer/optimizer.py", "step")], "steady", StepPart.OPTIMIZER),
        # A pipeline's schedule has a `step` too, which is none of an optimizer.
        ([(f"{TORCH}/distributed/pipelining/schedules.py", "step"), *FORWARD], "steady",
         StepPart.FORWARD),
        (LOADING, "rendezvous", StepPart.INIT),
        # To build buckets, replicas may run the model before the first step.
        (FORWARD, "rendezvous", StepPart.INIT),
        (LOADING, "start", StepPart.INIT),
        (LOADING[:1], "start", None),
        (LOADING[:1], "steady", None),
    ],
)  # fmt: skip
def test_the_frames_of_a_traceback_tell_the_part(
    frames: list[tuple[str, str]], phase: str, part: StepPart | None
) -> None:
    assert step_part(traceback(frames), phase=phase) is part


def test_the_cause_of_another_exception_counts() -> None:
    last = "Traceback (most recent call last):\nRuntimeError: layer 3 failed\n"
    text = f"{traceback(BACKWARD)}\nDuring handling of the above:\n\n{last}"
    assert step_part(text, phase="steady") is StepPart.BACKWARD


def test_only_the_last_traceback_counts() -> None:
    assert step_part(traceback(BACKWARD) + traceback(FORWARD), phase="steady") is StepPart.FORWARD


def test_a_rank_that_torchrun_marks_is_read_too() -> None:
    marked = "".join(f"[rank1]: {line}\n" for line in traceback(BACKWARD).splitlines())
    assert step_part(marked, phase="steady") is StepPart.BACKWARD


def test_an_out_of_memory_is_classified_with_its_part() -> None:
    noted = classify(
        Evidence(
            rank=0,
            exit_code=1,
            exception="torch.OutOfMemoryError",
            message="CUDA out of memory. Tried to allocate 2.00 GiB.",
            traceback=traceback(BACKWARD),
            phase="steady",
        )
    )
    printed = classify(
        Evidence(rank=0, exit_code=1, log_tail=traceback(OPTIMIZER), phase="first_step")
    )
    killed = classify(Evidence(rank=0, exit_code=137, num_oom_kills=1, phase="steady"))
    parts = [failure.memory and failure.memory.step_part for failure in (noted, printed, killed)]
    assert parts == [StepPart.BACKWARD, StepPart.OPTIMIZER, None]


def test_of_tracebacks_that_are_not_about_memory_the_last_counts() -> None:
    some = (traceback(frames).replace("out of memory", "wrong") for frames in (BACKWARD, FORWARD))
    text = "".join(some).replace("torch.OutOfMemoryError", "RuntimeError")
    assert step_part(text, phase="steady") is StepPart.FORWARD


def test_a_function_of_the_user_s_is_no_backward_pass_whatever_its_name() -> None:
    for name in ("grad", "backward"):
        frames = [("/home/me/train.py", name), *FORWARD]
        assert step_part(traceback(frames), phase="steady") is StepPart.FORWARD
