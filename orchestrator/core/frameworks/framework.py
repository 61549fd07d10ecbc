"""The frameworks that a layout is written for, by the names that a user types."""

from __future__ import annotations

from enum import StrEnum


class Framework(StrEnum):
    TRANSFORMERS = "transformers"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    NANOTRON = "nanotron"
    LITGPT = "litgpt"
    LLM_FOUNDRY = "llm-foundry"
    TORCHRUN = "torchrun"
