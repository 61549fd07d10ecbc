"""Reads the text of a sweep file into a `SweepSpec`, with overrides from the command line.

Every mistake is reported at once with its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.core.errors import SpecInvalid
from orchestrator.core.problem.layout import SHORT_NAMES
from orchestrator.core.sweepfile.sections import ModelSizes
from orchestrator.core.sweepfile.spec import SweepSpec, batch_mistake
from orchestrator.core.sweepfile.suggestion import did_you_mean
from orchestrator.core.sweepfile.workload_section import WORKLOADS
from orchestrator.core.sweepfile.yaml_document import Document, Path, Place, YamlRefused, read

MAX_MISTAKES_SHOWN = 50
MAX_OVERRIDES = 256

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
            ("gradient_accumulation_steps", "grad_acc", "gas"), "axes.grad_accum_steps"
        ),
        **dict.fromkeys(("activation_checkpointing", "checkpointing", "ac"), "axes.recompute"),
        **dict.fromkeys(("zero", "sharding"), "axes.zero_stage"),
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


def load(text: str, *, source: str, overrides: Sequence[str] = ()) -> SweepSpec:
    """Read a sweep file. Overrides are `search.max_trials=10`, with their values read as YAML.

    Raises SpecInvalid with a line for every mistake:
    `file:line:column: path: what is wrong; what is allowed`.
    """
    try:
        document = read(text)
    except YamlRefused as exc:
        raise _invalid(source, [_Line(exc.place, (), exc.message)]) from None
    if not isinstance(document.value, dict):
        what = f"a sweep file is a mapping of keys, not {_shown(document.value)}"
        if document.value is None:
            what = "the file is empty"
        message = f"{what}; it starts with name:, model:, gpus:"
        raise _invalid(source, [_Line(Place(1, 1), (), message)])
    sweep = _SweepSection(document)
    sweep.override(overrides)
    try:
        spec = SweepSpec.model_validate(sweep.value)
    except ValidationError as exc:
        lines = [*sweep.mistakes, *sweep.explain(exc)]
        more = exc.error_count() - MAX_MISTAKES_SHOWN
        raise _invalid(source, lines, num_not_explained=more) from None
    if sweep.mistakes:
        raise _invalid(source, sweep.mistakes)
    return spec


def to_json_schema() -> dict[str, Any]:
    """The JSON schema of a sweep file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **SweepSpec.model_json_schema(),
        "title": "Sweep",
    }


@dataclass(frozen=True, slots=True)
class _Line:
    where: Place | str  # in the file, or the override
    path: Path
    message: str

    @property
    def order(self) -> tuple[bool, Place]:
        """Mistakes of the file from top to bottom, then those of overrides as they were given."""
        return (False, self.where) if isinstance(self.where, Place) else (True, Place(0, 0))


def _invalid(source: str, lines: Iterable[_Line], *, num_not_explained: int = 0) -> SpecInvalid:
    texts = []
    for line in sorted(lines, key=lambda line: line.order):
        where = f"{source}:{line.where}" if isinstance(line.where, Place) else line.where
        path = f"{_dotted(line.path)}: " if line.path else ""
        texts.append(f"{where}: {path}{line.message}")
    texts = list(dict.fromkeys(texts))
    num_more = max(0, num_not_explained) + max(0, len(texts) - MAX_MISTAKES_SHOWN)
    more = [f"and {num_more:,} more"] if num_more else []
    return SpecInvalid("\n".join([*texts[:MAX_MISTAKES_SHOWN], *more]))


def _dotted(path: Path) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).lstrip(".")


# --- the values and where each came from ---

_BATCHES = ("global_batch_size", "global_batch_tokens")
_OVERRIDE = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*)=(.*)", re.DOTALL)


