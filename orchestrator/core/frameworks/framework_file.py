"""The file of a framework in a run folder: the user's keys, and those of the layout over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.frameworks.translation import TABLES, Translation


def with_settings(files: Mapping[str, Any], translation: Translation) -> dict[str, Any]:
    """Return the config files of a run folder with the framework's among them.

    `files` may have the framework's file. A key in it is kept unless the layout sets it, under this
    or another name. A framework that takes arguments has no file.
    """
    table = TABLES[translation.framework]
    if table.file is None:
        return dict(files)
    users = files.get(table.file, {})
    kept = {name: value for name, value in users.items() if name not in table.other_names}
    return {**files, table.file: _merged(kept, translation.nested())}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in over.items():
        below = found.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            found[key] = _merged(below, value)
        else:
            found[key] = value
    return found
