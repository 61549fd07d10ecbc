"""Secret values, and how they are taken out of text before it is stored, printed or written. Knows no file and no environment.

How a value is looked for goes by its length, since a short one occurs in words that are no secret:

- 8 characters and more: everywhere; also encoded (URL, JSON, base64, hexadecimal), broken over lines, and each line of several
- 4 to 7: as it is or URL-encoded, where no letter or digit stands directly before or behind it
- 1 to 3: only as a value, `NAME=...` or `NAME: ...`, and as the password of a URL
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

MASK = "***"
EVERYWHERE_LENGTH = 8
WORD_LENGTH = 4
MAX_HELD_BYTES = 1 << 16  # of a stream, for a line that may still become a secret

_T = TypeVar("_T")

# Also as it is written within quotes.
_LINE_BREAK = rb"(?:\r?\n|(?:\\r)?\\n)?"
_LONGEST_LINE_BREAK = 4  # bytes
_NOT_IN_A_WORD = rb"(?<![0-9A-Za-z\x80-\xff])", rb"(?![0-9A-Za-z\x80-\xff])"
_ESCAPE = re.compile(rb"%[0-9A-Fa-f]{2}")
_NAMES_OF_PASSWORDS = (b"password", b"passwd")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    needle: bytes  # a text without it, line breaks apart, holds no match
    pattern: re.Pattern[bytes]
    is_word: bool  # what comes next decides


class Secrets:
    """Values by the names that they go by, e.g. of environment variables; an empty name where there is none."""

    def __init__(self, values: Mapping[str, str]) -> None:
        rules = {
            rule.pattern.pattern: rule
            for name, value in values.items()
            for rule in _rules(name, value)
        }
        # The longest first: a value may hold another.
        self._rules = sorted(
            rules.values(), key=lambda rule: len(rule.pattern.pattern), reverse=True
        )
        self._first_bytes = frozenset(rule.needle[:1] for rule in self._rules)
        self._holds_lines = any(0 < len(value) < WORD_LENGTH for value in values.values())

    def __bool__(self) -> bool:
        return bool(self._rules)

    def blot(self, text: str) -> str:
        """The text without the secrets that it holds."""
        if not self._rules or not text:
            return text
        return self.blot_bytes(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")

    def blot_bytes(self, raw: bytes) -> bytes:
        """The bytes that a program wrote without the secrets that they hold."""
        flat = _on_one_line(raw)
        for rule in self._rules:
            if rule.needle in flat:
                raw = rule.pattern.sub(MASK.encode(), raw)
        return raw

    def num_settled(self, raw: bytes) -> int:
        """The number of bytes that can be judged. Those after them may begin a secret that goes on in the next piece."""
        first = max(0, len(raw) - (1 + _LONGEST_LINE_BREAK) * self._longest)
        places = (
            place for place in range(first, len(raw)) if raw[place : place + 1] in self._first_bytes
        )
        settled = next(
            (place for place in places if self._may_go_on(_on_one_line(raw[place:]))), len(raw)
        )
        if self._holds_lines:
            settled = min(settled, max(raw.rfind(b"\n") + 1, len(raw) - MAX_HELD_BYTES))
        return min(
            (
                match.start()
                for match in self._matches(raw)
                if match.start() < settled < match.end()
            ),
            default=settled,
        )

    def _matches(self, raw: bytes) -> Iterator[re.Match[bytes]]:
        flat = _on_one_line(raw)
        return (
            match
            for rule in self._rules
            if rule.needle in flat
            for match in rule.pattern.finditer(raw)
        )

    @property
    def _longest(self) -> int:
        return max((len(rule.needle) for rule in self._rules), default=0)

    def _may_go_on(self, rest: bytes) -> bool:
        return any(
            rule.needle.startswith(rest) and (rule.is_word or rest != rule.needle)
            for rule in self._rules
        )


class SecretStream:
    """Takes secrets out of a stream that arrives in pieces; a secret may be broken between two of them."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._held = b""
        self._before = b""  # the last byte that was given out: whether a word begins after it

    def take(self, piece: bytes) -> bytes:
        """Return what can be given out now."""
        raw = self._held + piece
        settled = self._secrets.num_settled(raw)
        return self._give(raw[:settled], raw[settled:])

    def close(self) -> bytes:
        """Return the rest."""
        return self._give(self._held, b"")

    def _give(self, raw: bytes, held: bytes) -> bytes:
        # One byte of context on either side: whether a word ends there. No match reaches into it.
        behind = held[:1]
        clean = self._secrets.blot_bytes(self._before + raw + behind)
        clean = clean[len(self._before) : len(clean) - len(behind)]
        self._before = (self._before + raw)[-1:]
        self._held = held
        return clean


