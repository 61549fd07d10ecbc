"""The section `mirror` of a sweep file: experiment trackers that get a copy of each result.

The address of a server may hold a password: the file names an environment variable that has it.
"""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from orchestrator.core.sweepfile.spec_values import Section, key

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]{0,254})\}")
# `sqlite:///...` and `http://...`, also without slashes, but not `C:` alone.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


def _folder(value: str) -> str:
    if _ADDRESS.match(value):
        raise ValueError(
            "an address may hold a password, so it does not belong into a sweep file: put it into"
            " an environment variable of `sweep run`, and write its name here, as in"
            " ${MLFLOW_TRACKING_URI}; or write a folder"
        )
    if "\0" in value or value != value.strip():
        raise ValueError("a folder has no control character, and no space at an end")
    if "$" in value:
        raise ValueError("write a folder without `$`, or ${NAME} alone")
    return value


def _folder_or_reference(value: str) -> str:
    return value if _REFERENCE.fullmatch(value) else _folder(value)


def _only_folder(value: str) -> str:
    if _REFERENCE.fullmatch(value) or _ADDRESS.match(value):
        raise ValueError("runs of W&B are written offline: write the folder for them")
    return _folder(value)


_Text = Annotated[str, Field(min_length=1, max_length=4096)]
MlflowPlace = Annotated[
    _Text, AfterValidator(_folder_or_reference), WithJsonSchema({"type": "string"})
]
WandbFolder = Annotated[_Text, AfterValidator(_only_folder), WithJsonSchema({"type": "string"})]


class MirrorSection(Section):
    """Trackers that get a run for each trial that has ended."""

    mlflow: Annotated[
        MlflowPlace | None,
        key(
            "`${NAME}`, or a folder",
            "The environment variable NAME of `sweep run` has the tracking URI; it is stored and"
            " shown nowhere. Or a folder, which gets a SQLite store",
        ),
    ] = None
    wandb: Annotated[
        WandbFolder | None,
        key("folder", "Where W&B writes runs offline; `wandb sync` sends them"),
    ] = None

    @model_validator(mode="after")
    def _is_one_at_least(self) -> Self:
        if self.mlflow is None and self.wandb is None:
            raise ValueError("give mlflow, wandb or both")
        return self

    @property
    def variable(self) -> str | None:
        """The environment variable that holds the tracking URI of MLflow."""
        found = _REFERENCE.fullmatch(self.mlflow or "")
        return found[1] if found is not None else None
