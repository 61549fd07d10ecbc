"""Removes secret values from text before it is stored, printed or written.

The search depends on a value's length, since short values occur in words that are not secret:

- 8 characters and more: everywhere; also encoded (URL, JSON, base64, hexadecimal), broken over
  lines, and each line of several
- 4 to 7: as it is or URL-encoded, without a letter or digit directly before or after it
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
MAX_KEPT_BYTES = 1 << 16  # of a line in a stream

_T = TypeVar("_T")

# Also escaped, as within quotes.
_LINE_BREAK = rb"(?:\r?\n|(?:\\r)?\\n)?"
_LONGEST_LINE_BREAK = 4  # bytes
_BEGUN_LINE_BREAK = re.compile(rb"\\(?:r\\?)?\Z")
_NOT_IN_A_WORD = rb"(?<![0-9A-Za-z\x80-\xff])", rb"(?![0-9A-Za-z\x80-\xff])"
_ESCAPE = re.compile(rb"%[0-9A-Fa-f]{2}")
_NAMES_OF_PASSWORDS = (b"password", b"passwd")


@dataclass(frozen=True, kw_only=True, slots=True)
class _RedactionRule:
    needle: bytes  # in every match, line breaks apart
    pattern: re.Pattern[bytes]
    is_word: bool  # the next character decides


class Secrets:
    """Secret values by name, e.g. of an environment variable; an empty name if there is none."""

    def __init__(self, values: Mapping[str, str]) -> None:
        rules = {
            rule.pattern.pattern: rule
            for name, value in values.items()
            for rule in _rules(name, value)
        }
        # The longest first: a value may contain another.
        self._rules = sorted(rules.values(), key=lambda rule: -len(rule.pattern.pattern))
        self._first_bytes = frozenset(rule.needle[:1] for rule in self._rules)
        self._needs_lines = any(0 < len(value) < WORD_LENGTH for value in values.values())

    def __bool__(self) -> bool:
        return bool(self._rules)

    def redact(self, text: str) -> str:
        """Return the text without its secrets."""
        if not self._rules or not text:
            return text
        return self.redact_bytes(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")

    def redact_bytes(self, raw: bytes) -> bytes:
        """Return the bytes without their secrets."""
        flat = _on_one_line(raw)
        for rule in self._rules:
            if rule.needle in flat:
                raw = rule.pattern.sub(MASK.encode(), raw)
        return raw

    def num_settled(self, raw: bytes) -> int:
        """Return how many bytes are complete.

        Later ones may begin a secret of the next piece too.
        """
        longest = max((len(rule.needle) for rule in self._rules), default=0)
        settled = len(raw)
        for place in range(max(0, len(raw) - (1 + _LONGEST_LINE_BREAK) * longest), len(raw)):
            rest = raw[place:]
            if rest[:1] in self._first_bytes and self._may_continue(rest):
                settled = place
                break
        if self._needs_lines:
            settled = min(settled, max(raw.rfind(b"\n") + 1, len(raw) - MAX_KEPT_BYTES))
        flat = _on_one_line(raw)
        starts = [
            match.start()
            for rule in self._rules
            if rule.needle in flat
            for match in rule.pattern.finditer(raw)
            if settled < match.end()
        ]
        return min([settled, *starts])

    def _may_continue(self, rest: bytes) -> bool:
        flat = _on_one_line(rest)
        # The next piece may end an escaped line break.
        begun = {flat, _BEGUN_LINE_BREAK.sub(b"", flat)}
        return any(
            rule.needle.startswith(one) and (rule.is_word or one != rule.needle)
            for rule in self._rules
            for one in begun
        )


class SecretStream:
    """Removes secrets from a stream that arrives in pieces; two of them may share a secret."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._kept = b""
        self._before = b""  # the last byte returned

    def take(self, piece: bytes) -> bytes:
        """Return what is complete with this piece."""
        raw = self._kept + piece
        settled = self._secrets.num_settled(raw)
        return self._clean(raw[:settled], raw[settled:])

    def close(self) -> bytes:
        """Return the rest."""
        return self._clean(self._kept, b"")

    def _clean(self, raw: bytes, kept: bytes) -> bytes:
        # One byte of context on either side shows whether a word ends there. No match reaches it.
        after = kept[:1]
        clean = self._secrets.redact_bytes(self._before + raw + after)
        clean = clean[len(self._before) : len(clean) - len(after)]
        self._before = (self._before + raw)[-1:]
        self._kept = kept
        return clean


