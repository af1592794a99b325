"""Kinds of values that fields of several sections have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field

Auto = Literal["auto"]
LARGEST_COUNT = 10**12
"""Of whatever is counted: more steps or tokens than any run has, and far from where 64 bits end."""

Positive = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
NotNegative = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
NotNegativeNumber = Annotated[float, Field(ge=0)]


def unless_said(kind: str) -> Discriminator:
    """Chooses by `type`; a section that has none is of this kind."""

    def chosen(value: Any) -> str:
        given = value.get("type", kind) if isinstance(value, dict) else getattr(value, "type", kind)
        return str(given)

    return Discriminator(chosen)
