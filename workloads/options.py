"""The options of a request as its workload's own type, from `core.sweepfile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from orchestrator.core.sweepfile.workload_options import WorkloadOptions
from workloads.rank import ConfigRejected

_O = TypeVar("_O", bound=WorkloadOptions)


def parse_options(kind: type[_O], options: Mapping[str, Any]) -> _O:
    """Validate a request's options. Raises ConfigRejected, with every mistake and all names."""
    try:
        return kind.model_validate(dict(options))
    except ValidationError as exc:
        mistakes = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}"
            for e in exc.errors(include_url=False, include_input=False)
        )
        raise ConfigRejected(
            f"workload.options: {mistakes}. Allowed are {', '.join(kind.model_fields)}"
        ) from None