def redacted(value: _T, secrets: Secrets, *, but: frozenset[str] = frozenset()) -> _T:
    """Return a value with all texts in it redacted and none longer; fields in `but` stay."""
    return _redacted(value, secrets, but) if secrets else value


def _redacted(value: Any, secrets: Secrets, but: frozenset[str]) -> Any:
    match value:
        case Enum():
            return value
        case str():
            return secrets.redact(value)[: len(value)]
        case Mapping():
            return {
                _redacted(key, secrets, but): _redacted(item, secrets, but)
                for key, item in value.items()
            }
        case list() | tuple():
            return type(value)(_redacted(item, secrets, but) for item in value)
        # A pydantic model. Importing pydantic would make `sweep --help` slow.
        case _ if hasattr(type(value), "model_fields"):
            names = [name for name in type(value).model_fields if name not in but]
            clean = {name: _redacted(getattr(value, name), secrets, but) for name in names}
            return value.model_copy(update=clean)
        case _ if is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in fields(value) if field.init and field.name not in but]
            clean = {name: _redacted(getattr(value, name), secrets, but) for name in names}
            return replace(value, **clean)
        case _:
            return value


def _rules(name: str, value: str) -> Iterator[_RedactionRule]:
    raw = value.encode(errors="surrogateescape")
    if len(value) >= EVERYWHERE_LENGTH:
        for form in _forms(value, raw):
            yield _RedactionRule(
                needle=_on_one_line(form),
                pattern=re.compile(_LINE_BREAK.join(re.escape(bytes([byte])) for byte in form)),
                is_word=False,
            )
    elif len(value) >= WORD_LENGTH:
        before, after = _NOT_IN_A_WORD
        for form in {raw, _percent_encoded(raw, safe=b"")}:
            pattern = re.compile(before + re.escape(form) + after)
            yield _RedactionRule(needle=form, pattern=pattern, is_word=True)
    elif value:
        pattern = re.compile(rb"(?<=:)" + re.escape(raw) + rb"(?=@)")
        yield _RedactionRule(needle=b":" + raw + b"@", pattern=pattern, is_word=False)
        for label in {name.encode(), *_NAMES_OF_PASSWORDS} - {b""}:
            # A look-behind has one width, and these are four.
            labels = b"|".join(
                rb"(?<=%s%s)" % (re.escape(label), sign)
                for sign in (rb"=", rb"=['\"]", rb": ", rb"['\"]: ['\"]")
            )
            pattern = re.compile(rb"(?:" + labels + rb")" + re.escape(raw) + _NOT_IN_A_WORD[1])
            yield _RedactionRule(needle=label, pattern=pattern, is_word=True)


def _on_one_line(raw: bytes) -> bytes:
    return raw.translate(None, b"\r\n").replace(b"\\r\\n", b"").replace(b"\\n", b"")


def _forms(value: str, raw: bytes) -> set[bytes]:
    """The forms in which a long value may occur in a text."""
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
    decoded = _ESCAPE.sub(lambda match: bytes.fromhex(match[0][1:].decode()), raw)
    found = {raw, *lines, *encoded, decoded, *_base64_forms(raw)}
    found |= {raw.hex().encode(), raw.hex().upper().encode()}
    found |= {text.encode(errors="surrogateescape") for text in texts}
    return {form.translate(None, b"\r\n") for form in found if len(form) >= EVERYWHERE_LENGTH}


def _percent_encoded(raw: bytes, *, safe: bytes) -> bytes:
    """Encode as in a URL: all bytes but letters, digits, `-._~` and those that are safe."""
    coded = re.compile(rb"[^0-9A-Za-z._~%s-]" % re.escape(safe))
    return coded.sub(lambda match: b"%%%02X" % match[0][0], raw)


def _base64_forms(raw: bytes) -> Iterator[bytes]:
    """The characters that encode only these bytes, for each of the three possible offsets."""
    for offset in range(3):
        encoded = base64.b64encode(bytes(offset) + raw)
        first = -(-offset * 8 // 6)
        last = (offset + len(raw)) * 8 // 6
        yield encoded[first:last]
        yield encoded[first:last].replace(b"+", b"-").replace(b"/", b"_")
