"""Tables of the keys of a sweep file and of the options of workloads, as their fields tell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.markdown import markdown_table
from orchestrator.core.sweepfile.axes_section import Axes
from orchestrator.core.sweepfile.measurement_section import Limits, Measuring
from orchestrator.core.sweepfile.mirror_section import MirrorSection
from orchestrator.core.sweepfile.model_section import ModelSizes
from orchestrator.core.sweepfile.notify_section import NotifyTarget
from orchestrator.core.sweepfile.search_section import Confirm, Plateau, Search
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.synthetic_options import (
    SyntheticDrift,
    SyntheticFault,
)
from orchestrator.core.sweepfile.trainer_section import (
    BytesPerParameter,
    TracedModeSection,
    TracedTerm,
    TrainerSection,
)
from orchestrator.core.sweepfile.workload_section import WORKLOADS, LlamaWorkload

SECTIONS: Mapping[str, type[BaseModel]] = {
    "sweep": SweepSpec,
    "axes": Axes,
    "measurement": Measuring,
    "limits": Limits,
    "search": Search,
    "plateau": Plateau,
    "confirm": Confirm,
    "workload": LlamaWorkload,  # all workloads have these keys
    "notify": NotifyTarget,
    "mirror": MirrorSection,
    "trainer": TrainerSection,
    "bytes-per-parameter": BytesPerParameter,
    "activations": TracedModeSection,
    "bytes": TracedTerm,
    "fault": SyntheticFault,
    "drift": SyntheticDrift,
    "model": ModelSizes,
}
PROGRAM_OPTIONS: Mapping[str, Any] = {
    name: workload.model_fields["options"].annotation for name, workload in WORKLOADS.items()
}


def key_table(model: type[BaseModel]) -> str:
    """The keys of a section or of a workload's options, as their fields describe them."""
    rows = [
        (
            f"`{name}`",
            _takes(field),
            "required" if field.is_required() else _default(field.default),
            meaning_of(field),
        )
        for name, field in model.model_fields.items()
    ]
    return markdown_table("key | takes | default | meaning", rows)


def option_list() -> str:
    """The options of every workload, by name."""
    rows = [
        (f"`{name}`", ", ".join(f"`{key}`" for key in options.model_fields))
        for name, options in PROGRAM_OPTIONS.items()
    ]
    return markdown_table("`name` | keys of `options`", rows)


def meaning_of(field: FieldInfo) -> str:
    """Return the description of a field. Raises ValueError if there is none."""
    if not field.description:
        raise ValueError(f"a field without a description: {field!r}")
    return field.description


def _takes(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    assert isinstance(extra, Mapping), f"a key without the values that it takes: {field!r}"
    return str(extra["takes"])


def _default(value: Any) -> str:
    """Return a default as the sweep file would have it."""
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "see there"
    if isinstance(value, (tuple, list)):
        return ", ".join(_default(item) for item in value) or "none"
    if isinstance(value, Mapping):
        return "none" if not value else str(value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
