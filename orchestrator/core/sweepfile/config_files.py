"""Config files of a command: their names, contents and formats. It writes none.

A content is a mapping, whose format follows from the name's ending, or the text of the file. Texts
in both are templates, filled in when a rank starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import yaml

from orchestrator.core.problem.layout import OptionValue
from orchestrator.core.sweepfile.template import fill, text_of, well_formed
from orchestrator.core.sweepfile.yaml_document import MAX_DIGITS, scalar

MAX_DEPTH = 50
MAX_KEY = 256  # characters
MAX_INTEGER = (1 << 63) - 1  # TOML has no larger one

FORMATS: Mapping[str, str] = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML", ".toml": "TOML"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
# What launchers, ranks and programs write into the run folder.
_OURS = re.compile(
    r"(?:request|(?:heartbeat|result|failure)-\d+)\.json|log-\d+\.txt|(?:program|printed)-.*|stop",
    re.IGNORECASE,
)
_ONE_NAME = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)

# Keys and numbers of entries, from the top of a file.
Path = tuple[str | int, ...]


def file_name(name: str) -> str:
    """Return the name if a file in the run folder may have it. Raises ValueError."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            f"{name[:80]!r} is no name of a file in the run folder: 1 to 100 letters, digits and"
            " . _ -, no folder, no '..' and no . or - first"
        )
    if _OURS.fullmatch(name):
        raise ValueError(
            f"{name} is a file of this program in the run folder; give it another name"
        )
    return name


def checked_content(name: str, content: Any) -> Any:
    """Return the content of the file of this name. Raises ValueError with the path in the file."""
    if isinstance(content, str):
        try:
            return _checked_text(content)
        except ValueError as exc:
            raise ValueError(f"{name}: {exc}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{name}: expected a mapping, or the text of the file")
    if format_of(name) is None:
        raise ValueError(
            f"{name}: a mapping needs a name that ends in {', '.join(FORMATS)};"
            " for any other name write the file's text"
        )
    try:
        _check_tree(content, (), has_null=format_of(name) != "TOML")
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from None
    return content


def format_of(name: str) -> str | None:
    """Return the format that a mapping is written in by the name of its file; None: none is."""
    return FORMATS.get(f".{name.rpartition('.')[2].lower()}")


def templates(content: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield each text of a content, with its place in the file."""
    match content:
        case str():
            yield path, content
        case Mapping():
            for key, value in content.items():
                yield from templates(value, (*path, key))
        case list() | tuple():
            for number, value in enumerate(content):
                yield from templates(value, (*path, number))


def rendered(name: str, content: Any, values: Mapping[str, OptionValue]) -> str:
    """Return the text of a file with its templates filled in.

    A text of a mapping that is one `{name}` and nothing else becomes the value itself, so a number
    stays a number. Raises ValueError for a name that is not in `values`.
    """
    if isinstance(content, str):
        return fill(content, {key: text_of(value) for key, value in values.items()})
    tree = _filled(content, values)
    match format_of(name):
        case "JSON":
            return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
        case "YAML":
            return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True))
        case "TOML":
            # Imported here: most sweeps write no TOML.
            import tomli_w

            return str(tomli_w.dumps(tree))
        case _:
            raise ValueError(f"{name}: a mapping needs a name that ends in {', '.join(FORMATS)}")


def _check_tree(content: Any, path: Path, *, has_null: bool) -> None:
    if len(path) > MAX_DEPTH:
        raise ValueError(f"{_shown(path[:3])}...: more than {MAX_DEPTH} levels")
    match content:
        case str():
            try:
                _checked_text(content)
            except ValueError as exc:
                raise ValueError(f"{_shown(path)}: {exc}") from None
        case Mapping():
            for key, value in content.items():
                if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY or "\0" in key:
                    raise ValueError(
                        f"{_shown((*path, str(key)[:80]))}: a key is a text of 1 to {MAX_KEY}"
                        f' characters; quote it: "{str(key)[:80]}"'
                    )
                _check_tree(value, (*path, key), has_null=has_null)
        case list() | tuple():
            for number, value in enumerate(content):
                _check_tree(value, (*path, number), has_null=has_null)
        case None if not has_null:
            raise ValueError(f"{_shown(path)}: TOML has no null; leave the key out")
        case bool() | None:
            return
        case int() if abs(content) > MAX_INTEGER:
            raise ValueError(f"{_shown(path)}: a number beyond 64 bits")
        case float() if not isfinite(content):
            raise ValueError(f"{_shown(path)}: {content} is no number that every format can write")
        case int() | float():
            return
        case _:
            raise ValueError(
                f"{_shown(path)}: expected a text, number, true, false, list or mapping"
            )


def _checked_text(text: str) -> str:
    if "\0" in text:
        # The same words as in `yaml_document`: the mistake is then reported once.
        raise ValueError("control character '\\x00' in a text")
    return well_formed(text)


def _filled(content: Any, values: Mapping[str, OptionValue]) -> Any:
    match content:
        case str():
            alone = _ONE_NAME.fullmatch(content)
            if alone is not None and alone[1] in values:
                return values[alone[1]]
            return fill(content, {key: text_of(value) for key, value in values.items()})
        case Mapping():
            return {key: _filled(value, values) for key, value in content.items()}
        case list() | tuple():
            return [_filled(value, values) for value in content]
        case _:
            return content


def _shown(path: Path) -> str:
    return ".".join(map(str, path))


class _Dumper(yaml.SafeDumper):
    """Quotes each text that a reader of YAML 1.2 would take for something else, such as 1e-3."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if not text.isprintable():
        style = '"'
    elif len(text) <= MAX_DIGITS and not isinstance(scalar(text), str):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