class _SweepSection:
    """The values of a file with overrides applied, and the place of each for error messages."""

    def __init__(self, document: Document) -> None:
        self.value: dict[str, Any] = document.value
        self.mistakes = [
            _Line(mistake.place, mistake.path, mistake.message) for mistake in document.mistakes
        ]
        self._document = document
        self._overridden: dict[Path, str] = {}

    def override(self, overrides: Sequence[str]) -> None:
        for text in overrides[:MAX_OVERRIDES]:
            try:
                self._apply(text)
            except (YamlRefused, ValueError) as exc:
                message = exc.message if isinstance(exc, YamlRefused) else str(exc)
                self.mistakes.append(_Line(f"override {_shown(text)}", (), message))
        if len(overrides) > MAX_OVERRIDES:
            message = f"{len(overrides)} of them; at most {MAX_OVERRIDES}"
            self.mistakes.append(_Line("overrides", (), message))

    def _apply(self, text: str) -> None:
        match = _OVERRIDE.fullmatch(text)
        if match is None:
            raise ValueError("is not of the form search.max_trials=10")
        document = read(match[2])
        if document.mistakes:
            raise ValueError(document.mistakes[0].message)
        path: Path = tuple(int(part) if part.isdecimal() else part for part in match[1].split("."))
        owner: Any = self.value
        for depth, part in enumerate(path[:-1]):
            if isinstance(owner, dict) and owner.get(str(part)) is None:
                # The override creates this section.
                self._overridden[path[: depth + 1]] = text
            owner = _entered(owner, part, path[: depth + 1])
        last = path[-1]
        if isinstance(owner, list) and isinstance(last, int) and last < len(owner):
            owner[last] = document.value
        elif isinstance(owner, dict):
            owner[str(last)] = document.value
        else:
            raise ValueError(f"{_dotted(path[:-1])} has no {last!r}")
        # The two ways to give the global batch exclude each other; the command line wins.
        if path in ((_BATCHES[0],), (_BATCHES[1],)):
            other = _BATCHES[1 - _BATCHES.index(str(last))]
            if (other,) not in self._overridden:
                self.value.pop(other, None)
        self._overridden[path] = text

    def explain(self, failure: ValidationError) -> Iterator[_Line]:
        """Yield a line for each mistake that pydantic found, and for a missing global batch."""
        errors = failure.errors(include_url=False)
        # A suggestion is slow to find: not for thousands of keys.
        for error in errors[:MAX_MISTAKES_SHOWN]:
            path = self._path(error["loc"], error["type"])
            if error["type"] in _WRONG_NAME and isinstance(self._at(path), dict):
                path = (*path, "name")  # the key that chooses among sections
            message = _message(error, path)
            path = self._narrowed(path, message)
            yield _Line(self._where(path, key=error["type"] == "extra_forbidden"), path, message)
        # Pydantic skips rules of the whole file if a key is wrong; this rule needs no valid values.
        mistake = batch_mistake(*(self.value.get(name) is not None for name in _BATCHES))
        if mistake and all(error["loc"] for error in errors):
            path = self._narrowed((), mistake)
            yield _Line(self._where(path), path, mistake)

    def _path(self, loc: tuple[int | str, ...], kind: str) -> Path:
        """Return the path in the file, without tags and lists that only the validators add."""
        path: list[int | str] = []
        value: Any = self.value
        for part in loc:
            if isinstance(value, dict) and isinstance(part, str) and part in value:
                value = value[part]
                path.append(part)
            elif kind == "missing" and isinstance(part, str) and part not in WORKLOADS:
                value = None  # missing from here on
                path.append(part)
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                value = value[part]
                path.append(part)
        return tuple(path)

    def _narrowed(self, path: Path, message: str) -> Path:
        """Return the path of the key that a section's rule starts with, if it names one."""
        value = self._at(path)
        first = message.split(" ", 1)[0]
        return (*path, first) if isinstance(value, dict) and first in value else path

    def _at(self, path: Path) -> Any:
        value: Any = self.value
        for part in path:
            if isinstance(value, list) and isinstance(part, int):
                value = value[part]
            else:
                value = value.get(part) if isinstance(value, dict) else None
        return value

    def _where(self, path: Path, *, key: bool = False) -> Place | str:
        """Return the place of a value or its key, or else of what is around it."""
        for length in range(len(path), -1, -1):
            if text := self._overridden.get(path[:length]):
                return f"override {_shown(text)}"
            place = self._document.value_places.get(path[:length])
            if key and length == len(path):
                place = self._document.key_places.get(path, place)
            if place is not None:
                return place
        return Place(1, 1)


