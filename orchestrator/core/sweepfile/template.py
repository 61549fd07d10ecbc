"""Names in braces that an argument of a foreign program may hold, such as `{micro_batch_size}`, and how they are filled in.

What each stands for is said where a rank is started; here they are only names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

TEMPLATE_NAMES = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "micro_batch_size",
    "grad_accum_steps",
    "recompute",
    "zero_stage",
    "precision",
    "world_size",
    "global_batch_size",
    "sequence_length",
    "num_steps",
    "seed",
    "run_dir",
    "result_file",
    "metrics_file",
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def fill(template: str, values: Mapping[str, str]) -> str:
    """Put values for {names}; doubled braces stand for themselves. Raises ValueError for anything else between braces."""

    def value(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        name = match[1]
        if name is None or name not in values:
            raise ValueError(_unknown(match[0], template, tuple(values)))
        return values[name]

    return _PLACEHOLDER.sub(value, template)


def checked(template: str, names: Sequence[str] = TEMPLATE_NAMES) -> str:
    """The template itself, if every name in it is one. Raises ValueError with the name that is meant."""
    fill(template, dict.fromkeys(names, ""))
    return template


def well_formed(template: str) -> str:
    """The template itself, if its braces are in order; which names there are is not known yet. Raises ValueError."""
    for match in _PLACEHOLDER.finditer(template):
        if match[0] in "{}" or (match[1] is not None and not _NAME.fullmatch(match[1])):
            raise ValueError(_unknown(match[0], template, TEMPLATE_NAMES))
    return template


def _unknown(placeholder: str, template: str, names: Sequence[str]) -> str:
    close = get_close_matches(placeholder.strip("{} ")[:80], names, n=1, cutoff=0.6)
    hint = f"; did you mean {{{close[0]}}}?" if close else "; write {{ and }} for braces that stay"
    return f"{_short(placeholder)} in {_short(template)} is not a name that can be filled in; possible: {', '.join(names)}{hint}"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
