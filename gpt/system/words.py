"""Formats counts, shares, sizes, and values as JSON."""

import json
import math
from typing import Any


def counted(n: int, singular: str, plural: str = "") -> str:
    """Returns ``1 step`` or ``2,000 steps``. Irregular plurals are given as ``plural``."""
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"


def percent(share: float, decimals: int = 2) -> str:
    """Returns a share as ``5.69 %``, or ``< 0.01 %`` if that would round to 0."""
    smallest = 10.0**-decimals
    return f"< {smallest:g} %" if 0 < 100 * share < smallest / 2 else f"{100 * share:.{decimals}f} %"


def format_bytes(n: float) -> str:
    """Formats bytes in decimal units, as datasheets do."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:,.1f} {unit}" if unit != "B" else f"{n:,.0f} B"
        n /= 1000
    return f"{n:,.1f} TB" if n < 1000 else f"{n:,.0f} TB"


def as_json(values: Any, ascii: bool = False) -> str:
    """Returns JSON on one line, with null for NaN and infinity."""
    try:
        return json.dumps(values, ensure_ascii=ascii, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(values), ensure_ascii=ascii)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
