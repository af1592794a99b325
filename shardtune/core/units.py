"""Units of memory in bytes, and figures as a person reads them."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def three_digits(value: float) -> str:
    """`0.0123`, `1.5`, `12,345`: never with an exponent where there are more."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def in_units(count: int, units: tuple[tuple[int, str], ...]) -> str:
    """`1.24 B`: three digits of the first unit, the largest first, that it comes to one of."""
    for size, name in units:
        if count >= 0.9995 * size:  # 999.9 million would be shown as a thousand
            return f"{three_digits(count / size)} {name}"
    return str(count)
