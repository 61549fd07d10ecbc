"""A translation as the text of a file or of arguments, and what neither can say as sentences."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

import yaml

from orchestrator.core.frameworks.translation import (
    TABLES,
    Form,
    Translation,
    arguments,
    variables,
)


def text_of(translation: Translation) -> str:
    """The text of a framework's file or arguments, ending in a newline.

    Arguments have one line each, for `$(cat FILE)`. What torchrun gets is a shell script that takes
    the program as its arguments.
    """
    form, settings = TABLES[translation.framework].form, translation.settings
    match form:
        case Form.JSON:
            return json.dumps(translation.nested(), indent=2) + "\n"
        case Form.YAML:
            comments = "".join(f"# {line}\n" for line in remarks(translation))
            return comments + yaml.safe_dump(translation.nested(), sort_keys=False)
        case Form.ARGUMENTS:
            parts = [arguments({name: value}, form) for name, value in settings.items()]
            return "".join(f"{' '.join(part)}\n" for part in parts)
        case Form.TYRO_ARGUMENTS:
            return "".join(f"{argument}\n" for argument in arguments(settings, form))
        case Form.TORCHRUN:
            found = variables(settings, form).items()
            lines = [f"{name}={shlex.quote(value)}" for name, value in found]
            lines.append(" ".join(["torchrun", *arguments(settings, form), '"$@"']))
            return " \\\n".join(lines) + "\n"


def remarks(translation: Translation) -> list[str]:
    """Return a sentence for each thing that no setting says; the impossible ones come first."""
    return [
        *_sentences(translation.impossible, "cannot be written"),
        *_sentences(translation.program, "is up to your program"),
    ]


def _sentences(reasons: Mapping[str, str], what: str) -> list[str]:
    return [f"{name} {what}: {reason}" for name, reason in reasons.items()]
