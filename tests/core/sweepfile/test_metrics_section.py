"""Patterns of printed numbers, on lines that real trainers printed.

Each line is one line of a public log; its source is beside it.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.core.sweepfile.metrics_section import LinePatterns, MetricsSection
from tests.core.sweepfile.bounds import check_bounds

# https://github.com/NVIDIA/Megatron-LM/issues/756
MEGATRON = (
    " [2024-04-06 02:59:36] iteration       43/     100 | consumed samples:         5504 |"
    " elapsed time per iteration (ms): 5444.9 | throughput per GPU (TFLOP/s/GPU): 239.8 |"
    " learning rate: 8.600000E-06 | global batch size:   128 | lm loss: 1.825991E+00 |"
    " load_balancing_loss: 1.019746E+00 | loss scale: 1.0 | grad norm: 1.426 | num zeros: 0.0 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)
# https://github.com/NVIDIA/Megatron-LM/pull/5662
MEGATRON_MEMORY = (
    "[Rank 0] (after 20 iterations) memory (MB) | allocated: 3270.16 | max allocated: 5670.39 |"
    " reserved: 6406.00 | max reserved: 6406.00"
)
# https://github.com/huggingface/nanotron/issues/390
NANOTRON = (
    "10/17/2025 16:31:56 [INFO|DP=0|PP=0|TP=0]: iteration: 327281 / 378950 | consumed_tokens:"
    " 85.8G | elapsed_time_per_iteration_ms: 11.5K | tokens_per_sec: 22.8K |"
    " tokens_per_sec_per_gpu: 11.4K | global_batch_size: 64 | lm_loss: 2.38 | lr: 1e-05 |"
    " model_tflops_per_gpu: 38.3 | hardware_tflops_per_gpu: 38.3 | grad_norm: 1.25"
)
# https://github.com/huggingface/nanotron/pull/23
NANOTRON_MEMORY = (
    "01/17/2024 13:47:27 [INFO|DP=0|PP=0|TP=0|ip-26-0-160-225]: iteration: 991 / 1000 |"
    " consumed_tokens: 634K | elapsed_time_per_iteration_ms: 45 | tokens_per_sec: 14.2K |"
    " tokens_per_sec_per_gpu: 1.78K | global_batch_size: 20 | lm_loss: 10.6 | lr: 1e-05 |"
    " model_tflops_per_gpu: 0.00869 | hardware_tflops_per_gpu: 0.00869 | grad_norm: 0.515 |"
    " cuda_memory_allocated: 75.2M | cuda_max_memory_reserved: 547M | hd_total_memory_tb: 312G |"
    " hd_used_memory_tb: 61.8G | hd_free_memory_tb: 250G"
)
# https://github.com/pytorch/torchtitan/pull/3393
TORCHTITAN = (
    "[rank0]:[titan] 2026-05-18 16:04:46,338 - root - INFO - step: 14  loss:  3.24405"
    "  grad_norm:  0.8319  memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%"
)
# https://github.com/microsoft/huggingface-transformers/pull/7
HF_TRAINER = (
    "{'train_step_runtime': 0.6309, 'train_step_samples_per_second': 57.063, 'epoch': 0.98}"
)
HF_BAR = " 98%|█████████▊| 2086/2120 [26:01<00:22,  1.49it/s]"
# https://github.com/huggingface/transformers/pull/35207
HF_LOSS = (
    "{'loss': 2.119, 'grad_norm': 37.657958984375, 'learning_rate': 4.5833333333333334e-05,"
    " 'epoch': 0.25}"
)
# https://github.com/karpathy/nanoGPT/issues/110
NANOGPT = "iter 1631: loss 4.0863, time 561.94ms"


def values(line: str, *, tokens: int = 1 << 20, ranks: int = 8, **section: Any) -> dict[str, Any]:
    patterns = LinePatterns(
        MetricsSection.model_validate(section), tokens_per_step=tokens, world_size=ranks
    )
    return patterns.values_of(line)


def test_megatron_prints_milliseconds_and_memory_in_a_line_of_its_own() -> None:
    section = {
        "log": r"elapsed time per iteration \(ms\): ([\d.]+)",
        "unit": "ms",
        "also": {
            "loss": r"lm loss: (\S+)",
            "grad_norm": r"grad norm: (\S+)",
            "tflops": r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)",
            "peak_memory": {"log": r"max allocated: ([\d.]+)", "unit": "MiB"},
            "peak_memory_reserved": {"log": r"max reserved: ([\d.]+)", "unit": "MiB"},
        },
    }
    assert values(MEGATRON, **section) == {
        "step_seconds": pytest.approx(5.4449),
        "loss": 1.825991,
        "grad_norm": 1.426,
        "tflops": 239.8,
    }
    assert values(MEGATRON_MEMORY, **section) == {
        "peak_memory_allocated_bytes": round(5670.39 * 2**20),
        "peak_memory_reserved_bytes": 6406 * 2**20,
    }


def test_nanotron_abbreviates_thousands() -> None:
    also = {
        "loss": r"lm_loss: (\S+)",
        "peak_memory_reserved": r"cuda_max_memory_reserved: (\S+)",
        "tokens_seen": r"consumed_tokens: (\S+)",
    }
    assert values(NANOTRON, log=r"elapsed_time_per_iteration_ms: (\S+)", unit="ms", also=also) == {
        "step_seconds": pytest.approx(11.5),
        "loss": 2.38,
        "tokens_seen": 85.8e9,
    }
    found = values(
        NANOTRON_MEMORY, log=r"elapsed_time_per_iteration_ms: (\S+)", unit="ms", also=also
    )
    assert found["peak_memory_reserved_bytes"] == 547_000_000
    # 22.8K tokens a second: 64 sequences of 4,096 tokens take 11.5 s, as it says itself.
    assert values(
        NANOTRON, log=r"tokens_per_sec: (\S+)", unit="tokens_per_second", tokens=64 * 4096
    ) == {"step_seconds": pytest.approx(11.5, rel=0.01)}
    assert values(
        NANOTRON,
        log=r"tokens_per_sec_per_gpu: (\S+)",
        unit="tokens_per_second_per_gpu",
        tokens=64 * 4096,
        ranks=2,
    ) == {"step_seconds": pytest.approx(11.5, rel=0.01)}


def test_torchtitan_prints_tokens_per_second_of_one_gpu() -> None:
    assert values(
        TORCHTITAN,
        log=r"\[rank0\].* tps: ([\d,]+)",
        unit="tokens_per_second_per_gpu",
        tokens=8 * 2048,
        ranks=2,
        also={
            "loss": r"loss: +([\d.]+)",
            "grad_norm": r"grad_norm: +([\d.]+)",
            "peak_memory_reserved": r"memory: +([\d.]+GiB)",
            "tflops": r"tflops: ([\d.]+)",
        },
    ) == {
        "step_seconds": pytest.approx(8 * 2048 / 2 / 7282),
        "loss": 3.24405,
        "grad_norm": 0.8319,
        "peak_memory_reserved_bytes": round(9.46 * 2**30),
        "tflops": 0.52,
    }


def test_transformers_prints_seconds_or_steps_per_second() -> None:
    assert values(HF_TRAINER, log=r"'train_step_runtime': ([\d.]+)", unit="s") == {
        "step_seconds": 0.6309
    }
    assert values(HF_BAR, log=r"([\d.]+)it/s\]", unit="steps_per_second") == {
        "step_seconds": pytest.approx(1 / 1.49)
    }
    assert values(
        HF_LOSS,
        log=r"'train_step_runtime': ([\d.]+)",
        unit="s",
        also={"loss": r"'loss': ([\d.]+)", "grad_norm": r"'grad_norm': ([\d.]+)"},
    ) == {"loss": 2.119, "grad_norm": 37.657958984375}


def test_nanogpt_prints_milliseconds() -> None:
    assert values(NANOGPT, log=r"time ([\d.]+)ms", unit="ms") == {
        "step_seconds": pytest.approx(0.56194)
    }


def test_other_lines_tell_nothing_and_words_are_kept_as_words() -> None:
    section = {"log": r"time ([\w.]+)ms", "unit": "ms", "also": {"kernel": r"kernel=(\w+)"}}
    assert values("building model", **section) == {}
    assert values("time nanms", **section) == {}
    assert values("time fastms kernel=flash", **section) == {"kernel": "flash"}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"log": "time ([0-9+ ms", "unit": "ms"}, "is no regular expression"),
        ({"log": "time", "unit": "ms"}, "has 0 groups; put exactly the number into"),
        ({"log": "(a)(b)", "unit": "ms"}, "has 2 groups"),
        ({"log": "(a)" + "b" * 500, "unit": "ms"}, "a pattern of 503 characters; at most 500"),
        ({"log": "(a)", "unit": "minutes"}, "unit"),
        ({"log": "(a)", "unit": "s", "every": 0}, "every"),
        ({"log": "(a)", "unit": "s", "also": {"a b": "(c)"}}, "is no name of a field"),
        ({"log": "(a)", "unit": "s", "also": {"step_seconds": "(c)"}}, "is what `log` gives"),
        ({"log": "(a)", "unit": "s", "also": {"x": {"log": "(c)", "unit": "MB/s"}}}, "MB/s"),
        ({"log": "(a)", "unit": "s", "also": {f"x{i}": "(c)" for i in range(33)}}, "32"),
        ({"unit": "s"}, "log"),
        ({"log": "(a)"}, "unit"),
    ],
)
def test_a_wrong_section_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said.replace("(", r"\(")):
        MetricsSection.model_validate(section)


def test_a_unit_in_the_text_counts_more_than_that_of_the_pattern() -> None:
    also = {"peak_memory": {"log": r"memory (\S+)", "unit": "MiB"}}
    for text, told in (("9GiB", 9 << 30), ("9", 9 << 20)):
        found = values(f"memory {text}", log=r"time (\d+) ms", unit="ms", also=also)
        assert found == {"peak_memory_allocated_bytes": told}


_SHORT = {"log": "(a)", "unit": "s"}


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("log", ["(" + "a" * 498 + ")"], ["", "(" + "a" * 499 + ")"]),
        ("every", [1, 10_000], [0, 10_001]),
        (
            "also",
            [{f"x{i}": {"log": "(c)"} for i in range(32)}, {"x" * 63: {"log": "(c)"}}],
            [{f"x{i}": {"log": "(c)"} for i in range(33)}, {"x" * 64: {"log": "(c)"}}],
        ),
    ],
)
def test_a_key_is_taken_up_to_its_bounds(
    name: str, taken: list[Any], refused: list[object]
) -> None:
    for value in taken:
        found = MetricsSection.model_validate({**_SHORT, name: value})
        assert found.model_dump(mode="json")[name] == (
            dict.fromkeys(value, "(c)") if name == "also" else value
        )
    check_bounds(MetricsSection, name, taken=[], refused=refused, others=_SHORT)


def test_a_line_covers_one_step_and_a_word_has_200_characters() -> None:
    assert MetricsSection.model_validate(_SHORT).every == 1
    found = values("word=" + "x" * 300, **_SHORT, also={"word": r"word=(\w+)"})
    assert found == {"word": "x" * 200}


@pytest.mark.parametrize(
    ("text", "told"),
    [("0", 0), ("-1", None), ("999999999999999", 999_999_999_999_999), ("1e15", None)],
)
def test_a_peak_is_a_number_of_bytes_that_a_machine_may_have(text: str, told: int | None) -> None:
    found = values(f"peak {text}", **_SHORT, also={"peak_memory": r"peak (\S+)"})
    assert found == ({} if told is None else {"peak_memory_allocated_bytes": told})


def test_a_group_that_is_not_in_the_line_tells_nothing() -> None:
    section = {"log": r"time(?: (\d+))?", "unit": "s", "also": {"loss": r"loss(?: (\d+))?"}}
    assert values("time and loss", **section) == {}
    assert values("time 3 and loss 4", **section) == {"step_seconds": 3.0, "loss": 4.0}


@pytest.mark.parametrize("pattern", [r"peak ([\d.]+)", r"peak ([\d.]+) MiB", r"peak ([\d.]+ MiB)"])
def test_a_unit_counts_once_whether_the_line_or_the_file_says_it(pattern: str) -> None:
    also = {"peak_memory": {"log": pattern, "unit": "MiB"}}
    also["cache"] = {"log": r"cache ([\d.]+)", "unit": "KiB"}
    found = values("time 5ms peak 3 MiB cache 1.5", log=r"time (\d+)ms", unit="ms", also=also)
    (peak,) = (value for name, value in found.items() if name.startswith("peak_memory"))
    assert (peak, found["cache"]) == (3 * 2**20, 1.5 * 2**10)
