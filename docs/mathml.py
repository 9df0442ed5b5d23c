"""Converts ```math blocks to MathML, which browsers render without a script."""

from typing import Any

from latex2mathml.converter import convert


def fence(source: str, *_: Any, **__: Any) -> str:
    """Converts TeX to a display formula, for pymdownx.superfences."""
    return f'<div class="math">{convert(source, display="block")}</div>'
