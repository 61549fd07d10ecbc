"""The section `notify` of a sweep file: who gets messages about a sweep.

An address is a secret: the file names an environment variable that holds it, and no mistake of a
file repeats what somebody wrote in its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from orchestrator.core.sweepfile.spec_values import Section, as_list, key

MAX_TARGETS = 8
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]{0,254})\}")


def _reference(value: str) -> str:
    if not _REFERENCE.fullmatch(value):
        raise ValueError(
            "a webhook's URL is a secret, so it does not belong into a sweep file: put it into an"
            " environment variable of `sweep run`, and write its name here, as in ${SLACK_URL}"
        )
    return value


def _words(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("expected a list of words, as in [./tell.sh, --quiet]: no shell reads it")
    return value


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("control character '\\x00' in a text")
    return value


Word = Annotated[str, AfterValidator(_without_nul), Field(min_length=1, max_length=4096)]


Reference = Annotated[
    str,
    AfterValidator(_reference),
    WithJsonSchema({"type": "string", "pattern": f"^{_REFERENCE.pattern}$"}),
]
Words = Annotated[tuple[Word, ...], BeforeValidator(_words), Field(min_length=1, max_length=64)]


class NotifyTarget(Section):
    """One address that takes messages: a webhook or a command."""

    url: Annotated[
        Reference | None,
        key(
            "`${NAME}`",
            'Send `{"text": ...}` as JSON by POST, as Slack and Mattermost take it. The environment'
            " variable NAME of `sweep run` has the URL; it is stored and shown nowhere",
        ),
    ] = None
    command: Annotated[
        Words | None,
        key(
            "list of words",
            "Start this program on the machine of `sweep run`, in its folder, with the JSON on its"
            " standard input. No shell reads it",
        ),
    ] = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.url is None) == (self.command is None):
            raise ValueError("give either url or command")
        return self

    @property
    def variable(self) -> str | None:
        """The environment variable that holds the URL."""
        return None if self.url is None else self.url[2:-1]


def _few_targets(value: Any) -> Any:
    some = as_list(value)
    if not all(isinstance(one, (Mapping, NotifyTarget)) for one in some):
        raise ValueError("expected a section, {url: ${NAME}} or {command: [./tell.sh]}, or a list")
    if len(some) > MAX_TARGETS:
        raise ValueError(f"{len(some):,} targets; at most {MAX_TARGETS}")
    return some


NotifyTargets = Annotated[tuple[NotifyTarget, ...], BeforeValidator(_few_targets)]