def blotted(value: _T, secrets: Secrets, *, but: frozenset[str] = frozenset()) -> _T:
    """A value with all texts in it blotted, none longer than it was; fields named in `but` stay as they are."""
    return _blotted(value, secrets, but) if secrets else value


def _blotted(value: Any, secrets: Secrets, but: frozenset[str]) -> Any:
    match value:
        case Enum():
            return value
        case str():
            return secrets.blot(value)[: len(value)]
        case Mapping():
            return {
                _blotted(key, secrets, but): _blotted(item, secrets, but)
                for key, item in value.items()
            }
        case list() | tuple():
            return type(value)(_blotted(item, secrets, but) for item in value)
        case _ if hasattr(
            type(value), "model_fields"
        ):  # pydantic's; `sweep --help` has no time to import it
            names = [name for name in type(value).model_fields if name not in but]
            return value.model_copy(
                update={name: _blotted(getattr(value, name), secrets, but) for name in names}
            )
        case _ if is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in fields(value) if field.init and field.name not in but]
            return replace(
                value, **{name: _blotted(getattr(value, name), secrets, but) for name in names}
            )
        case _:
            return value


def _rules(name: str, value: str) -> Iterator[_Rule]:
    raw = value.encode(errors="surrogateescape")
    if len(value) >= EVERYWHERE_LENGTH:
        for form in _forms(value, raw):
            yield _Rule(
                needle=_on_one_line(form),
                pattern=re.compile(_LINE_BREAK.join(re.escape(bytes([byte])) for byte in form)),
                is_word=False,
            )
    elif len(value) >= WORD_LENGTH:
        before, behind = _NOT_IN_A_WORD
        for form in {raw, _percent_encoded(raw, safe=b"")}:
            yield _Rule(
                needle=form, pattern=re.compile(before + re.escape(form) + behind), is_word=True
            )
    elif value:
        behind = re.escape(raw) + _NOT_IN_A_WORD[1]
        yield _Rule(
            needle=b":" + raw + b"@",
            pattern=re.compile(rb"(?<=:)" + re.escape(raw) + rb"(?=@)"),
            is_word=False,
        )
        for label in {name.encode(), *_NAMES_OF_PASSWORDS} - {b""}:
            # Four widths: a look behind has one.
            ways = b"|".join(
                rb"(?<=%s%s)" % (re.escape(label), sign)
                for sign in (rb"=", rb"=['\"]", rb": ", rb"['\"]: ['\"]")
            )
            yield _Rule(
                needle=label, pattern=re.compile(rb"(?:" + ways + rb")" + behind), is_word=True
            )


def _on_one_line(raw: bytes) -> bytes:
    return raw.translate(None, b"\r\n").replace(b"\\r\\n", b"").replace(b"\\n", b"")


def _forms(value: str, raw: bytes) -> set[bytes]:
    """A long value as it may stand in a text."""
    lines = {line.strip() for line in raw.splitlines() if len(line.strip()) >= EVERYWHERE_LENGTH}
    texts = {
        value.replace("%", "%%"),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
    }
    encoded = {_percent_encoded(raw, safe=safe) for safe in (b"", b"/")}
    encoded |= {form.replace(b"%20", b"+") for form in encoded}
    encoded |= {_ESCAPE.sub(lambda match: match[0].lower(), form) for form in encoded}
    found = {
        raw,
        *lines,
        *encoded,
        _ESCAPE.sub(lambda match: bytes.fromhex(match[0][1:].decode()), raw),
        *_base64_forms(raw),
    }
    found |= {raw.hex().encode(), raw.hex().upper().encode()}
    found |= {text.encode(errors="surrogateescape") for text in texts}
    return {
        form.replace(b"\r", b"").replace(b"\n", b"")
        for form in found
        if len(form) >= EVERYWHERE_LENGTH
    }


def _percent_encoded(raw: bytes, *, safe: bytes) -> bytes:
    """As in a URL: all bytes but letters, digits, `-._~` and those that are safe."""
    return re.sub(
        rb"[^0-9A-Za-z._~%s-]" % re.escape(safe), lambda match: b"%%%02X" % match[0][0], raw
    )


def _base64_forms(raw: bytes) -> Iterator[bytes]:
    """The characters that stand for these bytes alone, wherever among the encoded bytes they begin."""
    for offset in range(3):
        encoded = base64.b64encode(bytes(offset) + raw)
        first = -(-offset * 8 // 6)
        last = (offset + len(raw)) * 8 // 6
        yield encoded[first:last]
        yield encoded[first:last].replace(b"+", b"-").replace(b"/", b"_")
