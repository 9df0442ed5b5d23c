"""Turns a ```math block into MathML, which browsers draw without a script."""

from typing import Any

from latex2mathml.converter import convert


def fence(source: str, *_: Any, **__: Any) -> str:
    """Returns TeX as a displayed formula, for pymdownx.superfences."""
    return f'<div class="math">{convert(source, display="block")}</div>'
