"""Says in a line what is wrong with a value or key of a sweep file, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from orchestrator.core.problem.layout import SHORT_NAMES
from orchestrator.core.sweepfile.model_section import ModelSizes
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.suggestion import did_you_mean
from orchestrator.core.sweepfile.workload_section import WORKLOADS
from orchestrator.core.sweepfile.yaml_document import Path

# Names of keys in other programs -> our key.
_OTHER_WORDS: Mapping[str, str] = MappingProxyType(
    {
        **{short: f"axes.{name}" for short, name in SHORT_NAMES.items()},
        **dict.fromkeys(
            ("seq_len", "seq_length", "seqlen", "seq", "context_length"), "sequence_length"
        ),
        **dict.fromkeys(("gbs", "batch_size", "global_batch", "batch"), "global_batch_size"),
        **dict.fromkeys(("num_gpus", "world_size", "gpu"), "gpus"),
        **dict.fromkeys(("num_nodes", "nodes"), "gpus (nodes x gpus_per_node)"),
        **dict.fromkeys(
            ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
            "axes.micro_batch_size",
        ),
        **dict.fromkeys(
            ("gradient_accumulation_steps", "gradient_accumulation", "grad_acc", "gas", "accum"),
            "axes.grad_accum_steps",
        ),
        **dict.fromkeys(
            ("activation_checkpointing", "gradient_checkpointing", "checkpointing", "ac", "remat"),
            "axes.recompute",
        ),
        **dict.fromkeys(
            ("tensor", "tensor_parallel", "tensor_model_parallel_size"),
            "axes.tensor_parallel_size",
        ),
        **dict.fromkeys(
            ("pipeline", "pipeline_parallel", "pipeline_model_parallel_size"),
            "axes.pipeline_parallel_size",
        ),
        **dict.fromkeys(("zero", "zero_optimization", "sharding"), "axes.zero_stage"),
        **dict.fromkeys(("dtype", "mixed_precision"), "precision"),
        **dict.fromkeys(("n_layers", "layers"), "num_layers"),
        **dict.fromkeys(("dim", "d_model"), "hidden_size"),
        **dict.fromkeys(("n_heads", "num_heads"), "num_attention_heads"),
        **dict.fromkeys(("n_kv_heads", "num_kv_heads"), "num_key_value_heads"),
        **dict.fromkeys(("intermediate_size", "ffn_dim"), "ffn_hidden_size"),
        **dict.fromkeys(("warmup", "warm_up"), "measurement.warmup_steps"),
        **dict.fromkeys(("budget", "n_trials", "trials"), "search.max_trials"),
        **dict.fromkeys(("lr",), "learning_rate"),
        **dict.fromkeys(("command", "cmd", "args"), "argv"),
        **dict.fromkeys(("secrets", "environment"), "env_from"),
    }
)


_KINDS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
        **dict.fromkeys(("float_type", "float_parsing"), "a number"),
        "finite_number": "a finite number",
        "string_type": "a text",
        **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
        **dict.fromkeys(
            ("dict_type", "mapping_type", "model_type", "model_attributes_type"), "a mapping"
        ),
        **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    }
)
_BOUNDS: Mapping[str, Callable[[Mapping[str, Any], str], str]] = MappingProxyType(
    {
        "greater_than": lambda ctx, shown: f"{shown} is not more than {_number(ctx['gt'])}",
        "greater_than_equal": lambda ctx, shown: (
            f"{shown} is less than {_number(ctx['ge'])}, the least allowed"
        ),
        "less_than": lambda ctx, shown: f"{shown} is not less than {_number(ctx['lt'])}",
        "less_than_equal": lambda ctx, shown: (
            f"{shown} is more than {_number(ctx['le'])}, the most allowed"
        ),
        "too_short": lambda ctx, shown: "the list is empty; give at least one value",
        "too_long": lambda ctx, shown: (
            f"{ctx['actual_length'] or 'too many'} values; at most {ctx['max_length']}"
        ),
    }
)


# The least similarity of a mistyped word to the right one: `nmae`, name.
_TYPO = 0.75
# The same for keys of other sections: among so many, words are more often similar by chance.
_TYPO_ELSEWHERE = 0.8
# The longest list of keys that a message shows, and the most that a hint names.
_MOST_LISTED, _MOST_MEANT = 8, 3

# What people write to switch something on or off.
_SWITCHES: Mapping[str, bool] = MappingProxyType(
    dict.fromkeys(("off", "no", "false", "none", "disabled"), False)
    | dict.fromkeys(("on", "yes", "true", "enabled"), True)
)
# Keys that are always there -> what switches them off.
_SWITCHED_OFF: Mapping[Path, str] = MappingProxyType({("search", "confirm"): "{repeats: 0}"})

# Pydantic's errors for a `name` that is none of several sections.
WRONG_NAME = ("union_tag_invalid", "union_tag_not_found")


def message_of(error: ErrorDetails, path: Path) -> str:
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return _unknown_key(error["loc"])
    if kind in WRONG_NAME:
        return _not_one_of(given["name"], list(WORKLOADS))
    if kind in ("literal_error", "enum"):
        return _not_one_of(given, re.findall(r"'([^']*)'", str(context["expected"])))
    if kind == "value_error":
        return str(context["error"])
    if kind in _BOUNDS:
        return _BOUNDS[kind](context, shown(given))
    if kind not in _KINDS:
        return f"{error['msg']}, got {shown(given)}"
    expected, hint = _KINDS[kind], ""
    if kind == "int_type" and path and takes_auto(path):
        expected += " or auto"
        if isinstance(given, str) and given != "auto":
            hint = did_you_mean(given.lower(), ["auto"])
    if expected == "a mapping" and (keys := _keys(error["loc"])):
        expected += f" of {', '.join(keys)}"
    if kind == "string_type" and isinstance(given, (int, float)):
        hint = "; in quotes it is one"
    return f"expected {expected}, got {shown(given)}{hint or _switch_hint(kind, path, given)}"


def _switch_hint(kind: str, path: Path, given: Any) -> str:
    """Return the hint for a word such as `off`, if the file says the same in another way."""
    is_on = _SWITCHES.get(str(given).lower())
    if is_on is None:
        return ""
    if kind in ("bool_type", "bool_parsing"):
        return f"; did you mean {str(is_on).lower()}?"
    off = "null" if _may_be_null(path) else _SWITCHED_OFF.get(path)
    return f"; {off} switches it off" if off is not None and not is_on else ""


def _not_one_of(given: Any, allowed: Sequence[str]) -> str:
    hint = did_you_mean(str(given).lower(), allowed)
    if given is False and "off" in allowed:
        hint = "; did you mean off?"
    return f"{shown(given)} is not one of {', '.join(allowed)}{hint}"


def _unknown_key(loc: Path) -> str:
    *section, key = loc
    allowed = _keys(tuple(section))
    known = f"allowed: {', '.join(allowed)}"
    if len(allowed) > _MOST_LISTED:
        known = f"`sweep schema` lists all {len(allowed)}"
    return f"unknown key; {known}{_key_hint(str(key), allowed)}"


def means(unknown: Path, known: Path) -> bool:
    """Return whether the message about an unknown key says that a known one was meant instead."""
    *section, key = unknown
    if not isinstance(key, str) or tuple(section) != known[:-1]:
        return False
    return _key_hint(key, _keys(tuple(section))) == _meant([str(known[-1])])


def _key_hint(key: str, allowed: Sequence[str]) -> str:
    """Return the hint that names the key that was meant.

    The given key may be mistyped, another program's word, or a part of a name.
    """
    word = key.lower()
    if hint := did_you_mean(word, allowed, cutoff=_TYPO):
        return hint
    if word in _OTHER_WORDS:
        return _meant([_OTHER_WORDS[word]])
    if parts := [name for name in allowed if _is_part(word, name)]:
        return _meant(parts)
    for section in _sections():
        if key in section.keys:
            where = f"{section.path}{section.of}" or "the top level"
            return f"; {key} belongs to {where}"
    names = {name: s.of_key(name) for s in reversed(_sections()) for name in s.keys}
    elsewhere = get_close_matches(word, list(names), n=1, cutoff=_TYPO_ELSEWHERE)
    # Names that begin with the word come first, then keys of outer sections.
    parts = sorted(
        (name for name in reversed(names) if _is_part(word, name)),
        key=lambda name: (not name.startswith(word), names[name].count(".")),
    )
    return _meant([names[name] for name in elsewhere or parts])


def _is_part(word: str, name: str) -> bool:
    """True if a name begins with a word, or a later part of it does: `trial`, max_trials."""
    return len(word) >= 3 and (name.startswith(word) or f"_{word}" in name)


def _meant(names: Sequence[str]) -> str:
    if not names:
        return ""
    *others, last = names[:_MOST_MEANT]
    first = f"{', '.join(others)} or " if others else ""
    return f"; did you mean {first}{last}?"


def shown(value: Any) -> str:
    """Return a value as the file would have it, short and safe to print."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _section(loc: Path) -> type[BaseModel] | None:
    """Return the pydantic model of what is at a place; None if it is no section.

    If several are possible, a tag in the place selects one.
    """
    found: list[type[BaseModel]] = [SweepSpec]
    names_an_entry = False  # of a mapping of sections
    for part in loc:
        if isinstance(part, int):
            continue
        if names_an_entry:
            names_an_entry = False
        elif len(found) > 1 and part in WORKLOADS:
            found = [WORKLOADS[part]]
        elif part == "model" and found == [SweepSpec]:
            found = [ModelSizes]
        elif (field := found[0].model_fields.get(part)) is not None:
            found = list(_models_in(field.annotation))
            names_an_entry = "Mapping[" in str(field.annotation)
        else:
            return None
        if not found:
            return None
    return found[0]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _keys(path: Path) -> list[str]:
    section = _section(path)
    return list(section.model_fields) if section is not None else []


