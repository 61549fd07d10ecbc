"""The parameters of a request, from its query or its form: known names, each once, each short."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

from orchestrator.cli.ui.refusal import Refusal

# Characters that a parameter may have by default.
SHORT = 200
# No text of a person has these; line breaks and tabs are checked apart.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def parameters(encoded: bytes, allowed: Mapping[str, int]) -> dict[str, str]:
    """Read `a=1&b=2`. `allowed`: the longest text by name. Raises Refusal."""
    found: dict[str, str] = {}
    for part in encoded.split(b"&") if encoded else ():
        name, _, value = map(_decoded, part.partition(b"="))
        if name not in allowed:
            raise Refusal(400, "The address has a parameter that this page does not know.")
        if name in found:
            raise Refusal(400, f"The parameter {name} is given twice.")
        if len(value) > allowed[name]:
            raise Refusal(413, f"The parameter {name} has more than {allowed[name]} characters.")
        if _CONTROL.search(value):
            raise Refusal(400, f"The parameter {name} has control characters.")
        found[name] = value
    return found


def _decoded(part: bytes) -> str:
    if re.search(rb"%(?![0-9A-Fa-f]{2})", part):
        raise Refusal(400, "The address has a percent sign without two hexadecimal digits.")
    try:
        return unquote_to_bytes(part.replace(b"+", b" ")).decode()
    except UnicodeDecodeError:
        raise Refusal(400, "The parameters are not UTF-8.") from None


def number(text: str) -> int:
    """A number such as a trial's. Raises Refusal."""
    if not re.fullmatch("[0-9]{1,12}", text, re.ASCII):
        raise Refusal(400, "That is not a number.")
    return int(text)
