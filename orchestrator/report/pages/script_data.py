"""Values as scripts: a page that is opened from a file may not fetch JSON, but may load scripts."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from orchestrator.report.json_text import jsonable

SCRIPT_BEGINS = "sweepReport.takeCompressed("
# `<` would end a script element within HTML, U+2028 and U+2029 end a line in old JavaScript.
_ESCAPED = "<>&\u2028\u2029"


def json_for_script(value: Any) -> str:
    """Return JSON that is safe within a script: it holds no markup and no control character."""
    text = json.dumps(jsonable(value), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for character in _ESCAPED:
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def compressed_script(name: str, value: Any) -> str:
    """Return a script that gives a value to the page under a name.

    It is deflated JSON in base64, a tenth of the size, which the page inflates.
    """
    content = zlib.compress(json_for_script(value).encode())
    text = base64.b64encode(content).decode()
    return f"{SCRIPT_BEGINS}{json.dumps(name)}, {json.dumps(text)});\n"