@dataclass(frozen=True, kw_only=True, slots=True)
class _SectionKeys:
    """A section of a sweep file at any place, and its keys."""

    path: str
    keys: Sequence[str]
    # ` of synthetic`: the workload that it belongs to.
    of: str = ""

    def of_key(self, name: str) -> str:
        return f"{self.path}.{name}{self.of}" if self.path else name


@cache
def _sections() -> Sequence[_SectionKeys]:
    """All sections, the outer ones first."""
    found = [_SectionKeys(path="", keys=list(SweepSpec.model_fields))]
    waiting: list[tuple[str, str, type[BaseModel]]] = [
        (name, "", model)
        for name, field in SweepSpec.model_fields.items()
        if name != "workload"
        for model in ([ModelSizes] if name == "model" else _models_in(field.annotation))
    ]
    waiting += [
        ("workload.options", f" of {name}", options)
        for name, model in WORKLOADS.items()
        for options in _models_in(model.model_fields["options"].annotation)
    ]
    while waiting:
        path, of, model = waiting.pop(0)
        found.append(_SectionKeys(path=path, keys=list(model.model_fields), of=of))
        waiting += [
            (f"{path}.{name}", of, inner)
            for name, field in model.model_fields.items()
            for inner in _models_in(field.annotation)
        ]
    return found


def takes_auto(path: Path) -> bool:
    return "'auto'" in str(_annotation(path))


def _may_be_null(path: Path) -> bool:
    return NoneType in get_args(_annotation(path))


def _annotation(path: Path) -> Any:
    """The type of the key at a place; None if there is no such key."""
    *section, name = (part for part in path if isinstance(part, str))
    owner = _section(tuple(section))
    field = owner.model_fields.get(name) if owner is not None else None
    return field.annotation if field is not None else None
