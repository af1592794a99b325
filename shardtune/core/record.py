"""The base of everything that we write as JSON: results of commands, reports, metrics."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen and closed; the docstring of a field becomes its description in the JSON Schema."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="null"
    )

    def to_json(self, *, indent: int | None = None, ascii_only: bool = False) -> str:
        """The record as JSON. A field that has a default and wasn't given is left out; a number
        that isn't finite is null, which every reader understands."""
        plain = json.loads(self.model_dump_json(exclude_unset=True))
        return json.dumps(plain, indent=indent, ensure_ascii=ascii_only)