def _entered(owner: Any, part: int | str, path: Path) -> Any:
    """Return the mapping or list inside, creating it if it is missing.

    `workload: llama` becomes `workload: {name: llama}`.
    """
    if isinstance(owner, list) and isinstance(part, int) and part < len(owner):
        return owner[part]
    if not isinstance(owner, dict):
        raise ValueError(f"{_dotted(path[:-1])} has no {part!r}")
    inner = owner.get(str(part))
    if inner is None:
        inner = owner[str(part)] = {}
    elif isinstance(inner, str) and path in (("workload",), ("model",)):
        inner = owner[str(part)] = {"name" if path == ("workload",) else "preset": inner}
    elif not isinstance(inner, (dict, list)):
        raise ValueError(f"{_dotted(path)} is {_shown(inner)}, not a mapping")
    return inner


# --- one clear line for each kind of mistake ---

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


# Pydantic's errors for a `name` that is none of several sections.
_WRONG_NAME = ("union_tag_invalid", "union_tag_not_found")


def _message(error: ErrorDetails, path: Path) -> str:
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return _unknown_key(error["loc"])
    if kind in _WRONG_NAME:
        return _not_one_of(given["name"], list(WORKLOADS))
    if kind in ("literal_error", "enum"):
        return _not_one_of(given, re.findall(r"'([^']*)'", str(context["expected"])))
    if kind == "value_error":
        return str(context["error"])
    if kind in _BOUNDS:
        return _BOUNDS[kind](context, _shown(given))
    if kind not in _KINDS:
        return f"{error['msg']}, got {_shown(given)}"
    expected, hint = _KINDS[kind], ""
    if kind == "int_type" and path and _takes_auto(path):
        expected += " or auto"
        if isinstance(given, str) and given != "auto":
            hint = did_you_mean(given.lower(), ["auto"])
    if expected == "a mapping" and (keys := _keys(error["loc"])):
        expected += f" of {', '.join(keys)}"
    if kind == "string_type" and isinstance(given, (int, float)):
        hint = "; in quotes it is one"
    return f"expected {expected}, got {_shown(given)}{hint}"


def _not_one_of(given: Any, allowed: Sequence[str]) -> str:
    hint = did_you_mean(str(given).lower(), allowed)
    return f"{_shown(given)} is not one of {', '.join(allowed)}{hint}"


def _unknown_key(loc: Path) -> str:
    *section, key = loc
    allowed = _keys(tuple(section))
    hint = did_you_mean(str(key).lower(), allowed)
    elsewhere = next((where for where, keys in _all_keys() if key in keys), None)
    if not hint and str(key) in _OTHER_WORDS:
        hint = f"; did you mean {_OTHER_WORDS[str(key)]}?"
    elif not hint and elsewhere is not None:
        hint = f"; {key} belongs to {elsewhere}"
    return f"unknown key; allowed: {', '.join(allowed)}{hint}"


def _shown(value: Any) -> str:
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


def _all_keys() -> Iterator[tuple[str, list[str]]]:
    yield "the top level", _keys(())
    for name in SweepSpec.model_fields:
        if keys := _keys((name,)):
            yield name, keys
    for name in WORKLOADS:
        yield f"workload.options of {name}", _keys(("workload", name, "options"))


def _takes_auto(path: Path) -> bool:
    *section, name = (part for part in path if isinstance(part, str))
    owner = _section(tuple(section))
    field = owner.model_fields.get(name) if owner is not None else None
    return field is not None and "'auto'" in str(field.annotation)
