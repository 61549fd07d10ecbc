"""The base of messages between processes: frozen, without unknown fields, with finite numbers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """A message, or a part of one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
